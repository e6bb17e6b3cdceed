"""Recorded tokens come out byte for byte, however the engine is run and whoever runs beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cyengine import Engine, EngineConfig, Model
from cyengine.types import Backend
from tests.golden.cells import Cell, all_cells, covering_cells, instruction_sets
from tests.golden.fixtures import DEMO, FIXTURES, Fixture
from tests.golden.record import Record, load, sha256
from tests.golden.run import Tokens, half, requests_of, run

ModelOf = Callable[[Fixture], Path]

TINY = [name for name in FIXTURES if name != DEMO.name]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ModelOf:
    """Return the file of a fixture, made once."""
    folder = tmp_path_factory.mktemp("golden")

    def get(fixture: Fixture) -> Path:
        if fixture.write is None:
            path: Path = request.getfixturevalue("demo_model")
            return path
        path = folder / f"{fixture.name}.gguf"
        if not path.exists():
            fixture.write(path)
        return path

    return get


def recorded(record: Record) -> Tokens:
    return record["greedy"] + record["sampled"]


@pytest.mark.parametrize("name", FIXTURES)
def test_the_model_is_the_recorded_one(model_of: ModelOf, name: str) -> None:
    assert sha256(model_of(FIXTURES[name])) == load(name)["model_sha256"]


@pytest.mark.parametrize("name", FIXTURES)
def test_a_record_tells_prompts_and_sampling_apart(name: str) -> None:
    record = load(name)
    assert len({tuple(ids) for ids in record["greedy"]}) == FIXTURES[name].num_prompts
    assert record["greedy"] != record["sampled"]


@pytest.mark.parametrize("name", TINY)
def test_the_whole_record(model_of: ModelOf, name: str) -> None:
    fixture = FIXTURES[name]
    with Engine(model_of(fixture), EngineConfig(backend=Backend.CPU)) as engine:
        assert run(engine, requests_of(fixture)).tokens == recorded(load(name))


def check_cells(path: Path, fixture: Fixture, cells: Sequence[Cell]) -> None:
    """Run half of a record's requests in each cell: the recorded tokens, and logprobs equal to the last bit."""
    requests, expected = half(requests_of(fixture)), half(recorded(load(fixture.name)))
    logprobs: list[list[float | None]] | None = None
    for cell in cells:
        with Engine(path, cell.config()) as engine:
            answers = run(engine, requests)
        assert answers.tokens == expected, cell
        logprobs = logprobs or answers.logprobs
        assert answers.logprobs == logprobs, f"{cell} against {cells[0]}"


@pytest.mark.parametrize("name", TINY)
def test_some_cells(model_of: ModelOf, name: str) -> None:
    # One on portable kernels, which are slow, and two on others; together the models see the whole covering set.
    path, at = model_of(FIXTURES[name]), TINY.index(name)
    cells = covering_cells(instruction_sets(path))
    portable = [cell for cell in cells if cell.instruction_set == "scalar"]
    others = [cell for cell in cells if cell.instruction_set != "scalar"] or portable
    chosen = [portable[at % len(portable)], *(others[(2 * at + i) % len(others)] for i in range(2))]
    check_cells(path, FIXTURES[name], chosen)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TINY)
def test_every_cell(model_of: ModelOf, name: str) -> None:
    path = model_of(FIXTURES[name])
    check_cells(path, FIXTURES[name], all_cells(instruction_sets(path)))


def test_some_cells_of_the_demo_model(model_of: ModelOf) -> None:
    path = model_of(DEMO)
    best = instruction_sets(path)[-1]
    check_cells(path, DEMO, [Cell(4, 512, 512, 2, best), Cell(2, 7, 32_768, 3, best)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_cell_of_the_demo_model(model_of: ModelOf) -> None:
    path = model_of(DEMO)
    sets = instruction_sets(path)
    check_cells(
        path, DEMO, all_cells(sets[1:]) + [cell for cell in covering_cells(sets) if cell.instruction_set == "scalar"]
    )


# Deep enough that a difference in the last bit of anything soon changes a token.
NEIGHBOURLY = ["mini-qwen2.5-1.5b-q6_k", "mini-qwen3-8b-q4_k_m", "mini-llama-3.1-8b-q5_k_m"]


@pytest.mark.parametrize("name", NEIGHBOURLY)
@pytest.mark.parametrize("chunk", [7, 512])
def test_neighbours_that_come_and_are_cancelled_change_nothing(model_of: ModelOf, name: str, chunk: int) -> None:
    fixture = FIXTURES[name]
    config = EngineConfig(backend=Backend.CPU, max_slots=5, prefill_chunk=chunk, num_threads=2, max_seq_len=512)
    with Engine(model_of(fixture), config) as engine:
        answers = run(engine, requests_of(fixture), disturb=True)
        assert answers.tokens == recorded(load(name))
        assert set(answers.slots) == set(range(5))
        assert engine.stats().num_requests_cancelled >= 3


@pytest.mark.parametrize("name", NEIGHBOURLY)
def test_a_prefix_from_the_cache_changes_nothing(model_of: ModelOf, name: str) -> None:
    fixture = FIXTURES[name]
    requests = requests_of(fixture)
    with Engine(model_of(fixture), EngineConfig(backend=Backend.CPU, max_slots=4, block_size=16)) as engine:
        first, again = run(engine, requests), run(engine, requests[::-1])
    assert first.tokens == again.tokens[::-1] == recorded(load(name))
    assert first.logprobs == again.logprobs[::-1]
    longest = max(range(len(requests)), key=lambda i: len(requests[i].prompt))
    assert again.num_cached[::-1][longest] >= 64


@pytest.mark.parametrize("name", NEIGHBOURLY)
def test_preemption_and_resumption_change_nothing(model_of: ModelOf, name: str) -> None:
    fixture = FIXTURES[name]
    pairs = zip(requests_of(fixture), recorded(load(name)), strict=True)
    short = [(request, tokens) for request, tokens in pairs if len(request.prompt) <= 65]
    config = EngineConfig(backend=Backend.CPU, max_slots=8, block_size=16, max_seq_len=128, prefill_chunk=64)
    with Model(model_of(fixture)) as model:
        block_bytes = model.plan(config).kv_bytes_per_token * config.block_size
    # Pools that hold the prompts which start together, but not always what they grow to: it depends on who came first.
    num_preemptions = 0
    for num_blocks in range(13, 25):
        with Engine(model_of(fixture), replace(config, kv_memory=block_bytes * num_blocks)) as engine:
            assert run(engine, [request for request, _ in short]).tokens == [tokens for _, tokens in short], num_blocks
            num_preemptions += engine.stats().num_preemptions
    assert num_preemptions > 0
