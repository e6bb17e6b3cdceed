"""Spans on their way out: to an OTLP collector over gRPC, as the OTEL_* names say, and past one that is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.service.conftest import Serve
from tests.service.fake_engine import FakeEngine


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent, and the metadata that came with it."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    register(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-project=of-a-test")
    yield collector
    server.stop(None).wait()


async def test_a_collector_gets_every_span_and_nothing_that_was_said(
    serve: Serve, engine: FakeEngine, collector: Collector
) -> None:
    engine.answer = ["very", " private"]
    async with serve(tracing=True) as (_, client):
        await client.generate_once("secret", request_id="r1")
        with pytest.raises(Exception, match="temperature"):
            await client.generate_once("x", temperature=-1.0)
    both = [span for span in collector.spans if span.name == "xllm.v1.GenerationService/GenerateOnce"]
    assert len(both) == 2
    values = {one.key: one.value for one in both[0].attributes}
    assert values["gen_ai.response.id"].string_value == "r1"
    assert values["gen_ai.usage.output_tokens"].int_value == 2
    assert {one.key: one.value for one in both[1].attributes}["rpc.grpc.status_code"].int_value == 3
    parts = [span for span in collector.spans if span.name in ("prefill", "decode")]
    assert parts and {span.parent_span_id for span in parts} == {both[0].span_id}
    resource = collector.requests[0].resource_spans[0].resource
    assert {one.key: one.value.string_value for one in resource.attributes}["service.name"] == "xllm"
    assert collector.metadata[0]["x-project"] == "of-a-test"
    text = "".join(str(request) for request in collector.requests)
    assert "secret" not in text and "private" not in text


async def test_a_collector_that_is_gone_holds_up_no_call(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        engine.answer = ["ok"]
        async with serve(tracing=True) as (_, client):
            for _ in range(20):
                assert (await client.generate_once("x", timeout_s=10)).text == "ok"
