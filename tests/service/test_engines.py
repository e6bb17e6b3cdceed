"""Several engines in one server: made, named, told apart, ended; and which files may be opened for them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.service.conftest import Serve, eventually
from tests.service.fake_engine import FakeEngine, FakeModel
from xllm_client import (
    NO_RETRY,
    AsyncClient,
    DecodeMode,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    XllmError,
)
from xllm_client.errors import from_rpc_error
from xllm_client.v1 import admin_service_pb2, model_service_pb2, plan_pb2
from xllm_service.app import Server, running
from xllm_service.config import ServeConfig, load_config
from xllm_service.engine import Model
from xllm_service.engine_request import find_model
from xllm_service.errors import Reason, ServiceError

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with one file in it, and one beside it that is nobody's business."""
    path = tmp_path / "models"
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "b.gguf").write_bytes(b"GGUF b")
    (tmp_path / "secret.gguf").write_bytes(b"GGUF secret")
    (path / "out.gguf").symlink_to(tmp_path / "secret.gguf")
    (path / "in.gguf").symlink_to(path / "sub" / "b.gguf")
    return path


async def create(client: AsyncClient, name: str = "b", source: str = "sub/b.gguf", **fields: Any) -> Any:
    request = admin_service_pb2.CreateEngineRequest(name=name, source=source, **fields)
    return (await client._call(client._admin.CreateEngine, request)).model


async def destroy(client: AsyncClient, name: str = "b", **grace: int) -> Any:
    request = admin_service_pb2.DestroyEngineRequest(name=name, grace=grace or None)
    return await client._call(client._admin.DestroyEngine, request)


async def health(client: AsyncClient, name: str) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


@pytest.fixture
def second() -> FakeEngine:
    return FakeEngine(answer=["two"])


@pytest.fixture
async def both(
    serve: Serve, engine: FakeEngine, second: FakeEngine, folder: Path
) -> AsyncIterator[tuple[Server, AsyncClient]]:
    engine.answer = ["one"]
    async with serve(others={"b": second}, model_dir=folder) as (server, client):
        yield server, client


async def test_each_engine_answers_under_its_own_name(both: tuple[Server, AsyncClient]) -> None:
    server, client = both
    model = await create(client)
    assert (model.summary.name, model.summary.state) == ("b", model_service_pb2.MODEL_STATE_READY)
    assert model.plan.fits
    for name, text in (("fake", "one"), ("b", "two")):
        result = await client.generate_once("x", model=name)
        assert (result.text, result.accepted.model) == (text, name)
        assert result.accepted.slot.name.startswith(f"{name}/")
        assert await client.tokenize("x", model=name)
        assert (await client.get_model(name)).summary.name == name
        assert (await client.estimate("x", model=name)).model == name
    assert [model.name for model in await client.models()] == ["b", "fake"]
    assert list((await client.server_info()).models) == ["b", "fake"]
    assert [load.model for load in await client.load()] == ["b", "fake"]
    assert [load.model for load in await client.load("b")] == ["b"]
    assert len(server.served.roster.loaded()) == 2


@pytest.mark.parametrize("call", ["generate", "estimate", "tokenize", "get_model"])
async def test_with_several_engines_a_call_has_to_name_one(both: tuple[Server, AsyncClient], call: str) -> None:
    _, client = both
    await create(client)
    calls: dict[str, Any] = {
        "generate": lambda: client.generate_once("x"),
        "estimate": lambda: client.estimate("x"),
        "tokenize": lambda: client.tokenize("x"),
        "get_model": lambda: client.get_model(),
    }
    with pytest.raises(InvalidArgumentError) as caught:
        await calls[call]()
    field = "spec.model" if call in ("generate", "estimate") else "model"
    assert [violation.field for violation in caught.value.field_violations] == [field]
    assert "b, fake" in str(caught.value)
    with pytest.raises(NotFoundError) as unknown:
        await client.generate_once("x", model="c")
    assert unknown.value.reason == "MODEL_NOT_FOUND"


