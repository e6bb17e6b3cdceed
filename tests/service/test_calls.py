"""What surrounds every call: credentials on all methods, unreadable bytes, limits, reflection, the other services."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.service.conftest import Serve, eventually
from tests.service.fake_engine import FakeEngine
from xllm_client import AsyncClient, InvalidArgumentError, XllmError
from xllm_client.errors import from_rpc_error
from xllm_client.v1 import (
    admin_service_pb2,
    decode_mode_pb2,
    generation_service_pb2,
    model_service_pb2,
    slot_service_pb2,
)
from xllm_service.app import Server
from xllm_service.servicers.admin import AdminServicer
from xllm_service.servicers.generation import GenerationServicer
from xllm_service.servicers.model import ModelServicer
from xllm_service.servicers.slots import SlotServicer

TOKEN = "a-long-enough-token"
REFLECTION = [f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")]
METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in (
        generation_service_pb2.DESCRIPTOR,
        model_service_pb2.DESCRIPTOR,
        admin_service_pb2.DESCRIPTOR,
        slot_service_pb2.DESCRIPTOR,
        health_pb2.DESCRIPTOR,
    )
    for service in file.services_by_name.values()
    for method in service.methods
]


async def send(client: AsyncClient, method: str, data: bytes, token: str | None = None) -> bytes:
    """Send raw bytes and return the first reply, whatever kind of method it is."""
    metadata = (("authorization", token),) if token is not None else ()
    call: Any = client.channel.unary_stream(method)
    call = call(data, metadata=metadata, timeout=10)
    reply = await call.read()
    if reply is grpc.aio.EOF:
        raise AssertionError(f"{method} ended without a reply")
    call.cancel()
    assert isinstance(reply, bytes)
    return reply


async def failure(client: AsyncClient, method: str, data: bytes, token: str | None = None) -> XllmError:
    with pytest.raises(grpc.RpcError) as caught:
        await send(client, method, data, token)
    return from_rpc_error(caught.value, "")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("method", [*METHODS, *REFLECTION, "/xllm.v1.Nothing/Nowhere"])
async def test_every_method_needs_the_token(serve: Serve, token_file: Path, method: str) -> None:
    async with serve(token_file=token_file, token=TOKEN) as (_, client):
        for wrong in (None, "", "Bearer", "Bearer wrong-but-long-token", f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
            refused = await failure(client, method, b"", wrong)
            assert refused.code is grpc.StatusCode.UNAUTHENTICATED, (method, wrong)
            assert refused.reason == "UNAUTHENTICATED"
            assert TOKEN not in str(refused)


async def test_the_right_token_is_let_in(serve: Serve, token_file: Path, engine: FakeEngine) -> None:
    engine.answer = ["ok"]
    async with serve(token_file=token_file, token=TOKEN) as (_, client):
        await client.wait_ready()
        assert (await client.generate_once("x")).text == "ok"


@pytest.mark.parametrize("servicer", [GenerationServicer, ModelServicer, AdminServicer, SlotServicer])
def test_every_method_of_the_contract_is_served(servicer: type) -> None:
    (stub,) = (one for one in servicer.__mro__ if one.__module__.endswith("_pb2_grpc"))
    absent = [name for name, method in vars(stub).items() if callable(method) and getattr(servicer, name) is method]
    assert not absent


@pytest.mark.parametrize(
    "method",
    [
        "/xllm.v1.GenerationService/Generate",
        "/xllm.v1.GenerationService/GenerateOnce",
        "/xllm.v1.ModelService/Tokenize",
        "/xllm.v1.AdminService/GetServerInfo",
        "/grpc.health.v1.Health/Check",
        *REFLECTION,
    ],
)
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x05abc"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(client: AsyncClient, method: str, data: bytes) -> None:
    refused = await failure(client, method, data)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.reason == "MALFORMED_REQUEST"


async def test_text_that_is_not_utf8_is_an_invalid_argument(client: AsyncClient) -> None:
    refused = await failure(client, "/xllm.v1.ModelService/Tokenize", b"\x12\x02\xc3\x28")
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")


async def test_a_message_too_large_is_resource_exhausted(serve: Serve) -> None:
    async with serve(max_message_bytes=1000) as (_, client):
        with pytest.raises(XllmError) as caught:
            await client.tokenize("x" * 2000)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.reason == ""
        assert await client.tokenize("ok")


async def test_more_calls_than_allowed_are_told_to_wait(serve: Serve, engine: FakeEngine) -> None:
    async with serve(max_concurrent_calls=2) as (server, client):
        calls = [client.generate("x") for _ in range(2)]
        await eventually(lambda: len(engine.live) == 2)
        with pytest.raises(XllmError) as caught:
            await client.generate_once("x")
        assert (caught.value.reason, caught.value.retry_delay_s) == ("TOO_MANY_CALLS", 1.0)
        await client.wait_ready()  # health is not counted
        for call in calls:
            call.close()
        await eventually(lambda: server.gate.num_calls == 0)
        engine.answer = ["ok"]
        assert (await client.generate_once("x")).text == "ok"


# ---- reflection ----


async def reflect(client: AsyncClient, method: str, **request: Any) -> reflection_pb2.ServerReflectionResponse:
    data = reflection_pb2.ServerReflectionRequest(**request).SerializeToString()
    return reflection_pb2.ServerReflectionResponse.FromString(await send(client, method, data))


@pytest.mark.parametrize("method", REFLECTION)
async def test_reflection_lists_and_describes_every_service(client: AsyncClient, method: str) -> None:
    listed = await reflect(client, method, list_services="")
    names = [service.name for service in listed.list_services_response.service]
    assert names == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "xllm.v1.AdminService",
        "xllm.v1.GenerationService",
        "xllm.v1.ModelService",
        "xllm.v1.SlotService",
    ]
    for name in names:
        described = await reflect(client, method, file_containing_symbol=name)
        assert described.file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize("method", REFLECTION)
async def test_reflection_is_off_where_it_was_turned_off(serve: Serve, method: str) -> None:
    async with serve(reflection="off") as (_, client):
        assert (await failure(client, method, b"")).code is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_is_off_for_other_machines_and_on_at_home(serve: Serve, tmp_path: Path) -> None:
    listen = [f"unix:{tmp_path}/s/x.sock", "0.0.0.0:0"]
    async with serve(listen=listen, allow_plaintext=True) as (server, client):
        await reflect(client, REFLECTION[0], list_services="")
        port = next(endpoint.port for endpoint in server.endpoints if not endpoint.is_unix)
        async with AsyncClient(f"127.0.0.1:{port}") as other:
            assert (await failure(other, REFLECTION[0], b"")).code is grpc.StatusCode.UNIMPLEMENTED
            await other.wait_ready()


# ---- the other services ----


async def test_tokenize_and_back(client: AsyncClient) -> None:
    stub = client._model
    reply = await stub.Tokenize(model_service_pb2.TokenizeRequest(text="né<|end|>", include_pieces=True))
    assert b"".join(reply.pieces).decode() == "né<|end|>"
    assert await client.detokenize(list(reply.token_ids)) == "né<|end|>"
    parsed = await client.tokenize("<|end|>", parse_special=True)
    assert parsed == [0]
    assert await client.detokenize(parsed) == ""
    assert await client.detokenize(parsed, render_special=True) == "<|end|>"
    cut = await stub.Detokenize(model_service_pb2.DetokenizeRequest(token_ids=reply.token_ids[:2]))
    assert (cut.text, cut.raw) == ("n\N{REPLACEMENT CHARACTER}", b"n\xc3")


async def test_an_id_out_of_range_names_its_position(client: AsyncClient) -> None:
    for ids in ([5, 5, -1], [5, 5, 259], [5, 5, 2**31]):
        with pytest.raises(InvalidArgumentError) as caught:
            await client.detokenize(ids)
        assert caught.value.field_violations[0].field == "token_ids[2]"


async def test_render_chat_is_what_generate_would_use(client: AsyncClient) -> None:
    request = model_service_pb2.RenderChatRequest(
        chat={"messages": [{"role": "user", "parts": [{"text": "hi"}]}]}, include_token_ids=True
    )
    reply = await client._model.RenderChat(request)
    assert reply.text == "<|user|>hi<|assistant|>"
    assert list(reply.token_ids) == [1, *await client.tokenize("hi"), 2]


async def test_models_tell_what_they_are(client: AsyncClient, server: Server) -> None:
    model = await client.get_model(include_metadata=True)
    assert (model.summary.name, model.summary.architecture, model.summary.max_seq_len) == ("fake", "fake", 256)
    assert model.summary.state == model_service_pb2.MODEL_STATE_READY
    assert [(use.type, use.num_tensors, use.num_elements) for use in model.tensor_types] == [("Q4_1", 1, 8 * 259)]
    assert [(end.id, end.text, list(end.sources)) for end in model.end_of_generation] == [(0, "<|end|>", ["a test"])]
    assert (model.plan.backend, model.plan.kv_bytes_per_token, model.plan.fits) == ("cpu", 64, True)
    assert model.plan.decode_mode == decode_mode_pb2.DECODE_MODE_BATCHED
    assert (model.shape.rope_theta, model.shape.rope_dim) == (5e5, 4)
    assert [entry.key for entry in model.metadata] == ["general.architecture", "fake.rope.freq_base"]
    assert not (await client.get_model()).metadata
    await eventually(lambda: server.served.get_model("").digest.value)
    assert (await client.models())[0].digest.startswith("sha256:")


async def test_server_info_has_the_limits_in_force(client: AsyncClient, server: Server) -> None:
    info = await client.server_info()
    assert info.limits.max_message_bytes == server.config.max_message_bytes
    assert info.limits.max_queue_requests == server.config.max_queue
    assert info.limits.max_stop_strings == 16 and info.limits.max_top_logprobs == 20
    assert not info.limits.HasField("default_max_tokens")
    assert admin_service_pb2.CAPABILITY_DECODE_BATCHED in info.capabilities
    assert admin_service_pb2.CAPABILITY_SLOTS in info.capabilities
    assert admin_service_pb2.CAPABILITY_FORK_SLOT in info.capabilities
    assert info.limits.max_lease.ToTimedelta().total_seconds() == server.config.max_lease
    assert list(info.models) == ["fake"] and not info.is_draining


@pytest.mark.parametrize(("max_queue", "most"), [(3, None), (4096, 128)])
async def test_as_many_outputs_as_are_reported_are_accepted_and_no_more(
    serve: Serve, engine: FakeEngine, max_queue: int, most: int | None
) -> None:
    engine.info = dataclasses.replace(engine.info, max_queue=max_queue)
    engine.answer = ["ok"]
    most = most or engine.info.max_slots + max_queue
    async with serve() as (_, client):
        assert (await client.server_info()).limits.max_outputs == most
        assert len((await client.generate_once("x", num_outputs=most)).outputs) == most
        with pytest.raises(InvalidArgumentError, match=str(most)):
            await client.generate_once("x", num_outputs=most + 1)


async def test_load_is_a_snapshot(client: AsyncClient, engine: FakeEngine) -> None:
    call = client.generate("x")
    await eventually(lambda: engine.live)
    (load,) = await client.load()
    assert (load.num_slots, load.num_free_slots, load.num_used_kv_blocks) == (4, 3, 1)
    assert (load.num_prompt_tokens, load.num_cached_tokens) == (8, 2)
    while not load.HasField("step_time"):
        (load,) = await client.load()
    assert load.step_time.ToTimedelta().total_seconds() == 0.25
    call.close()


async def test_metrics_are_scraped_over_http(serve: Serve, engine: FakeEngine) -> None:
    engine.answer = ["a", "b"]
    reader_names = ("xllm_requests_running", "xllm_kv_cache_usage_ratio", "xllm_time_to_first_token_seconds_count 1.0")
    async with serve(metrics="127.0.0.1:0") as (server, client):
        await client.generate_once("x")
        assert server.metrics_port
        reader, writer = await asyncio.open_connection("127.0.0.1", server.metrics_port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    for name in reader_names:
        assert name in text
    assert 'xllm_calls_total{code="OK",method="xllm.v1.GenerationService/GenerateOnce"} 1.0' in text
