"""Compare the core's tokenizer with the models' own, id by id, on random and real texts.

    python tests/differential/tokenizer_differential.py --cli build/.../tokenizer_cli \\
        [--gguf DEMO.gguf] [--only NAME] [--count 100000] [--seed 1] [--cache DIR]

Needs tokenizers, gguf and sentencepiece from PyPI, and npm. Exit code 1: some text differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from corpus import random_texts
from pre_tokenizers import PRE_TOKENIZERS
from references import Reference, fetch, from_gguf, from_sentencepiece, from_tokenizer_json
from vocab_file import encode_all

BATCH = 5000
MISTRAL_MODEL = "mistral_common/data/tokenizer.model.v1"


def references(args: argparse.Namespace) -> Iterator[Reference]:
    """The references asked for; those that need a file not given are left out, by name."""
    for name in args.only or ("smollm", "qwen2", "llama-bpe", "sentencepiece", *PRE_TOKENIZERS):
        if name == "smollm":
            if args.gguf is None:
                print("smollm: left out, --gguf not given", file=sys.stderr)
                continue
            yield from_gguf(args.gguf)
        elif name == "sentencepiece":
            yield from_sentencepiece(fetch("mistral", args.cache), MISTRAL_MODEL)
        else:
            archive = fetch("qwen2" if name in PRE_TOKENIZERS else name, args.cache)
            yield from_tokenizer_json(name, archive)


def compare(reference: Reference, args: argparse.Namespace) -> int:
    """Print the first differences and return how many texts differ."""
    num_different = 0
    texts = list(random_texts(args.count, args.seed))
    for begin in range(0, len(texts), BATCH):
        batch = texts[begin : begin + BATCH]
        expected = reference.encode(batch)
        answers = encode_all(args.cli, reference.vocabulary, batch)
        for text, ids, answer in zip(batch, expected, answers, strict=True):
            if ids == answer.ids:
                continue
            num_different += 1
            if num_different <= args.show:
                print(f"{reference.name}: {text!r}\n  expected {ids}\n  found    {answer.ids}")
    print(f"{reference.name}: {len(texts)} texts, {num_different} differ")
    return num_different


def main() -> int:
    """Run every comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cli", type=Path, required=True, help="tokenizer_cli, built")
    parser.add_argument("--gguf", type=Path, help="the demo model's file")
    parser.add_argument("--only", action="append", help="a reference's name; may be repeated")
    parser.add_argument("--count", type=int, default=100_000, help="texts per reference")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=5, help="differences to print")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/xllm-tests")
    args = parser.parse_args()
    return 1 if sum(compare(reference, args) for reference in references(args)) else 0


if __name__ == "__main__":
    sys.exit(main())
