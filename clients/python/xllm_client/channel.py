"""How a channel to the server is set up; shared by the two clients."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import grpc

from xllm_client.endpoint import Endpoint, default_endpoint
from xllm_client.types import Tls

Option = tuple[str, Any]

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # a prompt of a million token ids, or a vocabulary's worth of logprobs
_COMMON: tuple[Option, ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A server that starts a moment after its client is found within a fraction of a second.
    # note: min_reconnect_backoff_ms stays as it is: in spite of its name it is how long one attempt may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
# A long prefill sends nothing for minutes; a ping keeps the connection, and finds out that the other side is gone.
_TCP: tuple[Option, ...] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


@dataclass(frozen=True)
class ChannelSettings:
    """Everything about the connection that does not depend on which kind of channel is opened.

    Attributes:
        target: The endpoint in the form that gRPC takes.
        credentials: TLS; None for plain text.
        options: Channel arguments.
        metadata: Sent with every call.
    """

    target: str
    credentials: grpc.ChannelCredentials | None
    options: tuple[Option, ...]
    metadata: tuple[tuple[str, str], ...]


def channel_settings(endpoint: str | None, token: str | None, tls: Tls | None) -> ChannelSettings:
    """Decide how to connect.

    Raises ValueError for an address that cannot be read, TLS on a unix socket, and a token that would cross a network
    in plain text; PermissionError when another user owns the default socket's folder.
    """
    if endpoint is None:
        address = default_endpoint()
        _check_owner(address)
    else:
        address = Endpoint.parse(endpoint)
    if tls is not None and address.is_unix:
        raise ValueError(f"{address}: TLS is for TCP; a unix socket is private by its folder's mode")
    if token is not None and tls is None and not address.is_loopback:
        raise ValueError(f"{address}: a token without TLS could be read on the way; pass tls=Tls(...)")
    options = _COMMON
    if not address.is_unix:
        options += _TCP
    if address.is_loopback:
        options += (("grpc.enable_http_proxy", 0),)  # http_proxy is meant for other machines
    if tls is not None and tls.server_name is not None:
        options += (("grpc.ssl_target_name_override", tls.server_name),)
    credentials = None
    if tls is not None:
        credentials = grpc.ssl_channel_credentials(tls.root_certificates, tls.private_key, tls.certificate_chain)
    metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
    return ChannelSettings(str(address), credentials, options, metadata)


def _check_owner(address: Endpoint) -> None:
    """Refuse a default socket whose folder someone else made: prompts would go to them."""
    assert address.path is not None
    folder = address.path.parent
    try:
        owner = folder.stat().st_uid
    except FileNotFoundError:
        return
    if owner not in (os.getuid(), 0):
        raise PermissionError(f"{folder} belongs to user {owner}, not to you; name your server's endpoint")
