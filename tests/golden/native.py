"""Holds a core without Python, such as a cross-built one under an emulator, to the golden records.

    python -m tests.golden.native [--command "qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu"] [--program FILE]
                                  [--sets scalar neon] [--jobs N] [--json FILE] [NAME...]

Every model of the gate answers the requests of its record through generate_cli (a program of tests/tools), once with
each instruction set: the tokens must be the recorded ones, and the logprobs of all sets equal to the last bit. The two
quantised types of keys and values have no records: there the sets are held to the first of them. Cells differ in
threads, chunks and slots from set to set, since none of them may matter. The demo model is large for an emulator, and
answers with the last set alone. Ends with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.machine import ROOT, describe
from cyengine import Request, SamplingParams
from tests.golden.fixtures import FIXTURES, Fixture
from tests.golden.record import demo_model, load, sha256
from tests.golden.run import Tokens, half, requests_of

PROGRAM = ROOT / "build" / "aarch64" / "tests" / "tools" / "generate_cli"
EMULATOR = "qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu"
#: Whose quantised keys and values are looked at: deep enough that a difference in the last bit soon shows.
KV_NAMES = ("mini-qwen2.5-1.5b-q6_k", "mini-llama-3.1-8b-q5_k_m")


@dataclass(frozen=True)
class Cell:
    """How a set is run; the kernels are its own."""

    threads: int
    chunk: int
    slots: int


CELLS = (Cell(1, 512, 1), Cell(2, 7, 4), Cell(3, 64, 8))


@dataclass(frozen=True)
class Runner:
    """A generate_cli and what starts it.

    Attributes:
        command: Words in front of the program: an emulator, or nothing.
        program: generate_cli, built.
    """

    command: tuple[str, ...]
    program: Path

    def run(
        self, model: Path, requests: Sequence[Request], instruction_set: str, cell: Cell, kv_type: str = "f16"
    ) -> tuple[str, Tokens, list[list[float]]]:
        """Return the kernels in use, and the tokens and logprobs of each request.

        Raises subprocess.CalledProcessError where the program fails.
        """
        arguments = [instruction_set, str(cell.chunk), str(cell.slots), kv_type]
        done = subprocess.run(
            [*self.command, str(self.program), str(model), str(cell.threads), *arguments],
            input="".join(_line(request) for request in requests),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        kernels, *lines = done.stdout.splitlines()
        tokens: Tokens = []
        logprobs: list[list[float]] = []
        for line in lines:
            count, *words = line.split()
            tokens.append([int(word) for word in words[::2]])
            logprobs.append([struct.unpack(">f", bytes.fromhex(word))[0] for word in words[1::2]])
            assert len(tokens[-1]) == len(logprobs[-1]) == int(count)
        assert len(tokens) == len(requests)
        return kernels, tokens, logprobs


def _line(request: Request) -> str:
    """Return a request as generate_cli reads it."""
    s: SamplingParams = request.sampling
    params = [s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.seed or 0]
    return " ".join(map(str, [request.max_tokens, *params, len(request.prompt), *request.prompt])) + "\n"


def check_fixture(
    runner: Runner, fixture: Fixture, path: Path, sets: Sequence[str], kv_type: str = "f16"
) -> Iterator[dict[str, object]]:
    """Run a model with every set and yield a row for each: what was run, and what came out equal."""
    record = load(fixture.name)
    requests = requests_of(fixture)
    expected = record["greedy"] + record["sampled"] if kv_type == "f16" else None
    if expected is None:
        requests = half(requests)
    first: list[list[float]] | None = None
    for i, name in enumerate(sets):
        cell = CELLS[i % len(CELLS)]
        kernels, tokens, logprobs = runner.run(path, requests, name, cell, kv_type)
        if expected is None:
            expected = tokens
        first = first or logprobs
        yield {
            "model": fixture.name,
            "is_recorded_model": sha256(path) == record["model_sha256"],
            "kv_type": kv_type,
            "kernels": kernels,
            "threads": cell.threads,
            "chunk": cell.chunk,
            "slots": cell.slots,
            "num_requests": len(requests),
            "num_tokens": sum(map(len, tokens)),
            "held_to": "record" if kv_type == "f16" else sets[0],
            "num_equal_requests": sum(a == b for a, b in zip(tokens, expected, strict=True)),
            "logprobs_equal_first_set": logprobs == first,
        }


def is_equal(row: dict[str, object]) -> bool:
    """Return whether a row shows no difference."""
    return (
        row["is_recorded_model"] is True
        and row["num_equal_requests"] == row["num_requests"]
        and row["logprobs_equal_first_set"] is True
    )


def check_model(runner: Runner, name: str, sets: Sequence[str]) -> list[dict[str, object]]:
    """Make a model of the gate, or fetch it, and return the rows of all its types of keys and values."""
    fixture = FIXTURES[name]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.gguf"
        if fixture.write is None:
            path, sets = demo_model(), sets[-1:]
        else:
            fixture.write(path)
        for kv_type in ("f16", "int8", "int4") if name in KV_NAMES else ("f16",):
            for row in check_fixture(runner, fixture, path, sets, kv_type):
                rows.append(row)
                print(f"{name} {kv_type} {row['kernels']}: {'equal' if is_equal(row) else row}", flush=True)
    return rows


def _version(command: Sequence[str]) -> str:
    done = subprocess.run([*command, "--version"], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[0]


def main() -> int:
    """Check the named models, or all, and write what was found."""
    parser = argparse.ArgumentParser(description="Hold a core without Python to the golden records.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a model of the gate; default: all")
    parser.add_argument("--command", default=EMULATOR, help="what runs the program; empty: nothing (%(default)s)")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="generate_cli (%(default)s)")
    parser.add_argument("--sets", nargs="+", default=["scalar", "neon"], help="instruction sets (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models at a time (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go")
    args = parser.parse_args()
    for name in args.names:
        if name not in FIXTURES:
            parser.error(f"{name} is not a model of the gate; known are {', '.join(FIXTURES)}")
    if not args.program.exists():
        parser.error(f"{args.program}: build it with `cmake --build --preset aarch64`")
    runner = Runner(tuple(shlex.split(args.command)), args.program.resolve())
    with ThreadPoolExecutor(args.jobs) as pool:
        models = pool.map(lambda name: check_model(runner, name, args.sets), args.names or FIXTURES)
        rows = [row for rows_of_model in models for row in rows_of_model]
    num_different = sum(not is_equal(row) for row in rows)
    if args.json is not None:
        result = {
            "machine": describe(),
            "command": shlex.join(runner.command),
            "emulator": _version(runner.command[:1]) if runner.command else None,
            "num_different": num_different,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
