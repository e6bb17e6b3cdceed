"""What a narrower KV cache costs in quality: next-token distributions against those with f16 keys and values.

    python -m bench.kv_quality MODEL [--windows N] [--json bench/results/kv_quality.json]

Needs the packages of requirements/test.txt and logits_cli (the target of that name). The committed text is cut into
windows of 512 tokens, each computed with every KV type; the second half of a window is compared, where a row attends to
256 to 511 quantised keys. Per type: the divergence KL(f16 || type) in nats, how often both prefer the same token, and
the perplexity.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import machine
from bench.core_logits import PROGRAM, CoreLogits
from cyengine import Model

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "tests" / "data" / "text" / "alice.txt"
TYPES = ("f16", "int8", "int4")
WINDOW = 512

Floats = npt.NDArray[np.floating[Any]]


def log_softmax(logits: Floats) -> Floats:
    """Return the log probabilities of each row, in float64."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return np.asarray(rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))


def divergence(exact: Floats, found: Floats) -> Floats:
    """Return KL(exact || found) of each row of log probabilities, in nats."""
    return np.asarray((np.exp(exact) * (exact - found)).sum(axis=1))


class Measurement:
    """The figures of one type, window by window."""

    def __init__(self) -> None:
        self.divergences: list[Floats] = []
        self.agreements: list[npt.NDArray[np.bool_]] = []
        self.surprise = 0.0

    def add(self, exact: Floats, found: Floats, targets: npt.NDArray[np.int64]) -> None:
        """Note one window: log probabilities [rows, vocab] and the tokens that came next."""
        self.divergences.append(divergence(exact, found))
        self.agreements.append(exact.argmax(axis=1) == found.argmax(axis=1))
        self.surprise -= float(found[np.arange(len(targets)), targets].sum())

    def result(self) -> dict[str, float]:
        """Return the figures over every row so far."""
        values = np.concatenate(self.divergences)
        return {
            "num_rows": len(values),
            "kl_mean": float(values.mean()),
            "kl_p99": float(np.percentile(values, 99)),
            "kl_max": float(values.max()),
            "top1_agreement": float(np.concatenate(self.agreements).mean()),
            "perplexity": math.exp(self.surprise / len(values)),
        }


def measure(model: Path, num_windows: int, num_threads: int = 0) -> dict[str, dict[str, float]]:
    """Run every type over the first windows of the text; at most as many as the text has."""
    with Model(model) as opened:
        ids = opened.encode(TEXT.read_text())
    half = WINDOW // 2
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)][:num_windows]
    cores = {name: CoreLogits(model, num_threads=num_threads, kv_type=name) for name in TYPES}
    measurements = {name: Measurement() for name in TYPES}
    try:
        for number, window in enumerate(windows):
            targets = np.asarray(window[half:])
            rows = {name: log_softmax(core.logits(window, half - 1)[:-1]) for name, core in cores.items()}
            for name, measurement in measurements.items():
                measurement.add(rows["f16"], rows[name], targets)
            print(f"\rwindow {number + 1} of {len(windows)}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    finally:
        for core in cores.values():
            core.close()
    return {name: measurement.result() for name, measurement in measurements.items()}


def main() -> None:
    """Measure, print, and write the record where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens; default: 16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not PROGRAM.exists():
        parser.error(f"{PROGRAM}: build it with `cmake --build build/dev --target logits_cli`")
    results = measure(args.model, args.windows, args.threads)
    for name, row in results.items():
        print(name, " ".join(f"{key}={value:.6g}" for key, value in row.items()))
    if args.json is not None:
        record = {
            "machine": machine.describe(),
            "model": args.model.name,
            "model_sha256": hashlib.sha256(args.model.read_bytes()).hexdigest(),
            "text": str(TEXT.relative_to(ROOT)),
            "types": results,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
