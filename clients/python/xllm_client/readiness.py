"""How long, and through which answers, a client waits for a server to get ready."""

from __future__ import annotations

import grpc

from xllm_client.errors import UnavailableError

POLL_S = 0.05
CHECK_TIMEOUT_S = 5.0  # of one health check: a server that does not answer it is stuck


def is_transient(code: grpc.StatusCode) -> bool:
    """Whether a failed health check may come out otherwise soon (NOT_FOUND: the service is not registered yet)."""
    return code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.NOT_FOUND,
    )


def not_ready(endpoint: str, timeout_s: float, seen: str) -> UnavailableError:
    """Return the error of a wait for readiness that was in vain."""
    return UnavailableError(
        grpc.StatusCode.UNAVAILABLE,
        f"{endpoint} is not ready after {timeout_s:g} s; seen last: {seen}",
    )
