"""Several real engines in one process: they neither see nor touch each other; what is refused leaves nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.serving import eventually, is_idle, server_process, serving, stats
from tests.e2e.slot_calls import Slots, failure
from tests.tools.make_tiny_gguf import make_tiny_gguf
from xllm_client import NO_RETRY, AsyncClient, Client, DecodeMode, UnavailableError, XllmError
from xllm_client.v1 import admin_service_pb2, plan_pb2
from xllm_service.app import Server

OPTIONS: dict[str, Any] = {"max_tokens": 64, "temperature": 1.0, "seed": 3, "ignore_eos": True, "token_ids": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a good file of another shape, and three that are refused."""
    path = tmp_path_factory.mktemp("folder")
    make_tiny_gguf(path / "other.gguf", arch="qwen2", dtype="q8_0", seed=5, context_length=4096)
    whole = (path / "other.gguf").read_bytes()
    (path / "truncated.gguf").write_bytes(whole[: len(whole) // 2])
    (path / "malformed.gguf").write_bytes(b"NOPE" + whole[4:])
    make_tiny_gguf(path / "unsupported.gguf", metadata={"general.architecture": "mamba"})
    return path


@pytest.fixture
async def served(random_model: Path, folder: Path, tmp_path: Path) -> AsyncIterator[tuple[Server, AsyncClient]]:
    async with serving(random_model, tmp_path, model_dir=folder, max_slots=8) as (server, client):
        yield server, client


async def create(client: AsyncClient, **fields: Any) -> Any:
    defaults: dict[str, Any] = {"name": "b", "source": "other.gguf", "kv_memory_bytes": 8 << 20}
    fields = defaults | fields
    return (await client._call(client._admin.CreateEngine, admin_service_pb2.CreateEngineRequest(**fields))).model


async def destroy(client: AsyncClient, name: str, **grace: int) -> Any:
    request = admin_service_pb2.DestroyEngineRequest(name=name, grace=grace or None)
    return await client._call(client._admin.DestroyEngine, request)


@pytest.mark.parametrize("mode", [DecodeMode.BATCHED, DecodeMode.PER_SLOT])
async def test_two_engines_give_the_bytes_they_give_alone(
    served: tuple[Server, AsyncClient], folder: Path, tmp_path: Path, mode: DecodeMode
) -> None:
    server, client = served
    first_alone = await client.generate_once("the world", **OPTIONS)
    alone_mode = mode.name.lower().replace("_", "-")
    async with serving(folder / "other.gguf", tmp_path / "alone", decode_mode=alone_mode, max_slots=2) as (_, other):
        second_alone = await other.generate_once("the world", **OPTIONS)
    model = await create(client, decode_mode=mode, max_slots=2)
    assert (DecodeMode(model.summary.decode_mode), model.plan.max_slots) == (mode, 2)
    calls = [client.generate("the world", model=name, **OPTIONS) for name in ("random", "b") * 4]
    results = [await call.result() for call in calls]
    assert [result.outputs for result in results] == [first_alone.outputs, second_alone.outputs] * 4
    assert stats(server, "b").slots_total == 2 and stats(server, "random").slots_total == 8
    await eventually(lambda: is_idle(server))


async def test_ending_one_leaves_the_others_streams_and_their_bytes(served: tuple[Server, AsyncClient]) -> None:
    server, client = served
    options = OPTIONS | {"max_tokens": 1500}
    alone = await client.generate_once("the world", **options)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await create(client)
        slots = Slots(client)
        ref, _ = await slots.acquire(model="b")
        beside = client.generate("the world", model="random", **options)
        cut = client.generate("x", model="b", max_tokens=4000, ignore_eos=True)
        await anext(beside)
        await anext(cut)
        assert (await destroy(client, "b")).num_ended_calls == 1
        with pytest.raises(UnavailableError) as caught:
            await cut.result()
        assert caught.value.reason == "DRAINING"
        assert (await failure(slots.release(ref))).reason == "SLOT_NOT_FOUND"
        assert (await beside.result()).outputs == alone.outputs
        del beside, cut
    await eventually(lambda: is_idle(server))
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.parametrize(
    ("source", "code", "reason"),
    [
        ("truncated.gguf", grpc.StatusCode.DATA_LOSS, "TRUNCATED_MODEL"),
        ("malformed.gguf", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MODEL"),
        ("unsupported.gguf", grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_MODEL"),
        ("none.gguf", grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    ],
)
async def test_a_file_that_is_refused_leaves_nothing(
    served: tuple[Server, AsyncClient], folder: Path, source: str, code: grpc.StatusCode, reason: str
) -> None:
    _, client = served
    await client.wait_ready()  # by now the connection has its descriptors
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(XllmError) as caught:
        await create(client, source=source)
    assert (caught.value.code, caught.value.reason) == (code, reason)
    assert str(folder) not in str(caught.value), "where models lie is the server's own business"
    assert [model.name for model in await client.models()] == ["random"]
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    await create(client)


def address_space() -> int:
    """Bytes of this process's address space: what was mapped counts, touched or not."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("options", [{"memory_limit_bytes": 1 << 20}, {"kv_memory_bytes": 1 << 42}])
async def test_what_does_not_fit_is_refused_with_its_plan(
    served: tuple[Server, AsyncClient], options: dict[str, int]
) -> None:
    server, client = served
    await client.wait_ready()
    before = address_space()
    with pytest.raises(XllmError) as caught:
        await create(client, **options)
    assert address_space() - before < 256 << 20, "threads may have come, but nothing of the engine stays"
    refused = caught.value
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MEMORY")
    needed, free = (int(refused.metadata[name]) for name in ("bytes_needed", "bytes_free"))
    assert needed > free and refused.metadata["remedy"]
    (plan,) = [detail for detail in details_of(refused) if isinstance(detail, plan_pb2.Plan)]
    assert (plan.total_bytes, plan.fits, plan.kv_pool_bytes > 0) == (needed, False, True)
    assert plan.remedy == refused.metadata["remedy"]
    assert server.served.roster.find("b") is None
    await create(client, memory_limit_bytes=1 << 30)


def details_of(error: XllmError) -> list[Any]:
    from google.rpc import status_pb2  # type: ignore[import-untyped]

    cause: Any = error.__cause__
    trailers = dict(cause.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    found = []
    for detail in status.details:
        plan = plan_pb2.Plan()
        if detail.Unpack(plan):
            found.append(plan)
    return found


async def test_estimate_tells_what_generate_then_does(served: tuple[Server, AsyncClient]) -> None:
    _, client = served
    told = await client.estimate("the hello world", max_tokens=7)
    result = await client.generate_once("the hello world", max_tokens=7, ignore_eos=True)
    assert told.num_prompt_tokens == result.usage.num_prompt_tokens
    assert (told.max_new_tokens, told.fits, told.queue_position, told.refusal_reason) == (7, True, 0, "")
    assert DecodeMode(told.decode_mode) is DecodeMode.BATCHED
    assert told.num_kv_blocks_needed == 1
    too_long = await client.estimate([5] * 3000)
    assert (too_long.fits, too_long.refusal_reason, too_long.max_new_tokens) == (False, "PROMPT_TOO_LONG", 0)


async def test_estimate_sees_what_can_never_fit_and_the_queue(endless_model: Path, tmp_path: Path) -> None:
    async with serving(endless_model, tmp_path, max_slots=1, kv_memory="1MiB") as (server, client):
        blocks = stats(server).blocks_total
        told = await client.estimate([5] * (blocks * 64))
        assert (told.fits, told.refusal_reason) == (False, "NEVER_FITS")
        with pytest.raises(XllmError) as caught:
            await client.generate_once([5] * (blocks * 64))
        assert caught.value.reason == "NEVER_FITS"
        assert (await client.estimate([5] * (blocks * 64 - 1))).fits
    async with serving(endless_model, tmp_path, max_slots=1) as (server, client):
        holder = client.generate("x", max_tokens=100_000)
        await anext(holder)
        assert (await client.estimate("x")).queue_position == 1
        waiting = client.generate("x", max_tokens=3)
        await eventually(lambda: stats(server).num_waiting == 1)
        assert (await client.estimate("x")).queue_position == 2
        holder.close()
        waiting.close()
        await eventually(lambda: is_idle(server))


async def test_queue_and_prefill_make_up_the_time_to_the_first_token(endless_model: Path, tmp_path: Path) -> None:
    async with serving(endless_model, tmp_path, max_slots=1, prefill_chunk=16) as (_, client):
        holder = client.generate("x", max_tokens=300)
        await anext(holder)
        results = await asyncio.gather(*(client.generate_once([5] * 2000, max_tokens=3) for _ in range(4)))
        await holder.result()
        for result in results:
            queue, prefill, first, total = (
                getattr(result.timings, name).ToTimedelta().total_seconds()
                for name in ("queue", "prefill", "time_to_first_token", "total")
            )
            assert queue > 0 and prefill > 0
            assert queue + prefill <= first <= total
            assert first - (queue + prefill) < 0.25, "nothing else takes long"
            assert queue <= result.accepted.queue_time.ToTimedelta().total_seconds() <= first


async def test_a_duration_that_is_over_is_an_end_after_accepted_and_a_failure_before(
    endless_model: Path, tmp_path: Path
) -> None:
    async with serving(endless_model, tmp_path, max_slots=1) as (server, client):
        result = await client.generate_once("x", max_tokens=100_000, max_duration_s=0.2)
        assert result.outputs[0].finished.reason == 6, "MAX_DURATION"
        assert set(result.text) == {"C"} and result.usage.num_generated_tokens == len(result.text)
        late = client.generate("x", request_id="late", max_tokens=100_000, max_duration_s=30, timeout_s=0.3)
        with pytest.raises(XllmError) as caught:
            await late.result()
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: is_idle(server))
        assert (await client.get_generation("late")).status_code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        holder = client.generate("x", max_tokens=100_000)
        await anext(holder)
        with pytest.raises(XllmError) as queued:
            await client.generate_once("x", max_duration_s=0.1)
        assert (queued.value.code, queued.value.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        holder.close()
        await eventually(lambda: is_idle(server))


def test_drain_ends_the_process_like_a_signal(endless_model: Path, tmp_path: Path) -> None:
    with server_process(endless_model, tmp_path) as (process, endpoint), Client(endpoint, retry=NO_RETRY) as client:
        stream = client.generate("x", max_tokens=3000)
        next(stream)
        told = list(client._admin.Drain(admin_service_pb2.DrainRequest(grace={"seconds": 60}), timeout=60))
        assert told[0].num_running_requests == 1 and not told[0].is_drained
        assert told[-1].is_drained
        assert stream.result().text == "C" * 3000
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        assert not (tmp_path / "p" / "x.sock").exists()
