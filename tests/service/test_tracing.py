"""Spans: one for each call, in the trace of its client, with what it used and nothing that was said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.service.fake_engine import FakeEngine, FakeModel
from xllm_client import NO_RETRY, AsyncClient
from xllm_client.v1 import generation_service_pb2
from xllm_service.app import Server, StartError
from xllm_service.config import load_config
from xllm_service.engine import Model
from xllm_service.tracing import Tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def traced(model_file: Path, engine: FakeEngine, tmp_path: Path, calls: Any) -> list[Any]:
    """The spans of a server's life."""
    exporter = InMemorySpanExporter()
    config = load_config(model_file, {"listen": [f"unix:{tmp_path}/t.sock"]})
    server = Server(config, loader=lambda _: (Model(FakeModel(model_file)), engine), tracing=Tracing(exporter))
    await server.start()
    await server.load()
    try:
        await calls(server)
    finally:
        await server.stop()
    return list(exporter.get_finished_spans())


async def test_a_call_is_a_span_of_its_clients_trace(model_file: Path, engine: FakeEngine, tmp_path: Path) -> None:
    engine.answer = ["very", " private"]

    async def calls(server: Server) -> None:
        async with grpc.aio.insecure_channel(str(server.endpoints[0])) as channel:
            spec = generation_service_pb2.GenerationSpec(text="secret", request_id="r1")
            generate: Any = channel.unary_unary("/xllm.v1.GenerationService/GenerateOnce")
            await generate(
                generation_service_pb2.GenerateOnceRequest(spec=spec).SerializeToString(),
                metadata=(("traceparent", f"00-{TRACE}-{PARENT}-01"),),
                timeout=20,
            )

    spans = await traced(model_file, engine, tmp_path, calls)
    (call,) = (span for span in spans if span.name == "xllm.v1.GenerationService/GenerateOnce")
    assert (f"{call.context.trace_id:032x}", f"{call.parent.span_id:016x}") == (TRACE, PARENT)
    assert call.attributes["gen_ai.usage.input_tokens"] == 6
    assert call.attributes["gen_ai.usage.output_tokens"] == 2
    assert call.attributes["gen_ai.response.id"] == "r1"
    assert call.attributes["rpc.grpc.status_code"] == 0
    parts = [span for span in spans if span.name in ("prefill", "decode")]
    assert parts and all(span.parent.span_id == call.context.span_id for span in parts)
    text = " ".join(span.to_json() for span in spans)
    assert "secret" not in text and "private" not in text


async def test_a_refusal_is_a_span_with_its_status(model_file: Path, engine: FakeEngine, tmp_path: Path) -> None:
    async def calls(server: Server) -> None:
        async with AsyncClient(str(server.endpoints[0]), retry=NO_RETRY, timeout_s=20) as client:
            with pytest.raises(Exception, match="temperature"):
                await client.generate_once("x", temperature=-1.0)

    (span,) = await traced(model_file, engine, tmp_path, calls)
    assert span.attributes["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert span.parent is None


async def test_without_the_extra_the_server_says_what_to_install(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = load_config(model_file, {"listen": [f"unix:{tmp_path}/t.sock"], "tracing": True})
    with pytest.raises(StartError, match=r"pip install 'xllm\[otel\]'"):
        await Server(config).start()
    assert not (tmp_path / "t.sock").exists()
