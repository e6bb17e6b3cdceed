"""Quantised keys and values are as indifferent to what else runs as those in f16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cyengine import Engine, EngineConfig, KvType, Model, Request, errors
from cyengine.types import Backend
from tests.golden.cells import covering_cells, instruction_sets
from tests.golden.fixtures import FIXTURES
from tests.golden.run import Answers, half, requests_of, run
from tests.tools.make_tiny_gguf import make_tiny_gguf

# Deep enough that a difference in the last bit of anything soon changes a logprob.
NAMES = ("mini-qwen2.5-1.5b-q6_k", "mini-llama-3.1-8b-q5_k_m")
TYPES = (KvType.INT8, KvType.INT4)

ALONE = EngineConfig(backend=Backend.CPU, max_slots=1, max_seq_len=512, num_threads=1)

Case = tuple[Path, KvType, Sequence[Request], Answers]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    fixture = FIXTURES[request.param]
    path = tmp_path_factory.mktemp("kv") / "model.gguf"
    assert fixture.write is not None
    fixture.write(path)
    return fixture.name, path


@pytest.fixture(scope="module", params=TYPES, ids=lambda kv_type: kv_type.name.lower())
def case(request: pytest.FixtureRequest, model: tuple[str, Path]) -> Case:
    """A model and type with its requests, and what they give one by one."""
    name, path = model
    requests = half(requests_of(FIXTURES[name]))
    with Engine(path, replace(ALONE, kv_type=request.param)) as engine:
        assert engine.info.kv_type == request.param
        alone = run(engine, requests)
    return path, request.param, requests, alone


def check(answers: Answers, expected: Answers, what: object) -> None:
    assert answers.tokens == expected.tokens, what
    assert answers.logprobs == expected.logprobs, what


def test_the_type_is_used(case: Case) -> None:
    path, kv_type, requests, alone = case
    with Engine(path, replace(ALONE, kv_type=KvType.F16)) as engine:
        assert run(engine, requests).logprobs != alone.logprobs
    with Model(path) as model:
        info = model.info
        per_head = {KvType.INT8: info.head_dim, KvType.INT4: info.head_dim // 2}[kv_type] + info.head_dim // 32 * 2
        plan = model.plan(EngineConfig(backend=Backend.CPU, kv_type=kv_type, kv_memory=1 << 22))
        # The codes and their scales, and no wider copy of them.
        assert plan.kv_bytes_per_token == info.num_layers * 2 * info.num_kv_heads * per_head
        assert plan.kv_num_blocks == (1 << 22) // (plan.kv_bytes_per_token * plan.block_size)
        assert plan.kv_pool_bytes == plan.kv_num_blocks * plan.kv_bytes_per_token * plan.block_size


def test_cells(case: Case) -> None:
    path, kv_type, requests, alone = case
    cells = covering_cells(instruction_sets(path))
    portable = [cell for cell in cells if cell.instruction_set == "scalar"]
    others = [cell for cell in cells if cell.instruction_set != "scalar"] or portable
    for cell in others[:: max(1, len(others) // 3)]:
        with Engine(path, replace(cell.config(), kv_type=kv_type)) as engine:
            check(run(engine, requests), alone, cell)
    # Portable kernels are slow: the shortest prompts will do.
    chosen = [i for i, request in enumerate(requests) if len(request.prompt) <= 33]
    with Engine(path, replace(portable[0].config(), kv_type=kv_type)) as engine:
        answers = run(engine, [requests[i] for i in chosen])
    assert answers.tokens == [alone.tokens[i] for i in chosen]
    assert answers.logprobs == [alone.logprobs[i] for i in chosen]


def test_neighbours_and_cached_prefixes(case: Case) -> None:
    path, kv_type, requests, alone = case
    config = EngineConfig(
        backend=Backend.CPU,
        max_slots=5,
        prefill_chunk=7,
        block_size=16,
        num_threads=2,
        max_seq_len=512,
        kv_type=kv_type,
    )
    with Engine(path, config) as engine:
        check(run(engine, requests, disturb=True), alone, "neighbours")
        again = run(engine, requests[::-1])
    assert again.tokens[::-1] == alone.tokens
    assert again.logprobs[::-1] == alone.logprobs
    assert max(again.num_cached) >= 64


def test_preemption(case: Case) -> None:
    path, kv_type, requests, alone = case
    chosen = [i for i, request in enumerate(requests) if len(request.prompt) <= 65]
    config = EngineConfig(
        backend=Backend.CPU, max_slots=8, block_size=16, max_seq_len=128, prefill_chunk=64, kv_type=kv_type
    )
    with Model(path) as model:
        block_bytes = model.plan(config).kv_bytes_per_token * config.block_size
    num_preemptions = 0
    for num_blocks in range(6, 19, 2):
        with Engine(path, replace(config, kv_memory=block_bytes * num_blocks)) as engine:
            answers = run(engine, [requests[i] for i in chosen])
            num_preemptions += engine.stats().num_preemptions
        assert answers.tokens == [alone.tokens[i] for i in chosen], num_blocks
        assert answers.logprobs == [alone.logprobs[i] for i in chosen], num_blocks
    assert num_preemptions > 0


def test_a_head_that_groups_do_not_divide_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path)  # heads of 16
    for kv_type in TYPES:
        with (
            Model(path) as model,
            pytest.raises(errors.InvalidArgumentError, match=r"kv_type.*multiple of 32.*f16"),
        ):
            model.plan(EngineConfig(backend=Backend.CPU, kv_type=kv_type))