async def test_health_has_a_name_for_each_engine(both: tuple[Server, AsyncClient], second: FakeEngine) -> None:
    server, client = both
    with pytest.raises(grpc.RpcError) as caught:
        await health(client, "b")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await create(client)
    assert await health(client, "b") == SERVING
    second.has_failed = True
    server.health.look()
    assert [await health(client, name) for name in ("", "b", "fake")] == [SERVING, NOT_SERVING, SERVING]
    second.has_failed = False
    await destroy(client)
    with pytest.raises(grpc.RpcError):
        await health(client, "b")
    await destroy(client, "fake")
    assert await health(client, "") == NOT_SERVING, "nothing is served any more"
    with pytest.raises(NotFoundError):
        await client.generate_once("x")


async def test_what_was_asked_for_is_what_the_engine_is_made_with(
    both: tuple[Server, AsyncClient], second: FakeEngine, folder: Path
) -> None:
    _, client = both
    await create(
        client,
        decode_mode=DecodeMode.PER_SLOT,
        backend="cpu",
        max_slots=3,
        max_seq_len=99,
        kv_type=plan_pb2.KV_TYPE_F32,
        kv_memory_bytes=1 << 20,
        memory_limit_bytes=1 << 30,
        num_threads=1,
        prefill_chunk_tokens=16,
        max_queue_requests=0,
    )
    made = second.config
    assert made.model == folder / "sub" / "b.gguf"
    assert (made.decode_mode, made.backend, made.max_slots, made.max_seq_len) == ("per-slot", "cpu", 3, 99)
    assert (made.kv_memory, made.memory_limit, made.threads) == (1 << 20, 1 << 30, 1)
    assert (made.prefill_chunk, made.max_queue) == (16, 0)


async def test_what_was_not_asked_for_is_the_servers_own(both: tuple[Server, AsyncClient], second: FakeEngine) -> None:
    server, client = both
    await create(client)
    assert (second.config.max_slots, second.config.max_queue) == (server.config.max_slots, server.config.max_queue)
    assert (second.config.decode_mode, second.config.max_seq_len) == ("auto", 0)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"source": ""}, "source"),
        ({"expected_digest": "sha256:12"}, "expected_digest"),
        ({"decode_mode": 7}, "decode_mode"),
        ({"backend": "tpu"}, "backend"),
        ({"max_slots": 0}, "max_slots"),
        ({"max_slots": 9}, "max_slots"),
        ({"max_seq_len": -1}, "max_seq_len"),
        ({"kv_type": 9}, "kv_type"),
        ({"kv_type": plan_pb2.KV_TYPE_F32}, "kv_type"),
        ({"kv_type": plan_pb2.KV_TYPE_INT8, "decode_mode": DecodeMode.PER_SLOT}, "kv_type"),
        ({"kv_memory_bytes": 0}, "kv_memory_bytes"),
        ({"memory_limit_bytes": 2**63}, "memory_limit_bytes"),
        ({"num_threads": 0}, "num_threads"),
        ({"prefill_chunk_tokens": 8193}, "prefill_chunk_tokens"),
        ({"max_queue_requests": -1}, "max_queue_requests"),
    ],
)
async def test_a_field_out_of_range_is_named(
    both: tuple[Server, AsyncClient], fields: dict[str, Any], path: str
) -> None:
    _, client = both
    with pytest.raises(InvalidArgumentError) as caught:
        await create(client, **fields)
    assert [violation.field for violation in caught.value.field_violations] == [path]
    assert len(await client.models()) == 1


# ---- which files ----


@pytest.mark.parametrize("source", ["sub/b.gguf", "in.gguf", "./sub/../sub/b.gguf"])
def test_a_path_below_the_model_folder_is_found(folder: Path, source: str) -> None:
    assert find_model(source, folder) == folder / "sub" / "b.gguf"


