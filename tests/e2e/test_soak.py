"""Many clients that come, wait, read, leave and fail for a while: nothing drifts, and every whole answer is right.

On the demo model a minute here and ten minutes in the slow tier; on a small random model, which turns over thousands of
calls, some seconds. Every client has a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import eventually, is_idle, serving, stats
from tests.fault.invariants import descriptors, memory_bytes
from xllm_client import NO_RETRY, AsyncClient, CallCancelledError, DeadlineExceededError
from xllm_service.app import Server

NUM_CLIENTS = 64
NUM_PROMPTS = 32
_TURNING_S = 600  # for the last calls of a part to end


def prompt_of(number: int) -> list[int]:
    """From one token to several hundred."""
    length = 1 + (number * number) % 230
    return [3 + (number * k + k * k) % 200 for k in range(length)]


def options_of(number: int) -> dict[str, Any]:
    return {"max_tokens": 1 + number % 24, "temperature": float(number % 3), "seed": number}


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
            await client.generate(prompt, max_tokens=1500, ignore_eos=True, timeout_s=dice.uniform(0.01, 0.1)).result()
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


def tasks() -> Counter[str]:
    """What the event loop has to do, by coroutine."""
    return Counter(getattr(task.get_coro(), "__qualname__", "other") for task in asyncio.all_tasks())


async def settled(server: Server, num_tasks: int, num_descriptors: int | None = None) -> tuple[int, int]:
    """Descriptors and bytes of memory that are held when nobody asks for anything.

    What the engine has ended the transport may still be closing, so that it gets the time it needs to come back to
    `num_tasks` and `num_descriptors`; what stays is named.
    """
    await eventually(lambda: is_idle(server))
    with contextlib.suppress(TimeoutError):
        await eventually(lambda: tasks().total() <= num_tasks)
        await eventually(lambda: num_descriptors is None or descriptors() <= num_descriptors)
    assert tasks().total() <= num_tasks, tasks()
    assert num_descriptors is None or descriptors() <= num_descriptors
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not held
    return descriptors(), memory_bytes()


async def soak(model: Path, folder: Path, duration_s: float, *, growth: float, **settings: Any) -> Counter[str]:
    """Let the clients come for a while and return the visits by their kind.

    What the first quarter fills (the KV pool, the receipts, the allocators' pools) is the baseline for the rest.
    """
    async with contextlib.AsyncExitStack() as stack:
        server, client = await stack.enter_async_context(
            serving(model, folder, max_queue=4 * NUM_CLIENTS, block_size=16, **settings)
        )
        endpoint = str(server.endpoints[0])
        clients = [
            await stack.enter_async_context(AsyncClient(endpoint, retry=NO_RETRY, timeout_s=_TURNING_S))
            for _ in range(NUM_CLIENTS)
        ]
        expected = {n: (await client.generate_once(prompt_of(n), **options_of(n))).text for n in range(NUM_PROMPTS)}
        visits: Counter[str] = Counter()

        async def keep_coming(own: AsyncClient, seed: int, end: float) -> None:
            dice = random.Random(seed)
            while time.monotonic() < end:
                visits[await visit(own, dice.randrange(NUM_PROMPTS), expected, dice)] += 1

        await eventually(lambda: is_idle(server))
        num_tasks = tasks().total()
        held: list[tuple[int, int]] = []
        for part, share in enumerate((0.25, 0.75)):
            end = time.monotonic() + share * duration_s
            await asyncio.gather(*(keep_coming(own, 1000 * part + n, end) for n, own in enumerate(clients)))
            held.append(await settled(server, num_tasks, held[0][0] if held else None))
        now = stats(server)
        print(f"\n{dict(visits)}; descriptors, bytes: {held}; tasks: {num_tasks}; {now}")
        assert now.num_requests_failed <= visits["deadline"], "nothing failed unasked"
        assert now.cancel_steps_max <= 1
        assert held[1][1] <= held[0][1] * (1 + growth)
        for n in (0, 5, 11):  # and what was right alone at the start is so at the end
            assert (await client.generate_once(prompt_of(n), **options_of(n))).text == expected[n]
        return visits


async def test_a_few_seconds_of_everything(random_model: Path, tmp_path: Path) -> None:
    # note: too short for memory to settle: receipts of some thousand calls are kept on purpose.
    assert (await soak(random_model, tmp_path, 4.0, growth=0.25)).total() > NUM_CLIENTS


@pytest.mark.timeout(600)
async def test_a_minute_of_everything_on_the_demo_model(demo_model: Path, tmp_path: Path) -> None:
    visits = await soak(demo_model, tmp_path, 60.0, growth=0.05, kv_memory="128MiB")
    assert visits["whole"] + visits["once"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_ten_minutes_of_everything_on_the_demo_model(demo_model: Path, tmp_path: Path) -> None:
    visits = await soak(demo_model, tmp_path, 600.0, growth=0.02, kv_memory="128MiB")
    assert min(visits[way] for way in ("whole", "once", "close", "deadline", "cancel", "task")) > 0
