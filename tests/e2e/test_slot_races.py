"""Slots that are lost while a call begins, runs or ends in them: every block and slot comes back, each time.

A few rounds by default, two hundred repetitions of each race in the slow tier.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import eventually, is_idle, serving, stats
from tests.e2e.slot_calls import Slots, events_after
from xllm_client import DecodeMode, XllmError

NUM_SLOTS = 8
LOST = {"LEASE_LOST", "STALE_EPOCH"}
MODES = [DecodeMode.BATCHED, DecodeMode.PER_SLOT]
FEW, MANY = 2, 200 // NUM_SLOTS

Race = Callable[[Slots, random.Random, DecodeMode], Awaitable[None]]


async def outcome(work: Any) -> str:
    """The reason that a call failed with; "" for one that did not."""
    try:
        await work
    except XllmError as error:
        return error.reason
    return ""


async def lost_and_fine(loser: Any, winner: Any) -> None:
    """Run both at once: one loses its slot, the other one takes it."""
    lost, fine = await asyncio.gather(outcome(loser), outcome(winner))
    assert lost in LOST and fine == ""


async def jitter(rng: random.Random, longest_s: float = 0.02) -> None:
    """Wait a random moment, so that the two sides of a race meet at every point of a step."""
    await asyncio.sleep(rng.random() * longest_s)


async def ready(slots: Slots, mode: DecodeMode, **fields: Any) -> Any:
    """Return a slot that holds a prompt."""
    ref, _ = await slots.acquire(decode_mode=mode, **fields)
    await slots.prefill(ref, token_ids={"ids": [5] * 100})
    return ref


async def release_while_it_decodes(slots: Slots, rng: random.Random, mode: DecodeMode) -> None:
    ref = await ready(slots, mode)

    async def decode() -> None:
        await jitter(rng)
        await events_after(slots.any_decode_call(ref, mode, max_tokens=50_000))

    async def release() -> None:
        await jitter(rng)
        await slots.release(ref)

    await lost_and_fine(decode(), release())


async def release_while_it_prefills(slots: Slots, rng: random.Random, mode: DecodeMode) -> None:
    ref, _ = await slots.acquire(decode_mode=mode)

    async def prefill() -> None:
        await jitter(rng)
        await slots.prefill(ref, token_ids={"ids": [5] * 60_000})

    async def release() -> None:
        await jitter(rng)
        await slots.release(ref)

    await lost_and_fine(prefill(), release())


async def owner_change_while_it_decodes(slots: Slots, rng: random.Random, mode: DecodeMode) -> None:
    ref = await ready(slots, mode)

    async def decode() -> None:
        await jitter(rng)
        await events_after(slots.any_decode_call(ref, mode, max_tokens=50_000))

    async def take_over() -> None:
        await jitter(rng)
        await slots.release(ref)
        newer, _ = await slots.acquire(decode_mode=mode, slot_name=ref.name, max_wait={"seconds": 10})
        assert newer.epoch > ref.epoch
        await slots.prefill(newer, token_ids={"ids": [6] * 3})
        found = await slots.any_decode(newer, mode, 3)
        assert found[-1].finished.usage.num_generated_tokens == 3
        assert await outcome(slots.release(ref)) == "STALE_EPOCH"
        await slots.release(newer)

    await lost_and_fine(decode(), take_over())


async def lease_expiry_while_it_decodes(slots: Slots, rng: random.Random, mode: DecodeMode) -> None:
    ref = await ready(slots, mode, ttl={"seconds": 1})
    await asyncio.sleep(rng.choice((0.0, 0.9, 0.98)) + rng.random() * 0.04)
    assert await outcome(events_after(slots.any_decode_call(ref, mode, max_tokens=50_000))) in LOST
    assert await outcome(slots.renew(ref)) in LOST


async def cancel_and_release_at_once(slots: Slots, rng: random.Random, mode: DecodeMode) -> None:
    ref = await ready(slots, mode)
    call = slots.any_decode_call(ref, mode, max_tokens=50_000)
    await jitter(rng)

    async def cancel() -> None:
        await jitter(rng, 0.002)
        call.cancel()

    assert (await asyncio.gather(outcome(cancel()), outcome(slots.release(ref))))[1] == ""


RACES: list[Race] = [
    release_while_it_decodes,
    release_while_it_prefills,
    owner_change_while_it_decodes,
    lease_expiry_while_it_decodes,
    cancel_and_release_at_once,
]


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_rounds", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_every_block_comes_back(
    endless_model: Path, tmp_path: Path, race: Race, mode: DecodeMode, num_rounds: int
) -> None:
    rng = random.Random(7)
    settings: dict[str, Any] = {"decode_mode": "auto", "max_slots": NUM_SLOTS, "prefill_chunk": 64}
    async with serving(endless_model, tmp_path, **settings) as (server, client):
        slots = Slots(client)
        before = await client.generate_once([5, 6, 7], max_tokens=8)
        for _ in range(num_rounds):
            await asyncio.gather(*(race(slots, rng, mode) for _ in range(NUM_SLOTS)))
            await eventually(lambda: is_idle(server))
        assert stats(server).blocks_used == 0 and not stats(server).has_failed
        assert (await client.generate_once([5, 6, 7], max_tokens=8)).text == before.text
