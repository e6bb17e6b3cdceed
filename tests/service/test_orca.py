"""Load reports: the bytes that a load balancer expects, in the trailer of a call and as a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from cyengine.types import Status
from tests.service.conftest import Serve, eventually
from tests.service.fake_engine import FakeEngine
from xllm_client import NO_RETRY, AsyncClient, InternalError
from xllm_service import orca
from xllm_service.app import Server


def load_report(data: bytes) -> Any:
    """Read an OrcaLoadReport as its published definition has it, in a pool of its own."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", package="t", syntax="proto3")
    message = file.message_type.add(name="Report")
    for number, name in ((1, "cpu_utilization"), (2, "mem_utilization"), (9, "application_utilization")):
        message.field.add(name=name, number=number, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
    for number, name, entry in ((4, "request_cost", "RequestCostEntry"), (8, "named_metrics", "NamedMetricsEntry")):
        nested = message.nested_type.add(name=entry)
        nested.options.map_entry = True
        nested.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
        nested.field.add(name="value", number=2, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
        message.field.add(
            name=name,
            number=number,
            type=field.TYPE_MESSAGE,
            type_name=f".t.Report.{entry}",
            label=field.LABEL_REPEATED,
        )
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Report")).FromString(data)


def test_a_report_is_the_message_that_balancers_read() -> None:
    def engine(used: int, waiting: int, blocks: int) -> Any:
        return SimpleNamespace(num_waiting=waiting, slots_total=4, slots_used=used, blocks_total=64, blocks_used=blocks)

    found = load_report(orca.report({"a": engine(4, 2, 16), "b" * 200: engine(1, 0, 48)}, {"prompt_tokens": 300}))
    assert found.application_utilization == 1.5
    assert found.mem_utilization == 0.75
    assert dict(found.request_cost) == {"prompt_tokens": 300.0}
    assert dict(found.named_metrics) == {"xllm.a.requests_waiting": 2.0, f"xllm.{'b' * 200}.requests_waiting": 0.0}
    assert load_report(orca.report({})).application_utilization == 0


@contextlib.asynccontextmanager
async def overheard(target: Path, folder: Path) -> AsyncIterator[tuple[str, bytearray]]:
    """A socket in front of a server's, and all that the server says through it.

    gRPC keeps this trailer for its own load balancing and does not show it to callers, so it is looked for on the wire.
    """
    said = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: bytearray | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if heard is not None:
                    heard += data
                writer.write(data)
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own_reader, own_writer = await asyncio.open_unix_connection(str(target))
        await asyncio.gather(pump(reader, own_writer, None), pump(own_reader, writer, said))

    server = await asyncio.start_unix_server(connect, folder / "front.sock")
    async with server:
        yield f"unix:{folder}/front.sock", said


async def test_a_call_that_generates_has_a_report_in_its_trailer(
    serve: Serve, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bytes] = []
    report = orca.report

    def noted(*arguments: Any) -> bytes:
        made.append(report(*arguments))
        return made[-1]

    monkeypatch.setattr(orca, "report", noted)
    engine.answer = ["a", "b"]
    async with serve() as (server, _):
        path = server.endpoints[0].path
        assert path is not None
        async with (
            overheard(path, tmp_path) as (front, said),
            AsyncClient(front, retry=NO_RETRY, timeout_s=20) as client,
        ):
            await client.generate_once("xyz")
            found = load_report(made[0])
            assert dict(found.request_cost) == {"prompt_tokens": 3.0, "generated_tokens": 2.0}
            assert made[0] in said
            await client.models()
            assert len(made) == 1, "a call that computes nothing has none"
            engine.answer, engine.has_failed = None, False
            call = client.generate("xyz")
            await eventually(lambda: len(engine.live) == 1)
            engine.accept(2)
            engine.finish(2, status=Status.NON_FINITE_LOGITS)
            with pytest.raises(InternalError):
                await call.result()
            assert len(made) == 2 and made[1] in said, "also where it fails"


async def test_reports_are_streamed_to_who_asks(server: Server) -> None:
    async with grpc.aio.insecure_channel(str(server.endpoints[0])) as channel:
        stream: Any = channel.unary_stream("/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics")
        call = stream(b"\x0a\x02\x08\x01", timeout=20)  # every second
        for _ in range(2):
            assert "xllm.fake.requests_waiting" in load_report(await call.read()).named_metrics
        call.cancel()
        broken = stream(b"\x0a\x05\x08", timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await broken.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
