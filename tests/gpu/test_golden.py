"""The byte-equality gate on a GPU: the same tokens whatever the batch, the chunk, the cap and who samples.

Records belong to a device class: `python -m tests.golden.record --backend cuda` makes those of the one at hand. Where
there is none, the cells are held to the first of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cyengine import Engine
from tests.golden.fixtures import FIXTURES
from tests.golden.record import FOLDER, PLAIN_CUDA, load, sha256
from tests.golden.run import Tokens, half, requests_of, run

pytestmark = pytest.mark.gpu

NAMES = [name for name, fixture in FIXTURES.items() if fixture.write is not None]
# Slots, rows of a prefill chunk, cap: every two values of different columns meet once.
CELLS = [(1, 512, 512), (1, 1, 32_768), (2, 7, 512), (2, 64, 32_768), (4, 7, 32_768), (8, 64, 512), (8, 512, 32_768)]


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_gives_the_same_tokens(tmp_path: Path, name: str) -> None:
    fixture = FIXTURES[name]
    path = tmp_path / "model.gguf"
    assert fixture.write is not None
    fixture.write(path)
    requests, expected = requests_of(fixture), None
    for slots, chunk, cap in CELLS:
        config = replace(PLAIN_CUDA, max_slots=slots, prefill_chunk=chunk, max_seq_len=cap, allow_long_context=True)
        with Engine(path, config) as engine:
            if expected is None:
                expected = recorded(f"{engine.info.kernels}/{name}", path) or run(engine, requests).tokens
            assert run(engine, half(requests)).tokens == half(expected), config
            # Without logprobs the device chooses.
            on_device = [replace(request, num_logprobs=None) for request in half(requests)]
            assert run(engine, on_device, disturb=slots > 2).tokens == half(expected), config


def recorded(name: str, model: Path) -> Tokens | None:
    """Return a record's tokens; nothing where the device class has none yet: then the first cell stands for it."""
    if not (FOLDER / f"{name}.json").exists():
        return None
    record = load(name)
    assert sha256(model) == record["model_sha256"]
    return record["greedy"] + record["sampled"]
