"""Many clients that come, wait, read, leave and fail for a while: nothing drifts, and every whole answer is right."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import eventually, is_idle, serving, stats
from xllm_client import AsyncClient, CallCancelledError, DeadlineExceededError

NUM_CLIENTS = 64


def prompt_of(number: int) -> list[int]:
    return [3 + (number * k) % 200 for k in range(1, 2 + number % 90)]


def options_of(number: int) -> dict[str, Any]:
    return {"max_tokens": 1 + number % 40, "temperature": float(number % 3), "seed": number}


async def visit(client: AsyncClient, number: int, expected: dict[int, str], dice: random.Random) -> str:
    """One visit of a client: an answer it reads whole, or one it leaves in one of four ways. Returns which."""
    way = dice.choice(("whole", "whole", "once", "close", "deadline", "cancel", "task"))
    prompt, options = prompt_of(number), options_of(number)
    if way == "once":
        assert (await client.generate_once(prompt, **options)).text == expected[number]
        return way
    if way == "whole":
        assert (await client.generate(prompt, **options).result()).text == expected[number]
        return way
    if way == "deadline":
        with pytest.raises(DeadlineExceededError):
            await client.generate(prompt, max_tokens=5000, ignore_eos=True, timeout_s=dice.uniform(0.01, 0.1)).result()
        return way
    request_id = f"visit-{dice.getrandbits(64):x}"
    stream = client.generate(prompt, max_tokens=1500, ignore_eos=True, request_id=request_id)
    if way == "task":
        reading = asyncio.create_task(stream.result())
        await asyncio.sleep(dice.uniform(0, 0.05))
        reading.cancel()
        await asyncio.wait((reading,))
        return way
    for _ in range(dice.randrange(1, 6)):
        await anext(stream)
    if way == "close":
        stream.close()
    else:
        await client.cancel(request_id)
        with contextlib.suppress(CallCancelledError):
            assert (await stream.result()).finish_reason == "MAX_TOKENS", "it had ended before the cancel came"
    return way


async def soak(model: Path, folder: Path, duration_s: float) -> int:
    """Let the clients come for a while and return the number of visits."""
    async with serving(model, folder, max_queue=4 * NUM_CLIENTS, block_size=16) as (server, client):
        expected = {n: (await client.generate_once(prompt_of(n), **options_of(n))).text for n in range(60)}
        await eventually(lambda: is_idle(server))
        before = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        end = time.monotonic() + duration_s
        visits: Counter[str] = Counter()

        async def keep_coming(seed: int) -> None:
            dice = random.Random(seed)
            while time.monotonic() < end:
                visits[await visit(client, dice.randrange(60), expected, dice)] += 1

        await asyncio.gather(*(keep_coming(seed) for seed in range(NUM_CLIENTS)))
        await eventually(lambda: is_idle(server))
        assert stats(server).num_requests_failed <= visits["deadline"], "nothing failed unasked"
        assert stats(server).cancel_steps_max <= 1
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before[0])
        await eventually(lambda: len(asyncio.all_tasks()) <= before[1])
        return visits.total()


async def test_a_few_seconds_of_everything(random_model: Path, tmp_path: Path) -> None:
    assert await soak(random_model, tmp_path, 4.0) > NUM_CLIENTS


@pytest.mark.slow
async def test_a_minute_of_everything(random_model: Path, tmp_path: Path) -> None:
    assert await soak(random_model, tmp_path, 60.0) > NUM_CLIENTS
