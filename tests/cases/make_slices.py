"""Writes tests/data/vocabularies/: the few tokens and merges of published vocabularies that the cases' texts can use.

    python -m tests.cases.make_slices

Fetches the vocabularies (pinned, hash-checked, into a cache outside the repository) and lets the models' own tokenizers
say the ids. A merge can play a part in a text only if what it makes stands in the text; so a slice that keeps every
token and merge whose text does encodes these texts as the whole vocabulary would. Ids in the files are the published
ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.differential.references import Reference
from tests.differential.tokenizer_differential import default_cache, load_reference
from tests.differential.vocabulary import CONTROL, USER_DEFINED
from tests.tools.tiny_vocab import byte_alphabet

FOLDER = Path(__file__).resolve().parents[1] / "data" / "vocabularies"
NAMES = (
    "llama-bpe",
    "qwen2",
    "gpt-2",
    "starcoder",
    "falcon",
    "tekken",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
)

DIGITS = """Shelf 90210 holds 6045331|0|12|123|1234|12345678901234567|3.14159 1,000,000|a1b22c333d4444|٣٤٥٦٧|²³⁴ Ⅷ|
    1\n22\n333|-1 +22 1e10|2024-11-29T17:42:33Z"""
CONTRACTIONS = """WE'RE here, she'D said|we're they've I'll I'm he'd it's don't|WE'RE THEY'VE I'LL I'M HE'D IT'S DON'T|
    'Tis 'twas 'S 's's ''s|rock'n'roll o'clock l'eau|it’s IT’S|'re're 'RE'RE|x'lL y'Ve z'rE"""
SPACES = [
    "a \n\n  b\n",
    "t\r\n\r\n\tu",
    " ",
    "  ",
    "   x",
    "x   ",
    "x\n\n\ny",
    "x \n y",
    "\n \n \n",
    "\t\tif\t(x)",
    "a\u00a0\u00a0b",
]
SPACES += [
    "\r\n\r\n",
    "x  \r\n  y",
    "1  2   3",
    "!\n\n?\n",
    "... \n\n...",
    "\u3000日本\u3000\u3000語",
    "a\x0b\x0cb",
    "end. \n",
]
WORDS = [
    " fotoğraf kulübü",
    "fotoğraf",
    " kulübü",
    " FOTOĞRAF",
    " naïve café",
    "İstanbul'da",
    " Привет, мир!",
    "你好，世界",
]
WORDS += [
    "if ( 'ok' ) ; x != y",
    "e\u0301 \u212b \uac00",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "http://a.b/c?d=e&f=1",
]
ADDED = [
    "wait <tool_call> now",
    "<|im_start|>x",
    "<tool_call></tool_call>",
    "<tool_call",
    " <tool_call>\n",
    "<|endoftext|>",
]
ADDED += ["<|begin_of_text|>hi<|eot_id|>", "x</tool_call>y<|im_end|>"]


def texts() -> list[str]:
    """Return every text of the cases about pre-tokenizers and whole words."""
    lines = "|".join((DIGITS, CONTRACTIONS)).split("|")
    return [line.strip(" ").removeprefix("\n    ") for line in lines] + SPACES + WORDS + ADDED


def in_byte_alphabet(text: str) -> str:
    """Return how a byte-level vocabulary writes a text."""
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


def slice_of(reference: Reference, chosen: list[str]) -> dict[str, Any]:
    """Return what the texts need of a vocabulary, and their ids by the model's own tokenizer."""
    vocabulary = reference.vocabulary
    normalize = reference.normalize or str
    haystack = "\n".join(in_byte_alphabet(normalize(text)) for text in chosen)
    single = set(byte_alphabet())
    tokens = [
        [i, token, kind]
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if token in single or token in haystack or (kind in (CONTROL, USER_DEFINED) and "reserved" not in token)
    ]
    merges = [merge for merge in vocabulary.merges if merge.replace(" ", "") in haystack]
    ids = reference.encode(chosen)
    return {"pre": vocabulary.pre, "tokens": tokens, "merges": merges, "ids": dict(zip(chosen, ids, strict=True))}


def dump(content: dict[str, Any]) -> str:
    """Return JSON with a few entries per line, so that a change shows as one."""

    def lines(items: list[str], per_line: int) -> str:
        rows = [", ".join(items[i : i + per_line]) for i in range(0, len(items), per_line)]
        return "\n    " + ",\n    ".join(rows) + "\n  "

    def text(value: object) -> str:
        return json.dumps(value, ensure_ascii=True)

    parts = [
        f'  "pre": {text(content["pre"])}',
        f'  "tokens": [{lines([text(token) for token in content["tokens"]], 8)}]',
        f'  "merges": [{lines([text(merge) for merge in content["merges"]], 10)}]',
        f'  "ids": {{{lines([f"{text(key)}: {text(ids)}" for key, ids in content["ids"].items()], 1)}}}',
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Write every slice anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    chosen = texts()
    for name in NAMES:
        path = FOLDER / f"{name}.json"
        path.write_text(dump(slice_of(load_reference(name, default_cache(), None), chosen)))
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
