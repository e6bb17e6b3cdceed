"""Writes the records anew: the only way in which they change.

    python -m tests.golden.record [--backend cuda] [NAME...]

Prints what differs from the records as they were. A changed record needs a line in the changelog that says why. Those
of a GPU are made on one of its class and lie in a folder of the class's name, such as records/sm_90.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypedDict

from cyengine import Engine, EngineConfig
from cyengine.types import Backend
from tests.golden.cells import Cell
from tests.golden.fixtures import FIXTURES, Fixture
from tests.golden.run import Tokens, requests_of, run

FOLDER = Path(__file__).parent / "records"
#: The plainest cell, on portable kernels.
PLAIN = Cell(batch=1, chunk=512, cap=512, threads=1, instruction_set="scalar")
#: The same of a GPU, in a small part of its memory.
PLAIN_CUDA = EngineConfig(backend=Backend.CUDA, max_slots=1, max_seq_len=512, kv_memory=1 << 26)


class Record(TypedDict):
    """A record file.

    Attributes:
        model_sha256: Of the model file: a fixture that changed is told apart from an engine that did.
        greedy: Ids of every prompt, greedily.
        sampled: Ids of every prompt, drawn from a seed.
    """

    model_sha256: str
    greedy: Tokens
    sampled: Tokens


def sha256(path: Path) -> str:
    """Return the hash of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make(fixture: Fixture, path: Path, config: EngineConfig) -> tuple[Record, str]:
    """Run a plain cell; the record, and the kernels that made it."""
    with Engine(path, config) as engine:
        tokens = run(engine, requests_of(fixture)).tokens
        kernels = engine.info.kernels
    record: Record = {
        "model_sha256": sha256(path),
        "greedy": tokens[: fixture.num_prompts],
        "sampled": tokens[fixture.num_prompts :],
    }
    return record, kernels


def load(name: str) -> Record:
    """Read a record: a fixture's name, for a GPU behind its class and a slash."""
    record: Record = json.loads((FOLDER / f"{name}.json").read_text())
    return record


def save(name: str, record: Record) -> None:
    """Write a record, one line per prompt."""
    lines = [
        f'  "{kind}": [\n' + ",\n".join(f"    {json.dumps(ids)}" for ids in tokens) + "\n  ]"
        for kind, tokens in (("greedy", record["greedy"]), ("sampled", record["sampled"]))
    ]
    text = "{\n" + ",\n".join([f'  "model_sha256": "{record["model_sha256"]}"', *lines]) + "\n}\n"
    path = FOLDER / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def differences(old: Record, new: Record) -> list[str]:
    """Say where two records part."""
    out = [] if old["model_sha256"] == new["model_sha256"] else ["the model file is another one"]
    for kind, before, after in (
        ("greedy", old["greedy"], new["greedy"]),
        ("sampled", old["sampled"], new["sampled"]),
    ):
        if len(before) != len(after):
            out.append(f"{kind}: {len(before)} prompts became {len(after)}")
        for i, (left, right) in enumerate(zip(before, after, strict=False)):
            if left != right:
                at = next((k for k, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), -1)
                out.append(f"{kind} prompt {i}, from token {at} on: {left[at:]} became {right[at:]}")
    return out


def demo_model() -> Path:
    """Fetch the demo model, once, and return its path."""
    pull = [sys.executable, "-m", "xllm_service", "pull", "smollm2-135m"]
    done = subprocess.run(pull, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Record the named fixtures, or all."""
    parser = argparse.ArgumentParser(description="Write the golden records anew and print what changes.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIXTURES)}; default: all")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    is_cuda = args.backend == "cuda"
    names = args.names or [name for name in FIXTURES if not is_cuda or FIXTURES[name].write is not None]
    for name in names:
        if name not in FIXTURES:
            parser.error(f"{name} is not a fixture; known are {', '.join(FIXTURES)}")
    for name in names:
        fixture = FIXTURES[name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.gguf"
            if fixture.write is None:
                path = demo_model()
            else:
                fixture.write(path)
            record, kernels = make(fixture, path, PLAIN_CUDA if is_cuda else PLAIN.config())
        place = f"{kernels}/{name}" if is_cuda else name
        is_new = not (FOLDER / f"{place}.json").exists()
        changes = ["new"] if is_new else differences(load(place), record)
        save(place, record)
        print(f"{place}: {'; '.join(changes) or 'unchanged'}", flush=True)


if __name__ == "__main__":
    main()
