"""Whatever ends a call, at whatever moment: its resources come back, its receipt is right, and nobody else notices.

Five moments by five ways. Moments are states that last until the test acts: a queue behind calls that never end, a
prompt of a hundred thousand steps, an answer of as many tokens, a server that drains; and the last token, which the
engine has chosen while the test still keeps the news of it back. No cell depends on the clock, but for deadlines, which
are late on purpose. What happens inside the step loop at each of these moments is in tests/core.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from cyengine.types import Event, SlotState, TokenEvent
from tests.e2e.serving import eventually, is_idle, serving_around, stats
from tests.e2e.slot_calls import Slots
from tests.fault.held_core import HeldCore
from xllm_client import NO_RETRY, AsyncClient, XllmError
from xllm_client.v1 import generation_service_pb2, slot_pb2
from xllm_service.app import Server

MOMENTS = ["queued", "prefill", "decode", "last_token", "draining"]
WAYS = ["client_cancel", "disconnect", "deadline", "cancel_generation", "lease_expiry"]
FEW, MANY = 2, 200

LONG = 100_000
DEADLINE_S = 0.3  # until it is found to miss the moment
State = generation_service_pb2.GenerationState

_numbers = itertools.count()
soon = functools.partial(eventually, timeout_s=100)  # a machine that is busy elsewhere takes its time


class Bystander:
    """A stream that goes on all the while; what it says is known."""

    def __init__(self, client: AsyncClient, alone: str) -> None:
        self._alone = alone
        self._text = ""
        self._stream = client.generate("the world", **BYSTANDER, max_tokens=LONG)
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for event in self._stream:
            if event.kind == "delta":
                self._text += event.text

    async def moves(self) -> None:
        """Wait until it has said something more."""
        length = len(self._text)
        await soon(lambda: self._task.done() or len(self._text) > length)
        assert not self._task.done(), "it goes on"

    async def check_and_end(self) -> None:
        """Its bytes are those it has alone."""
        await self.moves()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        length = min(len(self._text), len(self._alone))
        assert length > 0 and self._text[:length] == self._alone[:length]


BYSTANDER: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True}


class Wire:
    """A TCP connection to the server that can be torn: the server's side sees a reset, not an end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wire:
        # note: an address of its own: gRPC remembers for a while that connecting to another one failed.
        number = next(_numbers)
        host = f"127.1.{number // 250 % 250}.{1 + number % 250}"
        self._server = await asyncio.start_server(self._connected, host, 0)
        self.endpoint = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.tear()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, up_writer]
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.ensure_future(self._carry(source, sink))
            self._tasks.add(task)

    @staticmethod
    async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    def tear(self) -> None:
        """Reset both sides."""
        for writer in self._writers:
            end = writer.get_extra_info("socket")
            if end is not None and end.fileno() >= 0:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()


@dataclass
class Stage:
    """A served model, the slot calls on it, and its engine's held events."""

    server: Server
    client: AsyncClient
    core: HeldCore
    alone: str

    @property
    def engine(self) -> Any:
        return self.server.served.get("").engine


@asynccontextmanager
async def staged(model: Path, folder: Path, **settings: Any) -> AsyncIterator[Stage]:
    cores: list[HeldCore] = []

    def wrap(core: Any) -> Any:
        cores.append(HeldCore(core))
        return cores[0]

    listen = [f"unix:{folder}/s/x.sock", "127.0.0.1:0"]
    options = {"kv_memory": "256MiB", "prefill_chunk": 4, "listen": listen, **settings}
    async with serving_around(model, folder, wrap, options) as (server, client):
        alone = await client.generate_once("the world", **BYSTANDER, max_tokens=4000)
        yield Stage(server, client, cores[0], alone.text)


async def ended(call: Any) -> grpc.StatusCode | None:
    """How a call ended for its client; None: as it should."""
    try:
        await call
    except XllmError as error:
        return error.code
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED
    return None


