"""DecodeMode in process: every cell of the table, engine by requested mode by call, and what refusals leave alone."""

import pathlib
from collections.abc import Callable

import pytest

from cyengine import DecodeMode, Engine, EngineConfig, FinishedEvent, Request, Slot, SlotState, TokenEvent, errors
from cyengine.types import Backend

AUTO, BATCHED, PER_SLOT = DecodeMode.AUTO, DecodeMode.BATCHED, DecodeMode.PER_SLOT
TABLE = {
    (BATCHED, AUTO): BATCHED,
    (BATCHED, BATCHED): BATCHED,
    (BATCHED, PER_SLOT): None,
    (PER_SLOT, AUTO): PER_SLOT,
    (PER_SLOT, BATCHED): None,
    (PER_SLOT, PER_SLOT): PER_SLOT,
    (AUTO, AUTO): BATCHED,
    (AUTO, BATCHED): BATCHED,
    (AUTO, PER_SLOT): PER_SLOT,
}
PROMPT = [1, 2, 3, 4]

SLOT_CALLS: dict[str, tuple[DecodeMode, Callable[[Engine, Slot], object]]] = {
    "xllm_engine_decode_slot": (
        PER_SLOT,
        lambda engine, slot: engine.submit_decode_slot(slot, Request(max_tokens=1), private=True),
    ),
    "xllm_engine_decode_batch": (
        BATCHED,
        lambda engine, slot: engine.submit_decode_batch([(slot, Request(max_tokens=1))], private=True),
    ),
    "xllm_engine_decode_step_slot": (PER_SLOT, lambda engine, slot: engine.decode_step_slot(slot)),
    "xllm_engine_decode_step_batch": (BATCHED, lambda engine, slot: engine.decode_step_batch([slot])),
}


ENGINES = [
    pytest.param((backend, mode), id=f"{backend.name}-{mode.name}", marks=[pytest.mark.gpu] * (backend is Backend.CUDA))
    for backend in (Backend.CPU, Backend.CUDA)
    for mode in (AUTO, BATCHED, PER_SLOT)
]


@pytest.fixture(scope="module", params=ENGINES)
def engine_of_mode(request: pytest.FixtureRequest, tiny_model: pathlib.Path) -> tuple[DecodeMode, Engine]:
    backend, mode = request.param
    config = EngineConfig(backend=backend, num_threads=1, decode_mode=mode, kv_memory=4 << 20)
    return mode, Engine(tiny_model, config)


@pytest.mark.parametrize("requested", [AUTO, BATCHED, PER_SLOT], ids=lambda mode: mode.name)
@pytest.mark.parametrize("call", ["xllm_engine_submit", "xllm_engine_acquire", *SLOT_CALLS])
def test_each_cell(engine_of_mode: tuple[DecodeMode, Engine], requested: DecodeMode, call: str) -> None:
    mode, engine = engine_of_mode
    effective = TABLE[mode, requested]

    def refused(act: Callable[[], object], asked: DecodeMode, entry: str | None = None) -> None:
        before = engine.stats()
        with pytest.raises(errors.DecodeModeMismatchError) as caught:
            act()
        told = caught.value.details
        assert (told["engine_mode"], told["requested_mode"], told["call"]) == (mode.name, asked.name, call)
        assert told["remedy"]
        assert told.get("entry") == entry
        after = engine.stats()
        assert (after.slots_used, after.num_generated_tokens) == (before.slots_used, before.num_generated_tokens)

    if call == "xllm_engine_submit":
        request = Request(PROMPT, max_tokens=1, decode_mode=requested)
        if effective is None:
            refused(lambda: engine.submit(request), requested)
            return
        events = list(engine.stream(request))
        assert events[0].decode_mode is effective  # type: ignore[union-attr]
        assert isinstance(events[-1], FinishedEvent)
        return
    if effective is None:
        if call == "xllm_engine_acquire":
            refused(lambda: engine.acquire(requested), requested)
        else:
            with pytest.raises(errors.DecodeModeMismatchError):
                engine.acquire(requested)
        return
    slot = engine.acquire(requested)
    try:
        assert slot.decode_mode is engine.slot(slot.index).decode_mode is effective
        if call == "xllm_engine_acquire":
            return
        engine.prefill(slot, PROMPT)
        api, act = SLOT_CALLS[call]
        if api is not effective:
            refused(lambda: act(engine, slot), api, "0" if "batch" in call else None)
            info = engine.slot(slot.index)
            assert (info.state, info.num_tokens, info.request_id) == (SlotState.READY, len(PROMPT), None)
            return
        done = act(engine, slot)
        for request_id in [done] if isinstance(done, int) else done if isinstance(done, list) else []:
            if isinstance(request_id, int):
                events = []
                while not events or not isinstance(events[-1], FinishedEvent):
                    events += engine.take_events(request_id, -1.0)
                assert sum(isinstance(event, TokenEvent) for event in events) == 1
        assert engine.slot(slot.index).num_tokens == len(PROMPT) + 1
    finally:
        engine.release(slot)
