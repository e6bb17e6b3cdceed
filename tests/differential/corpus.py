"""Seeded random texts that visit every corner of a pre-tokenizer's rules."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator

FRAGMENTS = (
    "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'Ve 'LL 'D 'x ' '' \u2019s '\u017f we're WE'RE she'D "
    "hello Hello HELLO helloWorld straße naïve Ελληνικά русский мир עברית العربية हिन्दी ไทย 中文 日本語 "
    "ひらがな カタカナ 한국어 한글 fotoğraf ＡＢＣ １２３ ﬁ ǅ ʰ ª º ½ ² Ⅷ 〇 一 龥 ٣ 10 123 4567 90210 6045331 3.14 "
    "1,000 a1b2 x_y __init__ if(x){ }; // /* */ -> => != == ... !!! ?! $100 €5 # ## @me 100% C++ "
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f3fd ❤\ufe0f ★ "
    "\u0301 e\u0301 e\u0323\u0301 \u1e69 s\u0323\u0307 \u0344 \u212b \u2126 \uac00 \u1100\u1161\u11a8 "
    "\u0958 \u2000 \ufb1d \u0f73 q\u0307\u0323 \u200b \u200d \ufeff \u00ad \u202e <tool_call> "
    "</tool_call> <|im_start|> <|im_end|> <|endoftext|> <|eot_id|> <s> </s> <unk> [INST] <0x0A> \u2581 "
    "http://a.b/c?d=e&f=1 user@example.org C:\\dir\\file"
).split()
SPACES: tuple[str, ...] = (" ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", " \n", "\n ", " \n\n  ", "\t\t")
SPACES += ("\u00a0", "\u3000", "\u2003", "\u0085", "\u2028", "\x0b", "\x0c", "\x1c", "\x00", " \r\n \t")


def by_category() -> dict[str, list[str]]:
    """Every scalar value, grouped by its general category."""
    groups: dict[str, list[str]] = {}
    for code in range(0x110000):
        if not 0xD800 <= code <= 0xDFFF:
            groups.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    return groups


def random_texts(count: int, seed: int) -> Iterator[str]:
    """Yield `count` texts of mixed kinds; the same ones for the same seed."""
    rng = random.Random(seed)
    groups = by_category()
    names = sorted(groups)

    def any_char() -> str:
        return rng.choice(groups[rng.choice(names)])

    def piece() -> str:
        kind = rng.random()
        if kind < 0.40:
            return rng.choice(FRAGMENTS)
        if kind < 0.65:
            return rng.choice(SPACES)
        if kind < 0.75:
            return any_char()
        if kind < 0.85:
            return chr(rng.randrange(0x20, 0x7F))
        if kind < 0.90:
            return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(9)))
        if kind < 0.95:
            return chr(rng.choice((rng.randrange(0x250), rng.randrange(0x300, 0x370))))
        return rng.choice((any_char(), rng.choice(" \n\r1a.\t"), "ab")) * rng.randrange(2, 40)

    for index in range(count):
        if index % 500 == 499:
            yield any_char() * rng.randrange(50, 400)
        elif index % 10 == 9:
            yield "".join(any_char() for _ in range(rng.randrange(1, 20)))
        else:
            yield "".join(piece() for _ in range(rng.randrange(1, 16)))