async def cell(stage: Stage, moment: str, way: str, variant: int, deadline_s: float, num_outputs: int = 1) -> float:
    """Bring a call to a moment, end it in a way, and look at everything.

    Returns 0, or what to multiply the deadline with where it missed the moment: it came before, or was refused as one
    that cannot be met; or the prompt was done before it came.
    """
    server, client, core = stage.server, stage.client, stage.core
    number = next(_numbers)
    request_id = f"victim-{number}"
    bystander = Bystander(client, stage.alone)
    await bystander.moves()
    holders = []
    slots = Slots(client)
    ref: Any = None
    if way == "lease_expiry":
        ref, _ = await slots.acquire()
    elif moment == "queued":
        # Every seat but the bystander's is taken by calls that do not end.
        holders = [
            client.generate("x", max_tokens=LONG, ignore_eos=True) for _ in range(stage.engine.info.max_slots - 1)
        ]
        for holder in holders:
            await anext(holder)
    await bystander.moves()
    num_finished = stats(server).num_requests_finished

    options: dict[str, Any] = {"max_tokens": LONG, "ignore_eos": True, "request_id": request_id}
    prompt: Any = [5 + number % 200, 6, 7]
    if moment == "prefill":
        prompt = [5 + (number + k) % 200 for k in range(LONG)]
    if moment == "last_token":
        options["max_tokens"] = 3
    if num_outputs > 1:
        options["num_outputs"] = num_outputs
    if way == "deadline":
        options["timeout_s"] = deadline_s
    if ref is not None:
        options["slot"] = ref
    async with Wire(next(end.port for end in server.endpoints if end.port)) as wire:
        endpoint = wire.endpoint if way == "disconnect" else client.endpoint
        async with AsyncClient(endpoint, retry=NO_RETRY, timeout_s=60) as own:
            release_encoder = _held_encoder(stage) if moment == "queued" and ref is not None else None
            if release_encoder is not None:
                prompt = "x" * 5000  # read in a worker thread, which waits there
            if moment == "last_token":
                core.hold = _third_token_after(core.newest_id)
            victim = own.generate(prompt, **options)
            reading = asyncio.ensure_future(victim.result())
            await soon(lambda: reading.done() or ("", request_id) in server.served.generations._live)
            live = server.served.generations._live.get(("", request_id))
            await soon(lambda: reading.done() or _is_reached(stage, moment, live, ref is not None))
            is_late = reading.done()
            assert not is_late or way == "deadline", reading.exception()
            if moment == "draining":
                server.served.draining.begin(60)

            # The end, from outside.
            if way == "client_cancel":
                reading.cancel()
                victim.close()
            elif way == "disconnect":
                wire.tear()
            elif way == "cancel_generation":
                await client.cancel(request_id)
            elif way == "lease_expiry":
                _lose(stage, ref)
            if moment == "last_token" and variant == 1:
                core.release(server)  # at once: both ends meet in one turn of the loop
            if release_encoder is not None:
                await soon(lambda: stage.engine.slot(_index(ref)).state is SlotState.FREE)
                release_encoder()
            if way == "lease_expiry" and moment == "last_token":
                await soon(lambda: stage.engine.slot(_index(ref)).state is SlotState.FREE)
                core.release(server)
            code = await ended(reading)
            assert moment != "last_token" or variant == 1 or way == "lease_expiry" or core.num_held > 0
            await soon(lambda: request_id not in {key[1] for key in server.served.generations._live})
            core.release(server)

    is_early = way == "deadline" and moment == "prefill" and not is_late and _num_generated(server, request_id) > 0
    if not is_late and not is_early:
        _check_receipt(stage, moment, way, request_id, code, deadline_s)

    # Everything of it is back, and nobody else has noticed.
    num_others = 1 + len(holders)
    await soon(lambda: stats(server).slots_used == num_others and stats(server).num_waiting == 0)
    # It was ended, and has not run on to its end unseen.
    assert way == "lease_expiry" or moment == "last_token" or stats(server).num_requests_finished == num_finished
    for holder in holders:
        holder.close()
    await bystander.check_and_end()
    await soon(lambda: is_idle(server))
    assert stats(server).cancel_steps_max <= 1
    assert stage.engine.num_streams == 0
    if moment == "draining":
        async with asyncio.timeout(20):
            await server.served.draining.wait()
    return 0.6 if is_early else 1.7 if is_late else 0.0


def _num_generated(server: Server, request_id: str) -> int:
    """What the receipt says of the tokens of a call."""
    return int(server.served.generations.receipt("", request_id).usage.num_generated_tokens)