@pytest.mark.parametrize(
    "source",
    [
        "../secret.gguf",
        "sub/../../secret.gguf",
        "out.gguf",
        "{outside}",
        "/etc/passwd",
        "/proc/self/mem",
        "sub",
        "",
        ".",
        "nothing.gguf",
        "x\0y",
        "x" * 5000,
        "~/secret.gguf",
        "org/repo",
    ],
)
@pytest.mark.parametrize("has_folder", [True, False])
def test_no_other_file_is_opened_and_no_path_is_told(folder: Path, source: str, has_folder: bool) -> None:
    source = source.format(outside=folder.parent / "secret.gguf")
    with pytest.raises(ServiceError) as caught:
        find_model(source, folder if has_folder else None)
    assert caught.value.reason is Reason.MODEL_NOT_FOUND
    assert str(folder) not in caught.value.message.replace(repr(source), "")


def test_a_loop_of_links_and_a_pipe_are_no_models(folder: Path) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    for source in ("loop", "pipe"):
        with pytest.raises(ServiceError):
            find_model(source, folder)


def test_a_path_needs_a_model_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ServiceError, match="no --model-dir is set"):
        find_model("sub/b.gguf", None)


def test_a_model_folder_that_is_none_is_a_start_up_error(tmp_path: Path) -> None:
    from xllm_service.config import ConfigError

    with pytest.raises(ConfigError, match="--model-dir"):
        load_config(tmp_path / "m.gguf", {"model_dir": str(tmp_path / "none")})


async def test_the_digest_is_checked_before_anything_is_loaded(
    both: tuple[Server, AsyncClient], second: FakeEngine, folder: Path
) -> None:
    _, client = both
    actual = "sha256:" + hashlib.sha256((folder / "sub" / "b.gguf").read_bytes()).hexdigest()
    with pytest.raises(XllmError) as caught:
        await create(client, expected_digest="sha256:" + "0" * 64)
    assert caught.value.reason == "MODEL_DIGEST_MISMATCH"
    assert caught.value.metadata["actual"] == actual
    assert second.config is None
    await create(client, expected_digest=actual)


# ---- refusals ----


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.INVALID_MODEL, grpc.StatusCode.INVALID_ARGUMENT),
        (Reason.TRUNCATED_MODEL, grpc.StatusCode.DATA_LOSS),
        (Reason.UNSUPPORTED_MODEL, grpc.StatusCode.UNIMPLEMENTED),
        (Reason.MEMORY, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_a_model_that_is_refused_leaves_its_name_free(
    serve: Serve, engine: FakeEngine, folder: Path, reason: Reason, code: grpc.StatusCode
) -> None:
    engine.answer = ["one"]
    path = folder / "sub" / "b.gguf"
    problem = ServiceError(reason, f"{path}: blk.0 at byte 7", metadata={"file": str(path)})
    others: dict[str, Any] = {"b": problem}
    async with serve(others=others, model_dir=folder) as (_, client):
        with pytest.raises(XllmError) as caught:
            await create(client)
        assert (caught.value.code, caught.value.reason) == (code, reason.value)
        assert "sub/b.gguf: blk.0 at byte 7" in str(caught.value)
        assert str(folder) not in str(caught.value) and str(folder) not in str(caught.value.metadata)
        assert (await client.generate_once("x")).text == "one", "what is served goes on being served"
        others["b"] = FakeEngine(answer=["two"])
        await create(client)
        assert (await client.generate_once("x", model="b")).text == "two"


async def test_a_name_is_taken_once(both: tuple[Server, AsyncClient]) -> None:
    _, client = both
    await create(client)
    for name in ("b", "fake"):
        with pytest.raises(XllmError) as caught:
            await create(client, name)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ALREADY_EXISTS, "ENGINE_EXISTS")


async def test_an_unknown_engine_cannot_be_ended(both: tuple[Server, AsyncClient]) -> None:
    _, client = both
    with pytest.raises(NotFoundError):
        await destroy(client, "c")
    with pytest.raises(InvalidArgumentError):
        await destroy(client, "")
    with pytest.raises(InvalidArgumentError):
        await destroy(client, "fake", seconds=-1)


