"""Load reports in the form that load balancers read: ORCA (gRFC A51), of a call in its trailer, and as a stream.

The two messages are written here by hand, as they lie on the wire: their published Python packages register descriptors
that collide with googleapis-common-protos, and a handful of doubles needs no descriptor.

    OrcaLoadReport  1 cpu_utilization double, 2 mem_utilization double, 4 request_cost map<string, double>,
                    8 named_metrics map<string, double>, 9 application_utilization double
    OrcaLoadReportRequest  1 report_interval google.protobuf.Duration
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Protocol

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError

from xllm_service.errors import Reason, ServiceError

TRAILER = "endpoint-load-metrics-bin"
SERVICE = "xds.service.orca.v3.OpenRcaService"
_MIN_INTERVAL_S = 1.0
_DEFAULT_INTERVAL_S = 30.0
_MAX_INTERVAL_S = 3600.0


# What the call that runs has taken, by name; empty until it is known.
call_cost: ContextVar[Mapping[str, float]] = ContextVar("call_cost", default=MappingProxyType({}))


class Snapshot(Protocol):
    """What is read of an engine's statistics."""

    num_waiting: int
    slots_total: int
    slots_used: int
    blocks_total: int
    blocks_used: int


def report(engines: Mapping[str, Any], cost: Mapping[str, float] | None = None) -> bytes:
    """Return an OrcaLoadReport.

    Utilization is that of the fullest engine: requests that run or wait over slots, so it exceeds 1 while requests
    wait. Memory is the share of its KV blocks that live requests hold.

    Args:
        engines: statistics by model.
        cost: what one call took, by name.
    """
    loads = [(stats.slots_used + stats.num_waiting) / max(1, stats.slots_total) for stats in engines.values()]
    memory = [stats.blocks_used / max(1, stats.blocks_total) for stats in engines.values()]
    named = {f"xllm.{name}.requests_waiting": float(stats.num_waiting) for name, stats in engines.items()}
    return b"".join(
        (
            _double(2, max(memory, default=0.0)),
            *(_entry(4, name, value) for name, value in (cost or {}).items()),
            *(_entry(8, name, value) for name, value in named.items()),
            _double(9, max(loads, default=0.0)),
        )
    )


def out_of_band(engines: Callable[[], Mapping[str, Any]]) -> grpc.GenericRpcHandler:
    """Return the service that streams reports to a load balancer, at the interval that it asks for."""

    async def stream(request: float, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield report(engines())
            await asyncio.sleep(request)

    method: Any = grpc.unary_stream_rpc_method_handler(stream, request_deserializer=_interval_s)
    return grpc.method_handlers_generic_handler(SERVICE, {"StreamCoreMetrics": method})


def _double(field: int, value: float) -> bytes:
    """A double, left out where it is 0, as in proto3."""
    return bytes([field << 3 | 1]) + struct.pack("<d", value) if value else b""


def _entry(field: int, name: str, value: float) -> bytes:
    """One entry of a map<string, double>."""
    key = name.encode()
    inner = b"\x0a" + _varint(len(key)) + key + b"\x11" + struct.pack("<d", value)
    return bytes([field << 3 | 2]) + _varint(len(inner)) + inner


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _interval_s(data: bytes) -> float:
    """Return the interval of an OrcaLoadReportRequest. Raises ServiceError for bytes that are none."""
    if not data.startswith(b"\x0a"):
        return _DEFAULT_INTERVAL_S
    try:
        size = data[1]
        interval = duration_pb2.Duration.FromString(data[2 : 2 + size])
    except (IndexError, DecodeError):
        raise ServiceError(Reason.MALFORMED_REQUEST, "the request's bytes are not a valid message") from None
    return min(max(interval.seconds + interval.nanos / 1e9, _MIN_INTERVAL_S), _MAX_INTERVAL_S)
