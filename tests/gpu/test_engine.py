"""The engine on a GPU, through the whole core: the library is loaded, logits are held to the float64 reference.

Needs a CUDA device, and cuBLAS for the per-slot form (`pip install xllm[cuda]`): `python -m pytest tests/gpu` on such a
machine. `scripts/gpu_check.sh` checks the kernels alone.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from cyengine import DecodeMode, Engine, EngineConfig, Request, SamplingParams, SlotStep, TokenEvent, errors
from cyengine.types import Backend
from tests.reference.forward import load
from tests.tools.make_tiny_gguf import make_tiny_gguf

pytestmark = pytest.mark.gpu

# Relative L2 error of a logit vector against float64: asked for is 2e-2. On an H200 the worst position of all cases
# stood at 6.4e-3, the worst median at 4e-3.
WORST_ERROR = 1e-2
MEDIAN_ERROR = 6e-3
PER_SLOT_ERROR = 1e-5
PROMPT = [5, 17, 130, 42, 7, 99, 3, 201, 64, 12, 8, 77]
# A small pool: by default the first engine takes nine tenths of the device.
POOL = 1 << 26
CUDA = EngineConfig(backend=Backend.CUDA, kv_memory=POOL)
PER_SLOT = dataclasses.replace(CUDA, decode_mode=DecodeMode.PER_SLOT)


def tokens(engine: Engine, request: Request) -> list[int]:
    return [event.token_id for event in engine.stream(request) if isinstance(event, TokenEvent)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("gpu") / "tiny.gguf"
    make_tiny_gguf(path, arch="qwen3", dtype="q8_0", tied=False)
    return path


@pytest.fixture
def engine(model: pathlib.Path) -> Iterator[Engine]:
    with Engine(model, CUDA) as made:
        yield made


ARCHS = ["llama", "qwen2", "qwen3"]
DTYPES = [
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0",
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
]  # fmt: skip


def errors_of(path: pathlib.Path, engine: Engine, num_steps: int = 8) -> list[float]:
    """Prefill, then decode `num_steps` tokens; each step's relative L2 error against float64."""
    slot = engine.acquire()
    engine.prefill(slot, PROMPT)
    history = list(PROMPT)
    reference = load(path)
    found = []
    for _ in range(num_steps):
        step: SlotStep
        if slot.decode_mode is DecodeMode.PER_SLOT:
            step = engine.decode_step_slot(slot, logits=True)
        else:
            (step,) = engine.decode_step_batch([slot], logits=True)
        expected = reference.logits(history)[-1]
        assert step.logits is not None
        logits = np.frombuffer(step.logits, dtype="<f4").astype(np.float64)
        found.append(float(np.linalg.norm(logits - expected) / np.linalg.norm(expected)))
        history.append(step.token_id)
    engine.release(slot)
    return found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_those_of_the_reference(tmp_path: pathlib.Path, arch: str, dtype: str) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, arch=arch, dtype=dtype, tied=False)
    with Engine(path, CUDA) as engine:
        found = errors_of(path, engine)
    print(f"batched {arch} {dtype}: worst {max(found):.3g}, median {np.median(found):.3g}")
    assert max(found) <= WORST_ERROR
    assert float(np.median(found)) <= MEDIAN_ERROR


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_per_slot_logits_are_those_of_the_reference(tmp_path: pathlib.Path, arch: str, dtype: str) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, arch=arch, dtype=dtype, tied=arch == "llama", qkv_bias=arch == "qwen2")
    with Engine(path, PER_SLOT) as engine:
        found = errors_of(path, engine)
    print(f"per-slot {arch} {dtype}: worst {max(found):.3g}")
    assert max(found) <= PER_SLOT_ERROR


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_a_prompt_change_nothing_in_the_per_slot_form(model: pathlib.Path, chunk: int) -> None:
    request = Request(prompt=[(3 * j) % 250 for j in range(150)], max_tokens=16, ignore_eos=True)
    with Engine(model, PER_SLOT) as whole:
        expected = tokens(whole, request)
    with Engine(model, dataclasses.replace(PER_SLOT, prefill_chunk=chunk)) as other:
        assert tokens(other, request) == expected


def test_an_auto_engine_loads_each_form_on_first_use(model: pathlib.Path) -> None:
    request = Request(prompt=PROMPT, max_tokens=12, ignore_eos=True)
    with Engine(model, CUDA) as batched, Engine(model, PER_SLOT) as per_slot:
        alone = {
            mode: tokens(e, request) for mode, e in ((DecodeMode.BATCHED, batched), (DecodeMode.PER_SLOT, per_slot))
        }
    with Engine(model, dataclasses.replace(CUDA, decode_mode=DecodeMode.AUTO)) as auto:
        assert auto.info.plan.raw_weight_bytes > 0 and auto.info.plan.dequantized_weight_bytes > 0
        for mode in (DecodeMode.PER_SLOT, DecodeMode.BATCHED, DecodeMode.PER_SLOT):
            assert tokens(auto, dataclasses.replace(request, decode_mode=mode)) == alone[mode]