async def test_no_engine_is_made_while_the_server_drains(both: tuple[Server, AsyncClient]) -> None:
    server, client = both
    server.served.draining.begin(10)
    with pytest.raises(UnavailableError) as caught:
        await create(client)
    assert caught.value.reason == "DRAINING"


# ---- while it loads ----


async def test_while_an_engine_loads_its_name_is_taken_and_the_rest_serves(
    model_file: Path, folder: Path, engine: FakeEngine, second: FakeEngine
) -> None:
    engine.answer = ["one"]
    may_load = threading.Event()

    def load(config: ServeConfig) -> tuple[Model, FakeEngine]:
        if config.model_name == "b":
            may_load.wait(20)
            return Model(FakeModel(config.model)), second
        return Model(FakeModel(config.model)), engine

    config = load_config(model_file, {"listen": [f"unix:{folder}/s/x.sock"], "model_dir": folder})
    async with (
        running(config, loader=load) as server,
        AsyncClient(str(server.endpoints[0]), retry=NO_RETRY, timeout_s=20) as client,
    ):
        creating = asyncio.create_task(create(client))
        await eventually(lambda: server.served.roster.find("b"))
        states = {model.name: model.state for model in await client.models()}
        assert states["b"] == model_service_pb2.MODEL_STATE_LOADING
        assert await health(client, "b") == NOT_SERVING
        with pytest.raises(UnavailableError) as caught:
            await client.tokenize("x", model="b")
        assert caught.value.reason == "LOADING"
        assert (await client.generate_once("x", model="fake")).text == "one"
        with pytest.raises(XllmError) as exists:
            await create(client)
        assert exists.value.reason == "ENGINE_EXISTS"
        # The caller gives up: the load cannot be cut short, but what it brings is given back.
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        await eventually(lambda: server.gate.num_calls == 0)
        may_load.set()
        await eventually(lambda: server.served.roster.find("b") is None)
        assert second.is_closed


# ---- the end of one ----


async def test_ending_one_lets_its_calls_finish_and_does_not_touch_the_others(
    both: tuple[Server, AsyncClient], engine: FakeEngine, second: FakeEngine
) -> None:
    server, client = both
    await create(client)
    engine.answer = second.answer = None
    beside, running_on_b = client.generate("x", model="fake"), client.generate("x", model="b")
    await eventually(lambda: engine.live and second.live)
    second.accept()
    engine.accept()
    ending = asyncio.create_task(destroy(client, seconds=20))
    await eventually(lambda: server.served.roster.find("b").is_ending)  # type: ignore[union-attr]
    with pytest.raises(UnavailableError) as caught:
        await client.generate_once("x", model="b")
    assert caught.value.reason == "DRAINING"
    second.token(1, "whole")
    second.finish()
    assert (await running_on_b.result()).text == "whole"
    ended = await ending
    assert (ended.num_ended_calls, ended.freed_bytes > 0) == (0, True)
    assert second.is_closed and not engine.is_closed
    engine.token(1, "beside")
    engine.finish()
    assert (await beside.result()).text == "beside"
    assert [model.name for model in await client.models()] == ["fake"]


async def test_what_outlasts_the_grace_is_cut_short_and_told_so(
    both: tuple[Server, AsyncClient], second: FakeEngine
) -> None:
    _, client = both
    await create(client)
    second.answer = None
    cut = client.generate("x", model="b")
    await eventually(lambda: second.live)
    second.accept()
    await anext(cut)
    assert (await destroy(client)).num_ended_calls == 1
    with pytest.raises(UnavailableError) as caught:
        await cut.result()
    assert caught.value.reason == "DRAINING"
    assert second.cancelled == [1]


