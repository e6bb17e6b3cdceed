"""Peers that speak HTTP/2 in bad faith: frames written by hand, so that no library is polite in between."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from pathlib import Path

import pytest

from tests.e2e.serving import eventually, serving
from tests.fault.invariants import unharmed
from xllm_client.v1 import generation_service_pb2
from xllm_service.app import Server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
ACK = 1
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame: length u24, type u8, flags u8, stream u32, payload."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that no table keeps (RFC 7541, 6.2.2); names and values below 127 bytes."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def request_headers(path: str) -> bytes:
    fields = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers",
        "content-type": "application/grpc",
    }  # fmt: skip
    return b"".join(literal(name.encode(), value.encode()) for name, value in fields.items())


class Watched:
    """Notes the most calls and tasks there ever are at once."""

    def __init__(self, server: Server) -> None:
        self.most_calls = 0
        self.num_calls = 0
        enter = server.gate.enter

        def counted(*, is_work: bool = True) -> None:
            enter(is_work=is_work)
            self.num_calls += 1
            self.most_calls = max(self.most_calls, server.gate.num_calls)

        server.gate.enter = counted  # type: ignore[method-assign]


async def storm(path: str, num_streams: int, watched: Watched | None) -> None:
    """Open so many streams, fifty at a time, and reset them; connect again when thrown out.

    With `watched` each stream brings a whole request, and the first batches are reset when they have come through.
    """
    spec = generation_service_pb2.GenerateRequest(spec={"text": "x", "limits": {"max_tokens": 1000}})
    message = spec.SerializeToString()
    body = b"\0" + struct.pack(">I", len(message)) + message
    headers = request_headers("/xllm.v1.GenerationService/Generate")
    num_awaited = 0 if watched is None else 20
    left = num_streams
    while left > 0:
        reader, writer = await asyncio.open_unix_connection(path)
        ended: set[int] = set()
        swallowing = asyncio.ensure_future(_swallow(reader, writer, ended))
        writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
        try:
            for batch in range(min(left, 10_000) // 50):
                streams = [2 * (50 * batch + number) + 1 for number in range(50)]
                left -= len(streams)
                num_before = 0 if watched is None else watched.num_calls
                for stream in streams:
                    writer.write(frame(HEADERS, END_HEADERS, stream, headers))
                    if watched is not None:
                        writer.write(frame(DATA, END_STREAM, stream, body))
                if watched is not None and num_awaited > 0:
                    # A server under attack may also refuse every one of them, or close the connection.
                    await eventually(
                        lambda: watched.num_calls > num_before or swallowing.done() or ended.issuperset(streams),  # noqa: B023
                        timeout_s=60,
                    )
                    if swallowing.done():
                        break
                    num_awaited -= watched.num_calls > num_before
                for stream in streams:
                    writer.write(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
                await writer.drain()
        except ConnectionError:
            pass  # thrown out, which is an answer too
        finally:
            writer.close()
            swallowing.cancel()
            await asyncio.wait((swallowing,))


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ended: set[int]) -> None:
    """Read what comes, noting the streams that end; be polite about settings and pings: only then are streams taken."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                ended.add(int.from_bytes(head[5:9], "big"))
            if kind in (SETTINGS, PING) and not flags & ACK:
                writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("with_message", [False, True])
@pytest.mark.parametrize(
    "num_streams", [4_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_36_a_storm_of_streams_that_are_reset_at_once(
    random_model: Path, tmp_path: Path, num_streams: int, with_message: bool
) -> None:
    settings = {"max_concurrent_calls": 16, "max_queue": 8}
    async with serving(random_model, tmp_path, **settings) as (server, client):
        path = server.endpoints[0].path
        assert path is not None
        async with unharmed(server, client) as seen:
            watched = Watched(server)
            seen.received_bytes += 200 * num_streams
            await storm(str(path), num_streams, watched if with_message else None)
        assert watched.most_calls <= 16
        assert not with_message or watched.num_calls >= 20


GARBAGE = {
    "no_http2": b"GET / HTTP/1.1\r\n\r\n",
    "noise": bytes(range(256)) * 64,
    "half_a_preface": PREFACE[:10],
    "a_frame_too_long": PREFACE + b"\xff\xff\xff" + bytes(6),
    "headers_that_are_none": PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, b"\xff" * 64),
    "a_message_longer_than_it_says": PREFACE
    + frame(SETTINGS, 0, 0, b"")
    + frame(HEADERS, END_HEADERS, 1, request_headers("/xllm.v1.GenerationService/Generate"))
    + frame(DATA, END_STREAM, 1, b"\0\xff\xff\xff\xff" + b"x" * 100),
    "a_stream_of_zero": PREFACE + frame(SETTINGS, 0, 0, b"") + frame(DATA, END_STREAM, 0, b"x"),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_36_bytes_that_are_no_calls(random_model: Path, tmp_path: Path, name: str) -> None:
    async with serving(random_model, tmp_path) as (server, client), unharmed(server, client) as seen:
        path = server.endpoints[0].path
        assert path is not None
        for _ in range(5):
            _, writer = await asyncio.open_unix_connection(str(path))
            writer.write(GARBAGE[name])
            seen.received_bytes += len(GARBAGE[name])
            await writer.drain()
            writer.close()