@pytest.mark.parametrize("first", [DecodeMode.BATCHED, DecodeMode.PER_SLOT])
def test_a_stream_goes_on_with_its_bytes_while_the_other_form_is_loaded(model: pathlib.Path, first: DecodeMode) -> None:
    second = DecodeMode.PER_SLOT if first is DecodeMode.BATCHED else DecodeMode.BATCHED
    steady = Request(prompt=PROMPT, max_tokens=200, ignore_eos=True, decode_mode=first)
    other = Request(prompt=PROMPT[::-1], max_tokens=12, ignore_eos=True, decode_mode=second)
    alone = {}
    for request in (steady, other):
        with Engine(model, dataclasses.replace(CUDA, decode_mode=request.decode_mode)) as engine:
            alone[request.decode_mode] = tokens(engine, request)
    # A step after each piece of the load.
    with Engine(model, dataclasses.replace(CUDA, decode_mode=DecodeMode.AUTO, max_token_gap_s=1e-6)) as auto:
        stream = (event for event in auto.stream(steady) if isinstance(event, TokenEvent))
        begun = [next(stream).token_id for _ in range(2)]
        assert tokens(auto, other) == alone[second]
        assert begun + [event.token_id for event in stream] == alone[first]


def test_the_second_form_of_an_auto_engine_is_refused_where_it_does_not_fit(model: pathlib.Path) -> None:
    with Engine(model, CUDA) as batched, Engine(model, PER_SLOT) as per_slot:
        needs = [engine.info.plan.total_bytes for engine in (batched, per_slot)]
    limit = max(needs) + min(needs) // 2
    config = dataclasses.replace(CUDA, decode_mode=DecodeMode.AUTO, memory_limit=limit)
    with Engine(model, config) as auto:
        assert len(tokens(auto, Request(prompt=PROMPT, max_tokens=2, ignore_eos=True))) == 2
        with pytest.raises(errors.MemoryLimitError) as caught:
            auto.submit(Request(prompt=PROMPT, max_tokens=2, decode_mode=DecodeMode.PER_SLOT))
        assert {"bytes_needed", "bytes_free", "remedy"} <= set(caught.value.details)
        assert len(tokens(auto, Request(prompt=PROMPT, max_tokens=2, ignore_eos=True))) == 2


def test_a_request_has_the_same_tokens_alone_and_in_company(engine: Engine) -> None:
    requests = [
        Request(
            prompt=[(7 * i + j) % 250 for j in range(20 + 31 * i)],
            max_tokens=24,
            ignore_eos=True,
            sampling=SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i),
        )
        for i in range(8)
    ]
    alone = [tokens(engine, request) for request in requests]
    ids = [engine.submit(request, private=True) for request in requests]
    together = []
    for request_id in ids:
        found: list[int] = []
        while len(found) < 24:
            events = engine.take_events(request_id, 60.0)
            found += [event.token_id for event in events if isinstance(event, TokenEvent)]
        together.append(found)
    assert together == alone


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_a_prompt_change_nothing(model: pathlib.Path, engine: Engine, chunk: int) -> None:
    request = Request(prompt=[(3 * j) % 250 for j in range(150)], max_tokens=16, ignore_eos=True)
    with Engine(model, EngineConfig(backend=Backend.CUDA, kv_memory=POOL, prefill_chunk=chunk)) as other:
        assert tokens(other, request) == tokens(engine, request)


def test_memory_does_not_depend_on_the_longest_sequence(model: pathlib.Path) -> None:
    def plan(max_seq_len: int) -> tuple[int, int, int]:
        config = EngineConfig(backend=Backend.CUDA, max_seq_len=max_seq_len, allow_long_context=True, kv_memory=POOL)
        with Engine(model, config) as engine:
            found = engine.info.plan
            return found.total_bytes, found.scratch_bytes, found.kv_pool_bytes

    assert plan(512) == plan(131_072)


def test_what_does_not_fit_is_refused_at_creation(model: pathlib.Path) -> None:
    with pytest.raises(errors.MemoryLimitError) as caught:
        Engine(model, EngineConfig(backend=Backend.CUDA, memory_limit=1 << 16))
    assert {"bytes_needed", "bytes_free", "remedy"} <= set(caught.value.details)
