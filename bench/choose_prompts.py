"""Choose the prompts of comparisons: those whose greedy continuations are least in doubt, of many kinds.

    python -m bench.choose_prompts MODEL [--json bench/results/prompt_gaps.json]

Greedy tokens of two engines can be compared only where rounding does not decide them, so the float64 reference alone
says which of bench/prompt_candidates.py are used: it continues each by NUM_TOKENS tokens and notes the smallest gap
between its two best logits on the way. The NUM_PROMPTS largest are chosen, at most MOST_OF_A_KIND of one kind. No
engine runs here; only the model's vocabulary is read through the core. bench/prompts.py holds the result; this script
prints it, and ends with 1 where the file says otherwise.

Needs the packages of requirements/test.txt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.prompt_candidates import CANDIDATES
from bench.prompts import MOST_OF_A_KIND, NUM_PROMPTS, NUM_TOKENS, PROMPTS, SMALLEST_GAP, is_chat
from cyengine import Model
from tests.reference.forward import ReferenceModel, load
from tests.reference.rope import F64

# Below SMALLEST_GAP, so that a near miss shows its smallest gap and not its first small one.
GIVE_UP_BELOW = 0.2


def top_two_gaps(model: ReferenceModel, prompt: Sequence[int], at_least: float) -> list[float]:
    """The gaps of a greedy continuation's steps, up to the first one below `at_least`."""
    gaps: list[float] = []
    for logits in islice(model.greedy_steps(prompt), NUM_TOKENS):
        gaps.append(gap_of(logits))
        if gaps[-1] < at_least:
            break
    return gaps


def gap_of(logits: F64) -> float:
    """The distance between the two largest."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def choose(smallest: dict[tuple[str, str], float]) -> list[tuple[str, str]]:
    """The chosen (kind, text), in the order in which `smallest` has them."""
    chosen: list[tuple[str, str]] = []
    for candidate in sorted(smallest, key=lambda candidate: smallest[candidate], reverse=True):
        num_alike = sum(kind == candidate[0] for kind, _ in chosen)
        if len(chosen) < NUM_PROMPTS and num_alike < MOST_OF_A_KIND:
            chosen.append(candidate)
    return [candidate for candidate in smallest if candidate in chosen]


def measure(model: ReferenceModel, vocabulary: Model) -> Iterable[tuple[str, str, list[float]]]:
    """Yield (kind, text, gaps) of every candidate."""
    for kind, texts in CANDIDATES.items():
        for text in texts:
            prompt = vocabulary.encode(text, parse_special=is_chat(kind))
            yield kind, text, top_two_gaps(model, prompt, GIVE_UP_BELOW)


def main() -> None:
    """Measure, choose, print and compare with bench/prompts.py."""
    parser = argparse.ArgumentParser(description="Choose the prompts of comparisons by the float64 reference alone.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path, default=None, help="also write every candidate's gaps to this file")
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []
    smallest: dict[tuple[str, str], float] = {}
    with Model(args.model) as vocabulary:
        for kind, text, gaps in measure(load(args.model), vocabulary):
            is_decisive = len(gaps) == NUM_TOKENS and min(gaps) >= SMALLEST_GAP
            if is_decisive:
                smallest[kind, text] = min(gaps)
            rows.append({"kind": kind, "text": text, "num_steps": len(gaps), "smallest_gap": round(min(gaps), 3)})
            print(f"{min(gaps):7.3f} after {len(gaps):2}  {kind:22} {text[-60:]!r}", file=sys.stderr, flush=True)
    chosen = choose(smallest)
    for kind, text in chosen:
        print(f"    ({json.dumps(kind)}, {json.dumps(text, ensure_ascii=False)}),")
    if args.json is not None:
        document = {"model": args.model.name, "num_tokens": NUM_TOKENS, "candidates": rows}
        args.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if chosen != list(PROMPTS):
        print("bench/prompts.py holds other ones", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
