"""The tokenizer beside llama.cpp's on one model file, id by id, over the texts of tests/differential.

    python -m bench.compare_llama_ids MODEL [--count 100000] [--json bench/results/compare_llama_ids.json]

Texts visit every Unicode category, emoji sequences, line ends of every kind and long runs; control tokens are not
recognised in them. Where the two differ, the model's own tokenizer (Hugging Face `tokenizers`, built from the file)
decides, and the count says for whom. Needs requirements/test.txt and requirements/peer.txt. Ends with 1 where ours is
not the model's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench import machine
from bench.llama_cpp import LlamaCpp
from cyengine import Model
from tests.differential.corpus import random_texts
from tests.differential.references import from_gguf


def compare(path: Path, count: int, seed: int, num_shown: int) -> dict[str, Any]:
    """Encode every text with both, and those that differ with the model's own tokenizer."""
    own = from_gguf(path)
    num_different = num_ours_wrong = num_peer_wrong = 0
    with Model(path) as model, LlamaCpp(path, 1, 8) as peer:
        for text in random_texts(count, seed):
            ours, theirs = model.encode(text, add_special=False), peer.encode(text, add_special=False)
            if ours == theirs:
                continue
            num_different += 1
            (right,) = own.encode([text])
            num_ours_wrong += ours != right
            num_peer_wrong += theirs != right
            if num_different <= num_shown:
                print(f"{text!r}\n  xLLM      {ours}\n  llama.cpp {theirs}\n  its own   {right}")
        version = peer.version
    return {
        "machine": machine.describe(),
        "model": path.name,
        "peer": version,
        "texts": count,
        "different": num_different,
        "ours_differ_from_the_models_own": num_ours_wrong,
        "peers_differ_from_the_models_own": num_peer_wrong,
    }


def main() -> int:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description="Compare token ids with llama.cpp's on the same model file.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=5, help="differences to print")
    parser.add_argument("--json", type=Path, default=None, help="also write the result to this file")
    args = parser.parse_args()
    result = compare(args.model, args.count, args.seed, args.show)
    print(
        f"{result['texts']} texts, {result['different']} different: xLLM not the model's own in "
        f"{result['ours_differ_from_the_models_own']}, llama.cpp in {result['peers_differ_from_the_models_own']}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["ours_differ_from_the_models_own"] else 0


if __name__ == "__main__":
    sys.exit(main())