def _check_receipt(
    stage: Stage, moment: str, way: str, request_id: str, code: grpc.StatusCode | None, deadline_s: float
) -> None:
    """What the client was told, and what the receipt says, agree."""
    receipt = stage.server.served.generations.receipt("", request_id)
    was_done = receipt.state == State.GENERATION_STATE_FINISHED
    expected = {
        "client_cancel": (grpc.StatusCode.CANCELLED, State.GENERATION_STATE_CANCELLED),
        "disconnect": (grpc.StatusCode.UNAVAILABLE, State.GENERATION_STATE_CANCELLED),
        "cancel_generation": (grpc.StatusCode.CANCELLED, State.GENERATION_STATE_CANCELLED),
        "deadline": (grpc.StatusCode.DEADLINE_EXCEEDED, State.GENERATION_STATE_TIMED_OUT),
        "lease_expiry": (grpc.StatusCode.ABORTED, State.GENERATION_STATE_FAILED),
    }[way]
    ran_ns = receipt.end_time.ToNanoseconds() - receipt.create_time.ToNanoseconds()
    if way == "deadline" and receipt.state == State.GENERATION_STATE_CANCELLED and ran_ns < 1e9 * deadline_s:
        # Its client's clock ran out while the request was still on its way, and cancelled: more cannot be known here.
        expected = (expected[0], State.GENERATION_STATE_CANCELLED)
    if moment == "last_token" and (was_done or way == "lease_expiry"):
        # The token came first: then the call is whole, and nothing else may be said of it.
        assert was_done and receipt.usage.num_generated_tokens == 3
        assert code in (None, expected[0])
    else:
        assert (code, receipt.state) == expected
        generated = receipt.usage.num_generated_tokens
        assert generated == 0 if moment in ("queued", "prefill") else generated >= 1
    assert receipt.HasField("end_time")


def _is_reached(stage: Stage, moment: str, live: Any, is_on_slot: bool) -> bool:
    """Whether the call is where it is to be ended."""
    if moment == "queued":
        return live.state.value == "QUEUED" and (is_on_slot or stats(stage.server).num_waiting == 1)
    if moment == "prefill":
        return bool(live.state.value == "RUNNING")
    if moment == "last_token":
        return bool(stage.core.num_held > 0 and live.receipt.usage.num_generated_tokens == 2)
    return bool(live.receipt.usage.num_generated_tokens > 0)


def _third_token_after(newest_id: int) -> Callable[[Event], bool]:
    """The last token of a request that comes from now on."""
    return lambda event: event.request_id > newest_id and isinstance(event, TokenEvent) and event.token_index == 2


def _lose(stage: Stage, ref: slot_pb2.SlotRef) -> None:
    """Let a lease end now."""
    owner = stage.server.served.get("").owners[_index(ref)]
    stage.engine.renew(owner.slot, 1e-6)


def _index(ref: slot_pb2.SlotRef) -> int:
    return int(ref.name.rpartition("/")[2])


def _held_encoder(stage: Stage) -> Callable[[], None]:
    """Let long text wait in the thread that reads it, until the function that is returned is called."""
    gate = threading.Event()
    model = stage.engine.model
    encode = model.encode

    def held(*arguments: Any, **options: Any) -> list[int]:
        assert gate.wait(60)
        found: list[int] = encode(*arguments, **options)
        return found

    model.encode = held

    def release() -> None:
        model.encode = encode
        gate.set()

    return release


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("num_rounds", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_every_end_at_every_moment(
    long_model: Path, tmp_path: Path, moment: str, way: str, num_rounds: int
) -> None:
    deadline_s = DEADLINE_S
    if moment != "draining":
        async with staged(long_model, tmp_path, max_slots=3) as stage:
            for number in range(num_rounds):
                while factor := await cell(stage, moment, way, number % 2, deadline_s):
                    deadline_s *= factor
        return
    for number in range(num_rounds):
        factor = 1.0
        while factor:
            deadline_s *= factor
            async with staged(long_model, tmp_path, max_slots=3) as stage:
                factor = await cell(stage, moment, way, number % 2, deadline_s)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "lease_expiry"])
@pytest.mark.parametrize("moment", ["prefill", "decode"])
async def test_several_outputs_end_together(long_model: Path, tmp_path: Path, moment: str, way: str) -> None:
    deadline_s = DEADLINE_S
    async with staged(long_model, tmp_path, max_slots=5) as stage:
        while factor := await cell(stage, moment, way, 0, deadline_s, num_outputs=3):
            deadline_s *= factor