async def test_a_second_destroy_joins_the_first_and_may_shorten_its_grace(
    both: tuple[Server, AsyncClient], second: FakeEngine
) -> None:
    _, client = both
    await create(client)
    second.answer = None
    cut = client.generate("x", model="b")
    await eventually(lambda: second.live)
    first = asyncio.create_task(destroy(client, seconds=1000))
    await asyncio.sleep(0)
    replies = [await destroy(client), await first]
    assert [reply.num_ended_calls for reply in replies] == [1, 1]
    with pytest.raises(UnavailableError):
        await cut.result()


# ---- Drain ----


async def test_drain_tells_what_is_left_until_nothing_is(both: tuple[Server, AsyncClient], engine: FakeEngine) -> None:
    server, client = both
    engine.answer = None
    calls = [client.generate("x") for _ in range(2)]
    await eventually(lambda: len(engine.live) == 2)
    engine.accept(1)
    await eventually(lambda: server.served.generations.count_states() == (1, 1))
    draining: Any = client._admin.Drain(admin_service_pb2.DrainRequest(grace={"seconds": 20}))
    told = await draining.read()
    assert (told.num_running_requests, told.num_waiting_requests, told.is_drained) == (1, 1, False)
    with pytest.raises(UnavailableError) as caught:
        await client.generate_once("y")
    assert caught.value.reason == "DRAINING"
    engine.token(1, "a")
    engine.finish(1)
    told = await draining.read()
    assert (told.num_running_requests, told.num_waiting_requests) == (0, 1)
    engine.accept(2)
    engine.finish(2)
    while not told.is_drained:
        told = await draining.read()
    assert await draining.read() is grpc.aio.EOF
    assert sorted([(await call.result()).text for call in calls]) == ["", "a"]
    assert await health(client, "") == NOT_SERVING


async def test_drain_ends_what_outlasts_its_grace(both: tuple[Server, AsyncClient], engine: FakeEngine) -> None:
    _, client = both
    engine.answer = None
    call = client.generate("x")
    await eventually(lambda: engine.live)
    draining: Any = client._admin.Drain(admin_service_pb2.DrainRequest(grace={"nanos": 50_000_000}))
    told = [reply async for reply in draining]
    assert told[-1].is_drained and not told[0].is_drained
    with pytest.raises(UnavailableError):
        await call.result()


async def test_a_grace_below_zero_is_refused_and_nothing_drains(both: tuple[Server, AsyncClient]) -> None:
    server, client = both
    draining: Any = client._admin.Drain(admin_service_pb2.DrainRequest(grace={"seconds": -1}))
    with pytest.raises(grpc.RpcError) as caught:
        await draining.read()
    assert from_rpc_error(caught.value, "").reason == "INVALID_FIELD"
    assert not server.served.is_draining


# ---- who may ----


@pytest.mark.parametrize("who", ["user", "admin"])
async def test_only_operators_make_and_end_engines_where_there_are_any(
    serve: Serve, engine: FakeEngine, second: FakeEngine, folder: Path, who: str
) -> None:
    tokens = {"user": "an-ordinary-long-token", "admin": "a-token-of-an-operator"}
    settings: dict[str, Any] = {"model_dir": folder}
    for name, setting in (("user", "token_file"), ("admin", "admin_token_file")):
        settings[setting] = folder / name
        settings[setting].write_text(tokens[name])
        settings[setting].chmod(0o600)
    engine.answer = ["one"]
    async with serve(token=tokens[who], others={"b": second}, **settings) as (server, client):
        assert (await client.generate_once("x")).text == "one"
        assert await client.load() and (await client.server_info()).models
        if who == "admin":
            await create(client)
            await destroy(client)
            return
        drain: Any = client._admin.Drain(admin_service_pb2.DrainRequest(), metadata=client.metadata)
        for work in (create(client), destroy(client, "fake"), drain.read()):
            with pytest.raises((XllmError, grpc.RpcError)) as caught:
                await work
            error: Any = caught.value
            refused = error if isinstance(error, XllmError) else from_rpc_error(error, "")
            assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
        assert not server.served.is_draining and len(server.served.roster.loaded()) == 1
