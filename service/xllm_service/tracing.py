"""Spans of calls, where that is asked for: OpenTelemetry is an optional extra, imported here alone and only then.

A call's span continues the trace whose W3C `traceparent` comes in its metadata. It holds the method, the status and
what was used, never a prompt or an answer. Where spans are sent is for the OTEL_* names of OpenTelemetry itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from xllm_client.v1 import generation_service_pb2

# The span of the call that runs; None where none is made.
_current: ContextVar[Any] = ContextVar("span", default=None)
_HEADERS = ("traceparent", "tracestate")


class TracingError(Exception):
    """Spans were asked for and cannot be made; the message says what to install."""


class Tracing:
    """Makes spans.

    Args:
        exporter: where they go; None: to OTLP over gRPC, as the OTEL_* names say.

    Raises:
        TracingError: the extra is not installed.
    """

    def __init__(self, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ImportError as error:
            raise TracingError(f"--tracing: {error.name} is not installed; pip install 'xllm[otel]'") from None
        # note: the provider stays here, so that two servers in one process do not share it.
        self._provider = TracerProvider(resource=Resource.create({"service.name": "xllm"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("xllm_service")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._in_context = set_span_in_context

    @contextlib.contextmanager
    def call(self, method: str, metadata: Any) -> Iterator[Call]:
        """Make a span of the body.

        Args:
            method: as gRPC names it: /package.Service/Method.
            metadata: what the client sent.
        """
        carrier = {key: value for key, value in metadata or () if key in _HEADERS and isinstance(value, str)}
        service, _, name = method.lstrip("/").partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        span = self._tracer.start_span(
            method.lstrip("/"), self._propagator.extract(carrier), kind=self._kind, attributes=attributes
        )
        call = Call(self, span)
        token = _current.set(call)
        try:
            yield call
        finally:
            _current.reset(token)
            span.end()

    def part(self, parent: Any, name: str, begin_ns: int, end_ns: int) -> None:
        """Make a span of what lies in the past."""
        span = self._tracer.start_span(name, self._in_context(parent), start_time=begin_ns)
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left, and end; waits some seconds at most."""
        self._provider.shutdown()


class Call:
    """The span of one call."""

    def __init__(self, tracing: Tracing, span: Any) -> None:
        self._tracing = tracing
        self._span = span

    def end(self, code: str, number: int) -> None:
        """Note the status: its name and number."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("rpc.grpc.status_code", number)
        if code in ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"):
            self._span.set_status(Status(StatusCode.ERROR, code))

    def describe(self, receipt: generation_service_pb2.GenerationReceipt) -> None:
        """Add what a generation used and where its time went."""
        usage, timings = receipt.usage, receipt.timings
        self._span.set_attributes(
            {
                "gen_ai.request.model": receipt.model,
                "gen_ai.response.id": receipt.request_id,
                "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
                "gen_ai.usage.output_tokens": usage.num_generated_tokens,
                "xllm.cached_tokens": usage.num_cached_tokens,
                "xllm.error_reason": receipt.error_reason,
            }
        )
        end = time.time_ns()
        spans = [(name, getattr(timings, name).ToNanoseconds()) for name in ("queue", "prefill", "decode")]
        begin = end - timings.total.ToNanoseconds() if timings.HasField("total") else end - sum(ns for _, ns in spans)
        for name, length in spans:
            if length:
                self._tracing.part(self._span, name, begin, begin + length)
                begin += length


def describe(receipt: generation_service_pb2.GenerationReceipt) -> None:
    """Add what a generation used to the span of the call that runs, where there is one."""
    call = _current.get()
    if call is not None:
        call.describe(receipt)
