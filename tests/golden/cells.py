"""What must not change a token: one cell for each combination."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cyengine import Engine, EngineConfig, XllmError
from cyengine.types import Backend

BATCHES = (1, 2, 4, 8)
CHUNKS = (1, 7, 64, 512)
CAPS = (512, 32_768)
THREADS = (1, 2, 3)


@dataclass(frozen=True)
class Cell:
    """One way to run the engine; the fields are those of EngineConfig."""

    batch: int
    chunk: int
    cap: int
    threads: int
    instruction_set: str

    def config(self) -> EngineConfig:
        """Return the engine's options: as many slots as requests may decode at once."""
        return EngineConfig(
            backend=Backend.CPU,
            max_slots=self.batch,
            prefill_chunk=self.chunk,
            max_seq_len=self.cap,
            allow_long_context=True,
            num_threads=self.threads,
            instruction_set=self.instruction_set,
        )


def all_cells(instruction_sets: Sequence[str]) -> list[Cell]:
    """Return every cell."""
    return [Cell(*values) for values in itertools.product(BATCHES, CHUNKS, CAPS, THREADS, instruction_sets)]


def covering_cells(instruction_sets: Sequence[str]) -> list[Cell]:
    """Return a few cells in which every two values of different dimensions meet; always the same ones."""
    cells, chosen = all_cells(instruction_sets), []
    missing = set().union(*(_pairs(cell) for cell in cells))
    while missing:
        best = max(cells, key=lambda cell: len(_pairs(cell) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[tuple[int, object], ...]]:
    values = enumerate((cell.batch, cell.chunk, cell.cap, cell.threads, cell.instruction_set))
    return set(itertools.combinations(values, 2))


@cache
def instruction_sets(model: Path) -> tuple[str, ...]:
    """Return what this build and CPU run, scalar first; what the CPU has and every build knows must be among it."""
    found = []
    for name in ("scalar", "avx2", "avx512", "neon"):
        try:
            Engine(model, EngineConfig(backend=Backend.CPU, instruction_set=name)).close()
        except XllmError:
            continue
        found.append(name)
    assert found[:1] == ["scalar"]
    if platform.machine() == "x86_64" and " avx2 " in Path("/proc/cpuinfo").read_text():
        assert "avx2" in found
    return tuple(found)
