"""The command line of the synthesiser."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from bench.synthesize import MIXES, SHAPES, miniature, synthesize


def main() -> None:
    """Parse the arguments and write one file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.synthesize",
        description="Write a GGUF file of a real model's exact shape, with random weights.",
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("mix", choices=MIXES, help="which types, as llama-quantize mixes them")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--miniature", action="store_true", help="the same rules in a file of about a megabyte")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    start = time.perf_counter()
    tensors = synthesize(args.path, miniature(shape) if args.miniature else shape, args.mix, args.seed)
    types = Counter(tensor.dtype for tensor in tensors)
    size = args.path.stat().st_size
    print(f"{args.path}: {size} bytes, {dict(sorted(types.items()))}, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
