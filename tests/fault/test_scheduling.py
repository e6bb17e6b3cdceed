"""Too much at once, too large ever, and devices that fail: who has to wait waits, and nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cyengine.types import TokenEvent
from tests.e2e.serving import eventually, is_idle, serving, serving_around, stats
from tests.fault.gguf_surgery import Gguf
from tests.fault.held_core import HeldCore
from tests.fault.invariants import unharmed
from tests.service.conftest import Serve
from tests.service.fake_engine import FakeEngine
from tests.tools.make_tiny_gguf import make_tiny_gguf
from xllm_client import InternalError, InvalidArgumentError, QueueFullError

NAN, INF = float("nan"), float("inf")


async def test_30_a_prompt_that_never_fits_the_pool_lets_others_pass(random_model: Path, tmp_path: Path) -> None:
    settings = {"kv_memory": 256 * 1024, "block_size": 16, "max_slots": 2}
    async with serving(random_model, tmp_path, **settings) as (server, client), unharmed(server, client) as seen:
        (load,) = await client.load()
        prompt = [5] * (16 * load.num_kv_blocks + 1)
        assert len(prompt) < 2047, "fits the context"
        behind = [client.generate_once("x", max_tokens=2, ignore_eos=True)]
        with pytest.raises(InvalidArgumentError) as caught:
            await client.generate_once(prompt)
        assert seen.saw(caught.value).reason == "NEVER_FITS"
        assert caught.value.metadata["num_blocks_total"] == str(load.num_kv_blocks)
        behind.append(client.generate_once("x", max_tokens=2, ignore_eos=True))
        assert [result.usage.num_generated_tokens for result in await asyncio.gather(*behind)] == [2, 2]


async def test_31_a_pool_full_of_streams_puts_some_back_and_loses_nothing(random_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 900, "temperature": 1.0, "ignore_eos": True}
    prompts = [f"{'the world ' * n}and" for n in range(1, 9)]
    async with serving(random_model, tmp_path) as (_, client):
        alone = [(await client.generate_once(p, seed=n, **options)).text for n, p in enumerate(prompts)]
    settings = {"kv_memory": 256 * 1024, "block_size": 16, "max_slots": 8}
    async with serving(random_model, tmp_path, **settings) as (server, client):
        (load,) = await client.load()
        assert 16 * load.num_kv_blocks < 1.5 * 900, "no two of them fit at once"
        calls = [client.generate(prompt, seed=n, **options).result() for n, prompt in enumerate(prompts)]
        async with asyncio.timeout(60):  # no deadlock
            results = await asyncio.gather(*calls)
        assert [result.text for result in results] == alone
        num_preemptions = stats(server).num_preemptions
        assert 0 < num_preemptions < 20 * len(prompts), "put back, and not again and again"
        await eventually(lambda: is_idle(server))


async def test_32_a_prompt_of_a_hundred_thousand_tokens_leaves_the_others_their_steps(
    long_model: Path, tmp_path: Path
) -> None:
    chunk, length, num_running = 512, 100_000, 3
    watched: list[HeldCore] = []

    def wrap(core: Any) -> Any:
        watched.append(HeldCore(core))
        watched[0].seen = []
        return watched[0]

    settings: dict[str, Any] = {"prefill_chunk": chunk, "kv_memory": "256MiB", "max_slots": 8}
    async with (
        serving_around(long_model, tmp_path, wrap, settings) as (server, client),
        unharmed(server, client) as seen,
    ):
        seen.received_bytes += 8 * length
        running = [client.generate("x", max_tokens=100_000, ignore_eos=True) for _ in range(num_running)]
        for stream in running:
            await anext(stream)
        readers = [asyncio.ensure_future(stream.result()) for stream in running]
        await client.generate_once([5 + n % 200 for n in range(length)], max_tokens=1, ignore_eos=True)
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
    # In the engine's own order: what came for the others between the long one's seat and its first token.
    events = watched[0].seen
    assert events is not None
    (long,) = [event.request_id for event in events if getattr(event, "num_prompt_tokens", 0) == length][:1]
    of_long = [place for place, event in enumerate(events) if event.request_id == long]
    first_token = next(place for place in of_long if isinstance(events[place], TokenEvent))
    between = sum(isinstance(event, TokenEvent) for event in events[of_long[0] : first_token])
    # Each step computes at most one chunk of it, and a token for each of the others: what they wait for is a step.
    assert between >= num_running * (length // chunk)


async def test_33_ten_times_the_queue_at_once(endless_model: Path, tmp_path: Path) -> None:
    num_slots, num_queue = 4, 8
    settings = {"max_slots": num_slots, "max_queue": num_queue}
    async with serving(endless_model, tmp_path, **settings) as (server, client), unharmed(server, client) as seen:
        calls = [client.generate("x", max_tokens=100_000) for _ in range(10 * num_queue)]
        firsts = [asyncio.ensure_future(anext(call)) for call in calls]
        num_excess = len(calls) - num_slots - num_queue
        await eventually(lambda: sum(first.done() and first.exception() is not None for first in firsts) >= num_excess)
        seen.received_bytes += 256 * len(calls)
        refusals = [first.exception() for first in firsts if first.done()]
        for refusal in refusals:
            if refusal is not None:
                assert isinstance(refusal, QueueFullError) and seen.saw(refusal).retry_delay_s
        for call in calls:
            call.close()
        await asyncio.gather(*firsts, return_exceptions=True)


def poisoned(path: Path, value: float) -> int:
    """Write a model where the embedding of one token, which is never chosen, is no number; return its id."""
    model = make_tiny_gguf(path, context_length=2048, dtype="f32", tied=False, num_padding=1)
    token = len(model.tokens.tokens) - 1
    file = Gguf.read(path)
    tensor = file.tensor(b"token_embd.weight")
    width = tensor.dims[0]
    begin = tensor.offset + 4 * width * token
    row = np.full(width, value, np.float32).tobytes()
    file.data = file.data[:begin] + row + file.data[begin + len(row) :]
    path.write_bytes(file.to_bytes())
    return token


@pytest.mark.parametrize("value", [NAN, INF, -INF])
async def test_34_logits_that_are_not_finite_end_that_request_alone(tmp_path: Path, value: float) -> None:
    path = tmp_path / "nan.gguf"
    token = poisoned(path, value)
    async with serving(path, tmp_path) as (server, client), unharmed(server, client) as seen:
        for call in (client.generate([5, token], max_tokens=50).result(), client.generate_once([token], max_tokens=50)):
            with pytest.raises(InternalError) as caught:
                await call
            assert seen.saw(caught.value).reason == "NON_FINITE_LOGITS"
        assert (await client.generate_once([5, 6], max_tokens=5, ignore_eos=True)).usage.num_generated_tokens == 5


async def test_33_a_long_prompt_is_refused_unread_while_the_queue_is_full(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as (server, client):
        num_places = engine.info.max_slots + engine.info.max_queue
        engine.max_queue = num_places + 1  # the engine itself would take one more, and nothing in it moves
        calls = [client.generate("x") for _ in range(num_places)]
        firsts = [asyncio.ensure_future(anext(call)) for call in calls]
        await eventually(lambda: len(engine.live) == num_places)
        model = server.served.get("").engine.model
        monkeypatch.setattr(model, "encode", None)
        with pytest.raises(QueueFullError) as caught:
            await client.generate_once("y" * 1_000_000)
        assert caught.value.metadata == {"queue_limit": str(engine.info.max_queue)}
        assert caught.value.retry_delay_s
        for call in calls:
            call.close()
        await asyncio.gather(*firsts, return_exceptions=True)
