"""Keys and values in 8 and 4 bits on a GPU: near the reference, and the same bytes whatever else runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cyengine import Engine, EngineConfig, KvType
from cyengine.types import Backend
from tests.golden.fixtures import FIXTURES
from tests.golden.run import half, requests_of, run
from tests.gpu.test_engine import POOL, errors_of
from tests.tools.make_tiny_gguf import make_tiny_gguf

pytestmark = pytest.mark.gpu

# Relative L2 error of logits at the worst position: the bounds of tests/core/forward_test.cc.
BOUNDS = {KvType.INT8: 3e-2, KvType.INT4: 5e-1}
CUDA = EngineConfig(backend=Backend.CUDA, kv_memory=POOL, max_slots=1, max_seq_len=512)


@pytest.mark.parametrize("kv_type", BOUNDS, ids=lambda kv_type: kv_type.name.lower())
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_logits_are_near_those_of_the_reference(tmp_path: Path, arch: str, head_dim: int, kv_type: KvType) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, arch=arch, dtype="q8_0", tied=False, head_dim=head_dim)
    with Engine(path, replace(CUDA, kv_type=kv_type)) as engine:
        assert engine.info.kv_type == kv_type
        worst = max(errors_of(path, engine))
    with Engine(path, CUDA) as engine:
        f16 = max(errors_of(path, engine))
    print(f"{kv_type.name.lower()} {arch}, heads of {head_dim}: worst {worst:.3g}, f16 {f16:.3g}")
    assert f16 < worst <= BOUNDS[kv_type]


@pytest.mark.parametrize("kv_type", BOUNDS, ids=lambda kv_type: kv_type.name.lower())
@pytest.mark.parametrize("name", ["mini-qwen2.5-1.5b-q6_k", "mini-llama-3.1-8b-q5_k_m"])
def test_tokens_do_not_depend_on_what_else_runs(tmp_path: Path, name: str, kv_type: KvType) -> None:
    path = tmp_path / "model.gguf"
    write = FIXTURES[name].write
    assert write is not None
    write(path)
    requests = half(requests_of(FIXTURES[name]))
    with Engine(path, replace(CUDA, kv_type=kv_type)) as engine:
        alone = run(engine, requests)
    for slots, chunk, block_size in ((1, 1, 64), (1, 64, 16), (5, 7, 16), (8, 512, 32)):
        config = replace(CUDA, kv_type=kv_type, max_slots=slots, prefill_chunk=chunk, block_size=block_size)
        with Engine(path, config) as engine:
            answers = run(engine, requests, disturb=slots > 1)
        assert answers.tokens == alone.tokens, config
        assert answers.logprobs == alone.logprobs, config
