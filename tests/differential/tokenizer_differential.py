"""Compare the core's tokenizer with the models' own, id by id, on random and reported texts.

    python -m tests.differential.tokenizer_differential [--gguf DEMO.gguf] [--only NAME] [--count 100000] [--cache DIR]

Needs tokenizers, gguf and sentencepiece from PyPI, and npm. Exit code 1: some text differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import platformdirs

from cyengine import Model

from .corpus import random_texts
from .pre_tokenizers import PRE_TOKENIZERS
from .references import Reference, fetch, from_gguf, from_sentencepiece, from_tekken, from_tokenizer_json

BATCH = 5000
SENTENCEPIECE_MODEL = "mistral_common/data/tokenizer.model.v1"
TEKKEN_MODEL = "mistral_common/data/tekken_240911.json"

# Vocabularies of their own; the pre-tokenizers of the others run over qwen2's.
OWN = ("smollm", "qwen2", "llama-bpe", "deepseek-v3", "tekken", "sentencepiece")
NAMES = (*OWN, *PRE_TOKENIZERS)


def default_cache() -> Path:
    """Where the published vocabularies are kept."""
    return platformdirs.user_cache_path("xllm") / "vocabularies"


def load_reference(name: str, cache: Path, gguf: Path | None) -> Reference:
    """One of NAMES; smollm reads the vocabulary of the demo model's file."""
    if name == "smollm":
        if gguf is None:
            raise ValueError("smollm: expected the demo model's file, found none; give --gguf")
        return from_gguf(gguf)
    if name == "sentencepiece":
        return from_sentencepiece(fetch("mistral", cache), SENTENCEPIECE_MODEL)
    if name == "tekken":
        return from_tekken(fetch("mistral", cache), TEKKEN_MODEL)
    return from_tokenizer_json(name, fetch("qwen2" if name in PRE_TOKENIZERS else name, cache))


class Differences:
    """Counts what differs and prints the first few."""

    def __init__(self, name: str, num_shown: int) -> None:
        self.name = name
        self.num_shown = num_shown
        self.count = 0

    def check(self, what: str, text: str, expected: object, found: object) -> None:
        """Note one comparison."""
        if expected == found:
            return
        self.count += 1
        if self.count <= self.num_shown:
            print(f"{self.name}, {what}: {text!r}\n  expected {expected}\n  found    {found}")


def compare(reference: Reference, count: int, seed: int = 1, num_shown: int = 5) -> int:
    """Print the first differences on `count` random texts and return how many there are."""
    differences = Differences(reference.name, num_shown)
    with tempfile.TemporaryDirectory() as folder:
        model = Model(reference.vocabulary.write(Path(folder) / "vocabulary.gguf"))
    for text, ids in reference.reported.items():
        differences.check("reported text", text, ids, model.encode(text, add_special=False))
    texts = list(random_texts(count, seed))
    for begin in range(0, len(texts), BATCH):
        batch = texts[begin : begin + BATCH]
        for text, ids in zip(batch, reference.encode(batch), strict=True):
            found = model.encode(text, add_special=False)
            differences.check("ids", text, ids, found)
            if reference.normalize is not None:
                decoded = reference.normalize(model.decode(found))
                differences.check("text", text, reference.normalize(text), decoded)
        if reference.encode_parsed is None:
            continue
        for text, ids in zip(batch, reference.encode_parsed(batch), strict=True):
            found = model.encode(text, add_special=False, parse_special=True)
            differences.check("ids with special tokens", text, ids, found)
    print(f"{reference.name}: {len(texts)} texts, {differences.count} differences")
    return differences.count


def main() -> int:
    """Run every comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gguf", type=Path, help="the demo model's file")
    parser.add_argument("--only", action="append", choices=NAMES, help="may be repeated; default: all")
    parser.add_argument("--count", type=int, default=100_000, help="texts per reference")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=5, help="differences to print")
    parser.add_argument("--cache", type=Path, default=default_cache())
    args = parser.parse_args()
    total = 0
    for name in args.only or NAMES:
        total += compare(load_reference(name, args.cache, args.gguf), args.count, args.seed, args.show)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
