"""Whoever ends a generation and however: its slot and blocks are back within a step, and nobody else notices."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from tests.e2e.serving import eventually, is_idle, serving, stats
from xllm_client import CallCancelledError, DeadlineExceededError, QueueFullError, ResourceExhaustedError, XllmError
from xllm_client.errors import from_rpc_error
from xllm_client.v1 import generation_service_pb2, generation_service_pb2_grpc

# Reads a stream's first deltas, says so, and goes on reading until it is killed.
READER = """
import sys
from xllm_client import Client
with Client(sys.argv[1]) as client:
    for event in client.generate("hello", max_tokens=100000):
        if event.kind == "delta":
            print("reading", flush=True)
"""


async def test_killing_a_client_mid_stream_frees_its_slot_within_one_step(endless_model: Path, tmp_path: Path) -> None:
    async with serving(endless_model, tmp_path) as (server, client):
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER, str(server.endpoints[0]), stdout=subprocess.PIPE
        )
        assert reader.stdout is not None
        assert await reader.stdout.readline() == b"reading\n"
        assert stats(server).slots_used == 1 and stats(server).blocks_used > 0
        reader.send_signal(signal.SIGKILL)
        await eventually(lambda: is_idle(server))
        assert stats(server).cancel_steps_max <= 1
        assert stats(server).num_requests_cancelled == 1
        await reader.communicate()
        assert (await client.generate_once("hello", max_tokens=3)).text == "CCC"


@pytest.mark.parametrize("way", ["close", "deadline", "CancelGeneration"])
@pytest.mark.parametrize("moment", ["queued", "prefill", "decode"])
async def test_every_way_to_end_at_every_moment(endless_model: Path, tmp_path: Path, way: str, moment: str) -> None:
    settings = {"max_slots": 1, "prefill_chunk": 1} if moment == "prefill" else {"max_slots": 1}
    async with serving(endless_model, tmp_path, **settings) as (server, client):
        first = client.generate("first", max_tokens=100_000) if moment == "queued" else None
        if first is not None:
            await anext(first)
        options: dict[str, Any] = {"timeout_s": 1.0} if way == "deadline" else {}
        prompt: Any = [5] * 20_000 if moment == "prefill" else "second"
        victim = client.generate(prompt, request_id="victim", max_tokens=100_000, **options)
        if moment == "queued":
            await eventually(lambda: stats(server).num_waiting == 1)
        else:
            kinds: list[str] = []
            while (moment == "decode") != ("delta" in kinds) or not kinds:
                kinds.append((await anext(victim)).kind)
            assert moment == "decode" or "delta" not in kinds
        if way == "close":
            victim.close()
        elif way == "CancelGeneration":
            await client.cancel("victim")
            with pytest.raises(CallCancelledError):
                await victim.result()
        else:
            with pytest.raises(DeadlineExceededError):
                await victim.result()
        await eventually(lambda: len(server.served.generations) == (1 if first is not None else 0))
        if first is not None:
            await eventually(lambda: stats(server).num_waiting == 0)
            assert stats(server).slots_used == 1
            assert (await anext(first)).kind == "delta", "the other one goes on"
            first.close()
        await eventually(lambda: is_idle(server))
        assert stats(server).cancel_steps_max <= 1


async def test_cancelling_one_never_changes_the_others_bytes(random_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 96, "temperature": 1.0, "seed": 3, "token_ids": True}
    async with serving(random_model, tmp_path) as (server, client):
        alone = await client.generate_once("the hello world", **options)
        beside = client.generate("the hello world", **options)
        for number in range(6):
            other = client.generate("on the " * (number + 1), max_tokens=1000, ignore_eos=True)
            await anext(other)
            other.close()
        assert (await beside.result()).outputs == alone.outputs
        await eventually(lambda: is_idle(server))


async def test_a_full_queue_refuses_the_excess_and_serves_the_rest(endless_model: Path, tmp_path: Path) -> None:
    async with serving(endless_model, tmp_path, max_slots=2, max_queue=4) as (server, client):
        holders = [client.generate("x", max_tokens=100_000) for _ in range(2)]
        for holder in holders:
            await anext(holder)
        results = [asyncio.ensure_future(client.generate_once("x", max_tokens=4)) for _ in range(40)]
        await eventually(lambda: sum(result.done() for result in results) == 36)
        refusals = [result.exception() for result in results if result.done()]
        assert all(isinstance(refusal, QueueFullError) and refusal.retry_delay_s for refusal in refusals)
        assert {refusal.metadata["queue_limit"] for refusal in refusals if isinstance(refusal, QueueFullError)} == {"4"}
        for holder in holders:
            holder.close()
        served = [await result for result in results if not isinstance(_outcome(result), XllmError)]
        assert [result.text for result in served] == ["CCCC"] * 4
        await eventually(lambda: is_idle(server))


def _outcome(result: asyncio.Future[Any]) -> BaseException | None:
    return result.exception() if result.done() else None


async def test_waiting_longer_than_allowed_is_a_queue_timeout(endless_model: Path, tmp_path: Path) -> None:
    async with serving(endless_model, tmp_path, max_slots=1) as (server, client):
        holder = client.generate("x", max_tokens=100_000)
        await anext(holder)
        with pytest.raises(ResourceExhaustedError) as caught:
            await client.generate_once("x", max_queue_time_s=0.05)
        assert caught.value.reason == "QUEUE_TIMEOUT"
        assert caught.value.retry_delay_s is not None
        holder.close()
        await eventually(lambda: is_idle(server))


async def test_a_stalled_client_is_ended_and_slows_nobody(endless_model: Path, tmp_path: Path) -> None:
    async with serving(endless_model, tmp_path, stall_allowance=0.5) as (server, client):
        # A client whose window stays small: by default gRPC takes in megabytes before it pushes back.
        options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535))
        async with grpc.aio.insecure_channel(client.endpoint, options) as channel:
            stub: Any = generation_service_pb2_grpc.GenerationServiceStub(cast("Any", channel))
            spec = {"text": "x", "limits": {"max_tokens": 100_000}, "output": {"top_logprobs": 20}}
            stalled = stub.Generate(generation_service_pb2.GenerateRequest(spec=spec))
            await stalled.read()
            reader = client.generate("x", max_tokens=100_000)
            num_tokens = 0
            while stats(server).num_requests_cancelled == 0:
                num_tokens += (await anext(reader)).message.delta.num_tokens
            assert num_tokens > 20
            reader.close()
            with pytest.raises(grpc.RpcError) as caught:
                while await stalled.read() is not grpc.aio.EOF:
                    pass
            assert from_rpc_error(caught.value, "").reason == "CLIENT_STALLED"
            await eventually(lambda: is_idle(server))
