"""DecodeMode: the whole table of what an engine does with a requested mode, over the wire and in process.

Every cell is engine x requested x call x way. A refusal says why in a form for programs, and changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

import cyengine
from cyengine.errors import DecodeModeMismatchError as CoreMismatchError
from cyengine.types import AcceptedEvent, EngineConfig, EngineStats, Event, FinishedEvent, Request, SlotInfo, Status
from cyengine.types import DecodeMode as CoreMode
from tests.e2e.serving import eventually, is_idle, serving, stats
from tests.e2e.slot_calls import Slots
from tests.tools.make_tiny_gguf import make_tiny_gguf
from xllm_client import AsyncClient, DecodeMode, DecodeModeMismatchError
from xllm_service.app import Server

AUTO, BATCHED, PER_SLOT = DecodeMode.AUTO, DecodeMode.BATCHED, DecodeMode.PER_SLOT
TABLE = [
    (BATCHED, AUTO, BATCHED),
    (BATCHED, BATCHED, BATCHED),
    (BATCHED, PER_SLOT, None),
    (PER_SLOT, AUTO, PER_SLOT),
    (PER_SLOT, BATCHED, None),
    (PER_SLOT, PER_SLOT, PER_SLOT),
    (AUTO, AUTO, BATCHED),
    (AUTO, BATCHED, BATCHED),
    (AUTO, PER_SLOT, PER_SLOT),
]
# What takes a mode of its own, and what runs on a slot that was acquired with it.
ON_A_SLOT = ("Prefill", "DecodeSlot", "DecodeBatch")
CALLS = ("Generate", "GenerateOnce", "EstimateGeneration", "AcquireSlot", *ON_A_SLOT)
STEP_CALLS = ("DecodeSlotStep", "DecodeBatchStep")
TAKES = {"DecodeSlot": PER_SLOT, "DecodeSlotStep": PER_SLOT, "DecodeBatch": BATCHED, "DecodeBatchStep": BATCHED}
PROMPT = [5, 6, 7]


@dataclass
class Refusal:
    """A refusal, whichever way it came: the facts for programs, and the text for people."""

    metadata: Mapping[str, str]
    text: str


@dataclass
class Way:
    """An engine and one way to call it. `run` returns the mode in effect, or the refusal."""

    call_names: Mapping[str, str] = field(default_factory=dict)
    held: Any = None

    async def acquire(self, requested: DecodeMode) -> DecodeMode | Refusal:
        raise NotImplementedError

    async def run(self, call: str, requested: DecodeMode) -> DecodeMode | Refusal:
        raise NotImplementedError

    def state(self) -> Any:
        raise NotImplementedError


class _Snapshots(Protocol):
    def stats(self) -> EngineStats: ...
    def slots(self) -> list[SlotInfo]: ...


def snapshot(engine: _Snapshots) -> Any:
    """What a refusal must not change: what was computed, and every slot."""
    now = engine.stats()
    slots = [
        (one.slot, one.epoch, one.state, one.decode_mode, one.num_tokens, one.num_blocks) for one in engine.slots()
    ]
    counts = (now.num_prompt_tokens, now.num_generated_tokens, now.slots_used, now.blocks_used, now.num_waiting)
    return counts, slots


class Wire(Way):
    """Through gRPC."""

    def __init__(self, server: Server, client: AsyncClient) -> None:
        super().__init__({call: call for call in CALLS})
        self.server, self.client, self.slots = server, client, Slots(client)

    def state(self) -> Any:
        return snapshot(self.server.served.get("").engine)

    async def acquire(self, requested: DecodeMode) -> DecodeMode | Refusal:
        try:
            self.held, slot = await self.slots.acquire(decode_mode=requested)
        except DecodeModeMismatchError as error:
            return Refusal(error.metadata, str(error))
        return DecodeMode(slot.decode_mode)

    async def run(self, call: str, requested: DecodeMode) -> DecodeMode | Refusal:
        options: dict[str, Any] = {"max_tokens": 2, "decode_mode": requested}
        try:
            match call:
                case "Generate":
                    return DecodeMode((await self.client.generate(PROMPT, **options).result()).accepted.decode_mode)
                case "GenerateOnce":
                    return DecodeMode((await self.client.generate_once(PROMPT, **options)).accepted.decode_mode)
                case "EstimateGeneration":
                    return DecodeMode((await self.client.estimate(PROMPT, **options)).decode_mode)
                case "Prefill":
                    done = (await self.slots.prefill(self.held, token_ids={"ids": PROMPT}))[-1].finished
                    return DecodeMode(done.slot.decode_mode)
                case "DecodeSlot":
                    return DecodeMode((await self.slots.decode(self.held, 2))[0].accepted.decode_mode)
                case _:
                    accepted = (await self.slots.batch([self.held], 2))[0].accepted
                    return DecodeMode(accepted.entries[0].decode_mode)
        except DecodeModeMismatchError as error:
            return Refusal(error.metadata, str(error))


class InProcess(Way):
    """Through cyengine."""

    def __init__(self, engine: cyengine.Engine) -> None:
        super().__init__(
            {
                "Generate": "xllm_engine_submit",
                "AcquireSlot": "xllm_engine_acquire",
                "DecodeSlot": "xllm_engine_decode_slot",
                "DecodeBatch": "xllm_engine_decode_batch",
                "DecodeSlotStep": "xllm_engine_decode_step_slot",
                "DecodeBatchStep": "xllm_engine_decode_step_batch",
            }
        )
        self.engine = engine

    def state(self) -> Any:
        return snapshot(self.engine)

    async def acquire(self, requested: DecodeMode) -> DecodeMode | Refusal:
        try:
            self.held = self.engine.acquire(CoreMode(requested))
        except CoreMismatchError as error:
            return Refusal(error.details, error.message)
        return DecodeMode(self.held.decode_mode)

    def _effective(self, request_id: int) -> DecodeMode:
        events: list[Event] = []
        while not any(isinstance(event, FinishedEvent) for event in events):
            events += self.engine.take_events(request_id, 10.0)
        assert isinstance(events[-1], FinishedEvent) and events[-1].status is Status.OK
        assert isinstance(events[0], AcceptedEvent)
        return DecodeMode(events[0].decode_mode)

    async def run(self, call: str, requested: DecodeMode) -> DecodeMode | Refusal:
        decode = Request(max_tokens=2)
        engine, held = self.engine, self.held
        try:
            match call:
                case "Generate":
                    request = Request(prompt=PROMPT, max_tokens=2, decode_mode=CoreMode(requested))
                    return self._effective(engine.submit(request, private=True))
                case "Prefill":
                    return self._effective(engine.submit_prefill(held, PROMPT, private=True))
                case "DecodeSlot":
                    return self._effective(engine.submit_decode_slot(held, decode, private=True))
                case "DecodeBatch":
                    return self._effective(engine.submit_decode_batch([(held, decode)], private=True)[0])
                case "DecodeSlotStep":
                    engine.decode_step_slot(held)
                case _:
                    engine.decode_step_batch([held])
        except CoreMismatchError as error:
            return Refusal(error.details, error.message)
        return DecodeMode(held.decode_mode)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_tiny_gguf(path)
    return path


@contextlib.asynccontextmanager
async def calling(way: str, engine: DecodeMode, model: Path, folder: Path) -> AsyncIterator[Way]:
    if way == "gRPC":
        mode = engine.name.lower().replace("_", "-")
        async with serving(model, folder, decode_mode=mode, max_slots=2) as (server, client):
            yield Wire(server, client)
            await eventually(lambda: server.gate.num_calls == 0)
    else:
        config = EngineConfig(decode_mode=CoreMode(engine), max_slots=2, kv_memory=4 << 20)
        with cyengine.Engine(model, config) as core:
            yield InProcess(core)


CELLS = [
    (way, engine, requested, effective, call)
    for way, calls in (
        ("gRPC", CALLS),
        ("in process", ("Generate", "AcquireSlot", *ON_A_SLOT, *STEP_CALLS)),
    )
    for engine, requested, effective in TABLE
    for call in calls
]


@pytest.mark.parametrize(
    ("way", "engine", "requested", "effective", "call"),
    CELLS,
    ids=[f"{way}-{engine.name}-{requested.name}-{call}" for way, engine, requested, _, call in CELLS],
)
async def test_each_cell_of_the_table(
    model: Path,
    tmp_path: Path,
    way: str,
    engine: DecodeMode,
    requested: DecodeMode,
    effective: DecodeMode | None,
    call: str,
) -> None:
    async with calling(way, engine, model, tmp_path) as it:
        refused_in, wanted = call, requested
        before = it.state()
        if call == "AcquireSlot":
            outcome = await it.acquire(requested)
        elif call not in ON_A_SLOT + STEP_CALLS:
            outcome = await it.run(call, requested)
        elif effective is None:  # the slot's mode is fixed when it is acquired: that is where the cell is refused
            outcome, refused_in = await it.acquire(requested), "AcquireSlot"
        else:
            assert await it.acquire(requested) == effective
            if call != "Prefill":
                assert await it.run("Prefill", requested) == effective
            if TAKES.get(call, effective) != effective:  # the other API's call on this slot
                wanted, effective_here = TAKES[call], None
            else:
                effective_here = effective
            before = it.state()
            outcome = await it.run(call, requested)
            effective = effective_here
        if effective is not None:
            assert outcome == effective
            return
        assert isinstance(outcome, Refusal), f"not refused: {outcome}"
        told = outcome.metadata
        assert (told["engine_mode"], told["requested_mode"]) == (engine.name, wanted.name)
        assert told["call"] == it.call_names[refused_in] and told["call"] in outcome.text
        assert told["remedy"] and told["remedy"] in outcome.text
        assert it.state() == before, "a refusal changes nothing"


@pytest.mark.parametrize("engine", [BATCHED, PER_SLOT, AUTO])
async def test_the_engines_own_mode_is_told(model: Path, tmp_path: Path, engine: DecodeMode) -> None:
    name = engine.name.lower().replace("_", "-")
    async with serving(model, tmp_path, decode_mode=name) as (_, client):
        assert DecodeMode((await client.models())[0].decode_mode) is engine
        plan = (await client.get_model()).plan
        assert DecodeMode(plan.decode_mode) is engine
        assert [DecodeMode(weights.decode_mode) for weights in plan.weight_sets] == (
            [BATCHED, PER_SLOT] if engine is AUTO else [engine]
        )


@pytest.mark.parametrize("by_slot", [False, True])
async def test_auto_loads_each_weight_set_on_its_first_use(model: Path, tmp_path: Path, by_slot: bool) -> None:
    async with serving(model, tmp_path, decode_mode="auto") as (server, client):

        async def loaded() -> list[DecodeMode]:
            plan = (await client.get_model()).plan
            return [DecodeMode(weights.decode_mode) for weights in plan.weight_sets if weights.is_loaded]

        async def use(mode: DecodeMode) -> None:
            if by_slot:
                ref, _ = await Slots(client).acquire(decode_mode=mode)
                await Slots(client).prefill(ref, token_ids={"ids": PROMPT})
                await Slots(client).release(ref)
            else:
                await client.generate_once(PROMPT, max_tokens=1, decode_mode=mode)

        assert await loaded() == []
        await use(PER_SLOT)
        assert await loaded() == [PER_SLOT]
        await use(AUTO)
        assert await loaded() == [BATCHED, PER_SLOT]
        await eventually(lambda: is_idle(server))


@pytest.mark.parametrize("call", ["Generate", "AcquireSlot"])
async def test_a_value_outside_the_enum_is_an_invalid_argument(model: Path, tmp_path: Path, call: str) -> None:
    async with serving(model, tmp_path) as (server, client):
        with pytest.raises(Exception, match="DecodeMode") as caught:
            if call == "Generate":
                await client.generate_once(PROMPT, decode_mode=9)  # type: ignore[arg-type]
            else:
                await Slots(client).acquire(decode_mode=9)
        assert getattr(caught.value, "reason", "") == "INVALID_FIELD"
        assert stats(server).slots_used == 0
