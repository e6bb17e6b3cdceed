"""grpc.health.v1: whether the server can do its work, by the step loop's own heartbeat, with a true Watch.

Names: "" for the process, one for each service of xllm.v1, one for each model. The library's own asyncio servicer is
not used: a watcher that does not read holds up its other watchers, and one that leaves takes their wake-ups along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from xllm_service.errors import Reason, ServiceError
from xllm_service.logs import get_logger

_CHECK_S = 1.0  # between looks at the engine; faults.md asks for the truth within 5 s
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

_log = get_logger("health")


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Answers Check and Watch; all its names are served, or none is.

    Args:
        names: the services and models besides "".
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(("", *names))
        self._is_serving = False
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """What Check says now."""
        return self._is_serving

    def set_serving(self, is_serving: bool) -> None:
        """Say it, and wake every watcher where that is news."""
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._wake()

    def close(self) -> None:
        """Say NOT_SERVING for good, and end every Watch, which would otherwise hold up the server's end."""
        self._is_serving = False
        self._is_closed = True
        self._wake()

    async def follow(self, problem: Callable[[], str]) -> None:
        """Keep the answer true until cancelled: SERVING while `problem` returns ""."""
        said = ""
        while True:
            found = problem()
            if found and found != said:
                _log.error("not serving: %s", found)
            said = found
            self.set_serving(not found)
            await asyncio.sleep(_CHECK_S)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """The state of one name; NOT_FOUND for a name that is not known."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service or model")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """The state of one name now, and again whenever it changes."""
        last: int | None = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                # note: it may change again while this is written, so the loop looks once more before it waits.
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
                continue
            if self._is_closed:
                raise ServiceError(Reason.DRAINING, "the server stops")
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return _UNKNOWN
        return _SERVING if self._is_serving else _NOT_SERVING
