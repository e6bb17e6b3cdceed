"""ForkSlot and WatchSlots through a server: a fork goes on as its original would; who watches sees what slots do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import eventually, is_idle, serving, stats
from tests.e2e.slot_calls import Slots, events, failure
from xllm_client import AsyncClient, DecodeMode
from xllm_client.v1 import slot_pb2, slot_service_pb2

PROMPT = [3 + (7 * i + i * i % 11) % 200 for i in range(40)]
FREE, READY = slot_pb2.SLOT_STATE_FREE, slot_pb2.SLOT_STATE_READY
BOTH = [DecodeMode.BATCHED, DecodeMode.PER_SLOT]


async def said(slot: Any, **options: Any) -> list[int]:
    result = await slot.decode(token_ids=True, ignore_eos=True, **options).result()
    return [token.id for token in result.outputs[0].tokens]


@pytest.mark.parametrize("mode", BOTH)
async def test_a_fork_continues_as_its_original_would(random_model: Path, tmp_path: Path, mode: DecodeMode) -> None:
    async with serving(random_model, tmp_path, decode_mode="auto", block_size=16) as (server, client):
        slot = await client.acquire_slot(decode_mode=mode)
        await slot.prefill(PROMPT)
        first = await said(slot, max_tokens=5)
        used = stats(server).blocks_used
        fork = await slot.fork()
        assert stats(server).blocks_used == used, "nothing is copied until somebody writes"
        assert (fork.info.state, fork.info.num_tokens, fork.decode_mode) == (READY, 45, mode)
        assert fork.ref.name != slot.ref.name and fork.ref.secret != slot.ref.secret
        fresh = await client.acquire_slot(decode_mode=mode)
        await fresh.prefill([*PROMPT, *first])
        expected = await said(fresh, max_tokens=12)
        assert await said(fork, max_tokens=12) == expected
        assert await said(slot, max_tokens=12) == expected
        for one in (slot, fork, fresh):
            await one.release()
        await eventually(lambda: is_idle(server))


async def test_a_fork_is_refused_as_its_original_would_be(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path, max_slots=2) as (server, client):
        slots = Slots(client)

        async def fork(ref: Any, **fields: Any) -> Any:
            return await slots._unary("ForkSlot", slot_service_pb2.ForkSlotRequest(ref=ref, **fields))

        ref, _ = await slots.acquire()
        assert (await failure(fork(ref))).reason == "SLOT_STATE"
        await slots.prefill(ref, token_ids={"ids": PROMPT})
        stranger = slot_pb2.SlotRef(name=ref.name, epoch=ref.epoch, secret=b"x" * 16)
        assert (await failure(fork(stranger))).reason == "FOREIGN_SLOT"
        stale = slot_pb2.SlotRef(name=ref.name, epoch=ref.epoch + 1, secret=ref.secret)
        assert (await failure(fork(stale))).reason in ("STALE_EPOCH", "FOREIGN_SLOT")
        refused = await failure(fork(ref, ttl={"seconds": 10**6}))
        assert refused.reason == "INVALID_FIELD"
        other = await fork(ref)
        full = await failure(fork(ref))
        assert full.reason == "NO_FREE_SLOT" and full.retry_delay_s is not None
        await slots.release(other.ref)
        await slots.release(ref)
        await eventually(lambda: is_idle(server))


async def test_who_watches_sees_all_slots_and_then_what_changes(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path, max_slots=3) as (server, client):
        seen: list[list[slot_pb2.Slot]] = []

        async def watch() -> None:
            async for slots in client.watch_slots():
                seen.append(slots)

        watching = asyncio.create_task(watch())
        await eventually(lambda: seen)
        assert [slot.state for slot in seen[0]] == [FREE] * 3
        slot = await client.acquire_slot()
        await eventually(lambda: seen[-1][0].state == slot_pb2.SLOT_STATE_ACQUIRED)
        assert len(seen[-1]) == 1, "only what has changed"
        await slot.prefill(PROMPT)
        await eventually(lambda: seen[-1][0].state == READY)
        assert seen[-1][0].num_tokens == len(PROMPT)
        num_seen = len(seen)
        await asyncio.sleep(0.2)  # several looks: nothing changes, though the lease runs
        assert len(seen) == num_seen
        await slot.release()
        await eventually(lambda: seen[-1][0].state == FREE)
        assert seen[-1][0].name == slot.ref.name
        watching.cancel()
        await eventually(lambda: server.gate.num_calls == 0)


async def test_watching_ends_when_the_server_drains_or_the_engine_goes(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path) as (server, client):
        unknown = await failure(events(client.slots.WatchSlots(slot_service_pb2.WatchSlotsRequest(model="none"))))
        assert unknown.reason == "MODEL_NOT_FOUND"
        call = client.slots.WatchSlots(slot_service_pb2.WatchSlotsRequest())
        assert len((await anext(aiter(call))).slots) == 8
        draining = asyncio.create_task(server.drain(20))
        assert (await failure(events(call))).reason == "DRAINING"
        await draining


async def test_a_slot_whose_client_does_not_read_is_stalled(endless_model: Path, tmp_path: Path) -> None:
    async with serving(endless_model, tmp_path, stall_allowance=600) as (server, client):
        slots = Slots(client)
        ref, _ = await slots.acquire()
        await slots.prefill(ref, "x")
        call = slots.batch_call([ref], max_tokens=100_000, timeout=120, output={"top_logprobs": 20})
        await call.read()

        async def is_stalled() -> bool:
            return bool((await slots.get(ref.name)).state == slot_pb2.SLOT_STATE_STALLED)

        async with asyncio.timeout(60):
            while not await is_stalled():
                await asyncio.sleep(0.05)
        assert stats(server).num_running == 1, "it is computed all the same"
        call.cancel()
        await slots.release(ref)
        await eventually(lambda: is_idle(server))


async def test_time_that_a_client_did_not_read_is_told(endless_model: Path, tmp_path: Path) -> None:
    async with serving(endless_model, tmp_path) as (_, client):
        assert isinstance(client, AsyncClient)
        quick = await client.generate("x", max_tokens=2000).result()
        generation = client.generate("x", max_tokens=20_000, token_ids=True, top_logprobs=20)
        await anext(generation)
        await asyncio.sleep(1.0)  # flow control pushes back meanwhile
        slow = await generation.result()
        blocked = [result.timings.blocked_on_client.ToTimedelta().total_seconds() for result in (quick, slow)]
        assert blocked[1] > blocked[0]


async def test_many_watchers_share_one_look_and_each_sees_what_is_for_it(random_model: Path, tmp_path: Path) -> None:
    def lookers() -> int:
        return sum(task.get_name() == "xllm-watch-slots" for task in asyncio.all_tasks())

    async with serving(random_model, tmp_path, max_slots=3) as (server, client):
        engine = server.served.get("").engine
        looks = 0
        look = engine.slots

        def counted() -> list[Any]:
            nonlocal looks
            looks += 1
            return look()

        engine.slots = counted  # type: ignore[method-assign]
        calls: list[Any] = [client.slots.WatchSlots(slot_service_pb2.WatchSlotsRequest()) for _ in range(20)]
        for call in calls:
            assert [slot.state for slot in (await call.read()).slots] == [FREE] * 3
        assert lookers() == 1 and looks >= 20, "each one that comes has a look of its own"
        looks = 0
        slot = await client.acquire_slot()
        for call in calls:
            (changed,) = (await call.read()).slots
            assert (changed.name, changed.state) == (slot.ref.name, slot_pb2.SLOT_STATE_ACQUIRED)
        calls[0].cancel()
        await eventually(lambda: server.gate.num_calls == 19)
        await slot.release()
        (changed,) = (await calls[1].read()).slots
        assert changed.state in (FREE, slot_pb2.SLOT_STATE_CANCELLING) and lookers() == 1
        for call in calls:
            call.cancel()
        await eventually(lambda: lookers() == 0 and is_idle(server))
