"""The asyncio client, against a real gRPC server on a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from fake_server import FakeServer, accepted, refuse, repeat

from xllm_client import (
    NO_RETRY,
    AsyncClient,
    DeadlineExceededError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
)
from xllm_client.v1 import generation_pb2, generation_service_pb2

Response = generation_service_pb2.GenerateResponse
Request = generation_service_pb2.GenerateRequest


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.endpoint) as connected:
        yield connected


def endless(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
    yield Response(accepted=accepted(request.spec))
    while context.is_active():
        yield Response(delta=generation_pb2.Delta(text="x"))
        time.sleep(0.001)


async def ended(server: FakeServer) -> bool:
    return await asyncio.to_thread(server.call_ended.wait, 5)


async def test_events_and_unary_twin(client: AsyncClient) -> None:
    events = [event async for event in client.generate("naïve 🙂")]
    assert "".join(event.text for event in events) == "naïve 🙂"
    assert (events[0].kind, events[-1].kind) == ("accepted", "finished")
    streamed = await client.generate("Hello", max_tokens=2, seed=1).result()
    assert streamed == await client.generate_once("Hello", max_tokens=2, seed=1)


async def test_the_other_calls(client: AsyncClient) -> None:
    await client.wait_ready(5)
    messages = [{"role": "user", "content": "Hi"}]
    assert (await client.chat(messages).result()).text == "<user>Hi"
    assert (await client.chat_once(messages)).text == "<user>Hi"
    assert await client.render_chat(messages) == "<user>Hi"
    assert await client.tokenize("a", add_special_tokens=False) == [97]
    assert await client.detokenize([97]) == "a"
    assert [model.name for model in await client.models()] == ["fake"]
    assert (await client.get_model()).summary.name == "fake"
    assert (await client.server_info()).version == "0.1.0"
    with pytest.raises(NotFoundError):
        await client.cancel("nobody")


@pytest.mark.parametrize("how", ["break", "close", "with", "task", "client"])
async def test_leaving_early_cancels_the_call(server: FakeServer, client: AsyncClient, how: str) -> None:
    server.on_generate = endless
    if how == "break":
        async for event in client.generate("Hi"):
            if event.text:
                break
        gc.collect()
    elif how == "with":
        async with client.generate("Hi") as generation:
            await anext(generation)
    elif how == "task":
        has_begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate("Hi"):
                has_begun.set()

        reader = asyncio.create_task(read())
        await has_begun.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    else:
        generation = client.generate("Hi")
        await anext(generation)
        if how == "close":
            generation.close()
            generation.close()
            assert [event async for event in generation] == []
        else:
            await client.close()
    assert await ended(server)


async def test_close_from_another_task_ends_the_iteration(server: FakeServer, client: AsyncClient) -> None:
    server.on_generate = endless
    generation = client.generate("Hi")
    asyncio.get_running_loop().call_later(0.05, generation.close)
    kinds = [event.kind async for event in generation]
    assert kinds[:2] == ["accepted", "delta"]
    assert await ended(server)


async def test_deadline(server: FakeServer, client: AsyncClient) -> None:
    server.on_generate = endless
    with pytest.raises(DeadlineExceededError):
        await client.generate("Hi", timeout_s=0.1).result()


async def test_push_back_before_accepted_only(server: FakeServer, client: AsyncClient) -> None:
    left = [2]

    def handler(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        if left[0] > 0:
            left[0] -= 1
            refuse(context, grpc.StatusCode.UNAVAILABLE, "LOADING", "still loading", retry_delay_s=0.01)
        yield from repeat(request, context)

    def late(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        yield Response(accepted=accepted(request.spec))
        refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "no", retry_delay_s=0.0)

    server.on_generate = handler
    assert (await client.generate("Hi").result()).text == "Hi"
    assert len(server.requests) == 3
    server.refusals = 2
    assert (await client.generate_once("Hi")).text == "Hi"
    server.on_generate = late
    with pytest.raises(QueueFullError):
        await client.generate("Hi").result()
    assert len(server.requests) == 4


async def test_many_streams_at_once_keep_apart(client: AsyncClient) -> None:
    prompts = [f"prompt {index}" for index in range(20)]
    results = await asyncio.gather(*(client.generate(prompt).result() for prompt in prompts))
    assert [result.text for result in results] == prompts


async def test_wait_ready_says_what_was_seen(server: FakeServer, client: AsyncClient) -> None:
    server.set_serving(False)
    with pytest.raises(UnavailableError, match="seen last: NOT_SERVING"):
        await client.wait_ready(0.2)


async def test_a_server_that_is_slow_to_answer_is_waited_for(server: FakeServer, tmp_path: Path) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(server.endpoint.removeprefix("unix:"))
        await asyncio.sleep(0.4)  # as long as a distant or busy server may take to shake hands
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            tasks.append(asyncio.ensure_future(carry(source, sink)))

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # either side may be the first to go
            while data := await source.read(1 << 16):
                sink.write(data)
        sink.close()
        with contextlib.suppress(ConnectionError):
            await sink.wait_closed()

    tasks: list[asyncio.Task[None]] = []
    slow = await asyncio.start_unix_server(relay, tmp_path / "slow.sock")
    async with slow, AsyncClient(f"unix:{tmp_path}/slow.sock", retry=NO_RETRY) as client:
        assert (await client.generate_once("Hello")).text == "Hello"
    await asyncio.gather(*tasks)
