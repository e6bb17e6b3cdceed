"""A core without Python is held to the records; here the one of this machine, so that the way there stays open."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.machine import ROOT
from tests.golden import native
from tests.golden.fixtures import FIXTURES
from tests.golden.record import Record, load

PROGRAM = ROOT / "build" / "dev" / "tests" / "tools" / "generate_cli"
FIXTURE = FIXTURES["tiny-qwen2-q4_k"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    if not PROGRAM.exists():
        pytest.skip("not built: cmake --build build/dev --target generate_cli")
    assert FIXTURE.write is not None
    path = tmp_path / "model.gguf"
    FIXTURE.write(path)
    return path


def test_every_set_gives_the_record(model: Path) -> None:
    rows = list(native.check_fixture(native.Runner((), PROGRAM), FIXTURE, model, ["scalar", "best"]))
    assert [native.is_equal(row) for row in rows] == [True, True]
    assert rows[0]["kernels"] == "scalar"
    assert rows[0]["num_tokens"] == 2 * FIXTURE.num_prompts * FIXTURE.num_tokens


def test_one_other_token_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = load(FIXTURE.name)
    sampled = [list(ids) for ids in record["sampled"]]
    sampled[3][-1] += 1
    changed: Record = {**record, "sampled": sampled}
    monkeypatch.setattr(native, "load", lambda name: changed)
    (row,) = native.check_fixture(native.Runner((), PROGRAM), FIXTURE, model, ["best"])
    assert not native.is_equal(row)
    assert row["num_equal_requests"] == 2 * FIXTURE.num_prompts - 1
