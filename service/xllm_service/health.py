"""grpc.health.v1: whether the server can do its work, by the step loop's own heartbeat, with a true Watch.

Names: "" for the process, one for each service of xllm.v1, one for each model. The library's own asyncio servicer is
not used: a watcher that does not read holds up its other watchers, and one that leaves takes their wake-ups along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
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
    """Answers Check and Watch. The process and its services are served while at least one model is.

    Args:
        services: the names besides "" and the models'.
        problems: of each model, why it cannot serve; "" while it can, None while it loads or ends.
    """

    def __init__(self, services: Iterable[str], problems: Callable[[], Mapping[str, str | None]]) -> None:
        self._services = frozenset(("", *services))
        self._problems = problems
        self._said: Mapping[str, str | None] = {}
        self._is_draining = False
        self._is_closed = False
        self._changed = asyncio.Event()
        self.look()

    @property
    def is_serving(self) -> bool:
        """What Check says now of the process."""
        return bool(self._status("") == _SERVING)

    def drain(self) -> None:
        """Say NOT_SERVING of everything from now on."""
        self._is_draining = True
        self._wake()

    def close(self) -> None:
        """Say NOT_SERVING for good, and end every Watch, which would otherwise hold up the server's end."""
        self._is_draining = True
        self._is_closed = True
        self._wake()

    def look(self) -> None:
        """Look at every model, and wake the watchers where there is news."""
        found = dict(self._problems())
        if found == self._said:
            return
        for name, problem in found.items():
            if problem and problem != self._said.get(name):
                _log.error("%s is not served: %s", name, problem)
        self._said = found
        self._wake()

    async def follow(self) -> None:
        """Keep the answers true until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_CHECK_S)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """The state of one name; NOT_FOUND for a name that is not known."""
        if self._status(request.service) == _UNKNOWN:
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
        if name in self._services:
            is_served = any(problem == "" for problem in self._said.values())
        elif name in self._said:
            is_served = self._said[name] == ""
        else:
            return _UNKNOWN
        return _SERVING if is_served and not self._is_draining else _NOT_SERVING
