"""Byte-level BPE vocabularies of any size: unique synthetic words, and merges that really build them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from bench.synthesize.model import TokenizerShape

_NORMAL, _UNUSED = 1, 5
#: By frequency in English, so that the words of a small vocabulary are those that text asks for. Ġ is a space.
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
_SPACE = "Ġ"


def byte_alphabet() -> list[str]:
    """Return GPT-2's character for each byte: itself where it prints, else the next free one from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    out, num_others = [], 0
    for byte in range(256):
        out.append(chr(byte) if byte in prints else chr(0x100 + num_others))
        num_others += byte not in prints
    return out


def _words() -> Iterator[str]:
    """Yield words by length: every part of a word that has no space within comes before it."""
    for length in (2, 3, 4, 5):
        for first in (_SPACE, *_LETTERS):
            for rest in product(_LETTERS, repeat=length - 1):
                yield first + "".join(rest)


def make_vocab(shape: TokenizerShape) -> tuple[list[str], list[int], list[str]]:
    """Return tokens, their types and merges, best first.

    Raises:
        ValueError: num_merges cannot be reached with that many words.
    """
    tokens = byte_alphabet()
    for word in _words():
        if len(tokens) == shape.num_words:
            break
        tokens.append(word)
    known = set(tokens)
    num_extra = shape.num_merges - (shape.num_words - 256)
    merges = []
    for word in tokens[256:]:
        ways = [f"{word[:i]} {word[i:]}" for i in range(len(word) - 1, 0, -1) if {word[:i], word[i:]} <= known]
        taken = ways[: 1 + max(num_extra, 0)]
        num_extra -= len(taken) - 1
        merges += taken
    if num_extra != 0 or len(tokens) != shape.num_words:
        raise ValueError(f"{shape.num_words} words cannot have {shape.num_merges} merges")
    types = [_NORMAL] * len(tokens)
    tokens += [special.text for special in shape.specials]
    types += [special.kind for special in shape.specials]
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(shape.num_padding)]
    types += [_UNUSED] * shape.num_padding
    return tokens, types, merges
