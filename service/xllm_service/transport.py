"""What the settings mean to gRPC: limits, keepalive and ports of one server."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import grpc.aio

from xllm_client.endpoint import Endpoint
from xllm_service.config import ServeConfig


class ListenError(Exception):
    """An address cannot be listened on; the message names it."""


def hard_limit(config: ServeConfig) -> int:
    """Return what bounds the calls that even get as far as our own limit, which answers with a reason."""
    return 2 * config.max_concurrent_calls + 64


def options(config: ServeConfig) -> list[tuple[str, Any]]:
    """Return the channel arguments of a server."""
    arguments: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", config.max_calls_per_connection or hard_limit(config)),
        ("grpc.max_metadata_size", config.max_metadata_bytes),
        (
            "grpc.absolute_max_metadata_size",
            config.max_metadata_bytes,
        ),  # else it is at least 16 KiB, and refuses at random
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(config.handshake_timeout)),
        ("grpc.so_reuseport", 0),  # else a second server shares the port, and each gets half of the calls
        # A long prefill sends nothing for minutes: clients may ping meanwhile, also between calls.
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(config.min_ping_interval)),
        ("grpc.keepalive_permit_without_calls", 1),
        # And we find out about clients whose machine has gone.
        ("grpc.keepalive_time_ms", _ms(config.keepalive_time)),
        ("grpc.keepalive_timeout_ms", _ms(config.keepalive_timeout)),
    ]
    if config.max_connection_idle:
        arguments.append(("grpc.max_connection_idle_ms", _ms(config.max_connection_idle)))
    if config.max_connection_age:
        arguments.append(("grpc.max_connection_age_ms", _ms(config.max_connection_age)))
    return arguments


def add_port(
    server: grpc.aio.Server, address: Endpoint, credentials: grpc.ServerCredentials | None, flag: str = "--listen"
) -> int:
    """Listen on an address and return its port, 1 for a unix socket. Raises ListenError."""
    try:
        if credentials is None:
            return server.add_insecure_port(str(address))
        return server.add_secure_port(str(address), credentials)
    except RuntimeError:
        raise ListenError(f"{flag} {address}: cannot listen there: {_problem(address)}") from None


def _problem(address: Endpoint) -> str:
    """Return why an address cannot be listened on, which gRPC tells to its own log alone."""
    if address.path is not None:
        return "choose another path"
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        return f"{(error.strerror or str(error)).lower()}; choose another address, or stop what uses it"
    return "try again"


def _ms(seconds: float) -> int:
    return min(round(seconds * 1000), 2**31 - 1)
