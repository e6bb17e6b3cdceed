"""The server: listens, loads, serves, drains.

Listeners come first, so that health can say NOT_SERVING while the model loads. SIGTERM and SIGINT drain: new calls get
UNAVAILABLE at once, running ones have the grace time to finish, then everything is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from xllm_client.endpoint import Endpoint
from xllm_client.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    slot_service_pb2,
    slot_service_pb2_grpc,
)
from xllm_service import logs, orca
from xllm_service.admission import Gate, Phase
from xllm_service.certificates import CertificateError, CertificateFiles, ReloadingCertificates
from xllm_service.config import ConfigError, ServeConfig, read_tokens
from xllm_service.engine import CoreEngine, Model, create_core, open_model
from xllm_service.errors import Reason, ServiceError
from xllm_service.health import HealthServicer
from xllm_service.interceptors import CallInterceptor
from xllm_service.metrics import Metrics
from xllm_service.servicers.admin import AdminServicer
from xllm_service.servicers.generation import GenerationServicer
from xllm_service.servicers.model import ModelServicer
from xllm_service.servicers.reflection import add_reflection
from xllm_service.servicers.roster import Loader
from xllm_service.servicers.served import Served
from xllm_service.servicers.slots import SlotServicer
from xllm_service.tracing import Tracing, TracingError
from xllm_service.transport import ListenError, add_port, hard_limit, options
from xllm_service.unix_socket import SocketError, UnixSocket

_log = logs.get_logger("app")

SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (generation_service_pb2, "GenerationService"),
        (model_service_pb2, "ModelService"),
        (slot_service_pb2, "SlotService"),
        (admin_service_pb2, "AdminService"),
    )
)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_STOP_S = 1.0  # for what is cut off to say so


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


def load(config: ServeConfig, *, log_fd: int | None = None) -> tuple[Model, CoreEngine]:
    """Open the model and start its engine; blocks until it can serve. Raises ServiceError.

    `log_fd` gets the engine's notices, a line each, for as long as it lives; None: they are lost.
    """
    model = open_model(config.model, pretokenizer=config.pretokenizer)
    try:
        return model, create_core(model, config, log_fd=log_fd)
    except BaseException:
        model.close()
        raise


class Server:
    """One server, on the event loop that it is made on.

        server = Server(config)
        await server.start()        # listens; health says NOT_SERVING
        await server.load()         # SERVING
        await server.drain(grace_s) # no new work; returns when nothing runs, or the time is over
        await server.stop()         # gives everything back

    Attributes:
        endpoints: what is listened on, with the ports that were chosen for port 0.
        metrics_port: where metrics are scraped; 0: nowhere.
        health_port: where health checks alone are answered; 0: nowhere.
        health: what health checks are told.
    """

    def __init__(self, config: ServeConfig, *, loader: Loader | None = None, tracing: Tracing | None = None) -> None:
        """Make a server that does nothing yet; `tracing` stands in for what --tracing would make."""
        self.config = config
        self._tracing = tracing
        self.endpoints: list[Endpoint] = []
        self.metrics_port = 0
        self.health_port = 0
        self.gate = Gate(config.max_concurrent_calls)
        self.metrics = Metrics()
        self._notices: logs.Notices | None = None
        self.served = Served(config, self.gate, self.metrics, loader or self._load)
        self.health = HealthServicer(SERVICES, self.served.roster.problems)
        self.served.roster.on_change = self.health.look
        self.served.draining.on_begin = self.health.drain
        self._servers: list[grpc.aio.Server] = []
        self._sockets: list[UnixSocket] = []
        self._stop_metrics: Callable[[], None] | None = None
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on every address. Raises StartError; then nothing is left behind."""
        try:
            tokens = read_tokens(self.config.token_file) if self.config.token_file is not None else ()
            admins = read_tokens(self.config.admin_token_file) if self.config.admin_token_file is not None else ()
            credentials = self._credentials()
            if self._tracing is None and self.config.tracing:
                self._tracing = Tracing()
            interceptor = CallInterceptor(
                self.gate, self.metrics, tokens, admins, engines=self.served.roster.stats, tracing=self._tracing
            )
            if self.config.health is not None:
                await self._start_health(self.config.health)
            local = [address for address in self.config.listen if address.is_loopback]
            exposed = [address for address in self.config.listen if not address.is_loopback]
            for addresses, default in ((local, True), (exposed, False)):
                if addresses:
                    reflection = {"on": True, "off": False}.get(self.config.reflection, default)
                    await self._start_server(addresses, interceptor, credentials, reflection)
            if self.config.metrics is not None:
                self.metrics.watch_engines(self.served.roster.stats)
                self.metrics_port, self._stop_metrics = self._serve_metrics(self.config.metrics)
        except (ConfigError, CertificateError, ListenError, SocketError, TracingError, OSError) as error:
            await self.stop()
            raise StartError(str(error)) from None
        except BaseException:
            await self.stop()
            raise

    async def load(self) -> None:
        """Load the model in a worker thread, then serve. Raises ServiceError."""
        await self.served.roster.load_first()
        if self.gate.phase is Phase.LOADING:
            self.gate.phase = Phase.SERVING
            self._follower = asyncio.create_task(self.health.follow(), name="xllm-health")

    async def drain(self, grace_s: float) -> None:
        """Refuse new work and wait until nothing runs; what still does after `grace_s` ends with UNAVAILABLE."""
        # note: the engines take requests a moment longer than the gate: calls that got past it are served.
        self.served.draining.begin(grace_s)
        await self.served.draining.wait()

    async def stop(self) -> None:
        """End what still runs, close every address and free the engine. Calling it again is harmless."""
        self.gate.phase = Phase.DRAINING
        self.health.close()
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
            self._follower = None
        self.served.generations.end_all(ServiceError(Reason.DRAINING, "the server stops"))
        deadline = time.monotonic() + _STOP_S
        while len(self.served.generations) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(grace=_STOP_S) for server in servers))
        while self._sockets:
            self._sockets.pop().close()
        if self._stop_metrics is not None:
            await asyncio.to_thread(self._stop_metrics)
            self._stop_metrics = None
        await self.served.roster.close()
        if self._notices is not None:
            self._notices.close()
            self._notices = None
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
            self._tracing = None

    def _load(self, config: ServeConfig) -> tuple[Model, CoreEngine]:
        if self._notices is None:
            self._notices = logs.Notices("engine")
        return load(config, log_fd=self._notices.fd)

    async def _start_server(
        self,
        addresses: Sequence[Endpoint],
        interceptor: CallInterceptor,
        credentials: grpc.ServerCredentials | None,
        reflection: bool,
    ) -> None:
        server = grpc.aio.server(
            interceptors=[interceptor],
            options=options(self.config),
            maximum_concurrent_rpcs=hard_limit(self.config),
        )
        self._servers.append(server)
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(self.served), server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(self.served), server)
        slot_service_pb2_grpc.add_SlotServiceServicer_to_server(SlotServicer(self.served), server)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.served), server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        server.add_generic_rpc_handlers((orca.out_of_band(self.served.roster.stats),))
        if reflection:
            add_reflection(server, (*SERVICES, _HEALTH))
        for address in addresses:
            self._listen(server, address, credentials)
        await server.start()

    async def _start_health(self, address: Endpoint) -> None:
        """Answer health checks alone on a plain port, for probes that know neither TLS nor a token."""
        server = grpc.aio.server(
            interceptors=[CallInterceptor(self.gate, self.metrics)],
            options=options(self.config),
            maximum_concurrent_rpcs=hard_limit(self.config),
        )
        self._servers.append(server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self.health_port = add_port(server, address, None, "--health")
        await server.start()
        _log.info("health checks on %s", Endpoint(host=address.host, port=self.health_port))

    def _listen(self, server: grpc.aio.Server, address: Endpoint, credentials: grpc.ServerCredentials | None) -> None:
        if address.path is not None:
            held = UnixSocket(address.path)
            self._sockets.append(held)
            held.bind(lambda: add_port(server, address, None))
            self.endpoints.append(address)
        else:
            port = add_port(server, address, credentials)
            self.endpoints.append(Endpoint(host=address.host, port=port))
        _log.info("listening on %s", self.endpoints[-1])

    def _serve_metrics(self, address: Endpoint) -> tuple[int, Callable[[], None]]:
        try:
            return self.metrics.serve(address)
        except OSError as error:
            raise ListenError(f"--metrics {address}: cannot listen there: {(error.strerror or '').lower()}") from None

    def _credentials(self) -> grpc.ServerCredentials | None:
        config = self.config
        if config.tls_cert is None or config.tls_key is None:
            return None
        files = CertificateFiles(config.tls_cert, config.tls_key, config.tls_client_ca)
        return ReloadingCertificates(files).credentials()


@contextlib.asynccontextmanager
async def running(config: ServeConfig, *, loader: Loader | None = None) -> AsyncIterator[Server]:
    """Serve until the end of the `async with` statement, which stops without a grace time."""
    server = Server(config, loader=loader)
    await server.start()
    try:
        await server.load()
        yield server
    finally:
        await server.stop()


async def serve(
    config: ServeConfig, *, on_ready: Callable[[Server], None] | None = None, loader: Loader | None = None
) -> None:
    """Serve until SIGTERM, SIGINT or the Drain call, drain, and return; a second signal stops at once.

    `on_ready` is called once health says SERVING. Raises StartError or ServiceError when it cannot start; by then
    everything is given back. `logs.configure` is the caller's.
    """
    loop = asyncio.get_running_loop()
    server = Server(config, loader=loader)
    draining = server.served.draining
    was_asked = False
    insisted = asyncio.Event()

    def on_signal() -> None:
        nonlocal was_asked
        if was_asked:
            insisted.set()
        was_asked = True
        draining.begin()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    for line in config.describe():
        _log.debug("%s", line)
    asked = asyncio.create_task(draining.begun.wait())
    now = asyncio.create_task(insisted.wait())
    tasks: list[asyncio.Task[Any]] = [asked, now]
    try:
        await server.start()
        await server.load()  # note: it cannot be cut short; it takes seconds
        if on_ready is not None and not draining.begun.is_set():
            on_ready(server)
        await asked
        _log.info("stopping", extra=logs.facts(grace_s=config.drain_grace))
        waiting = asyncio.create_task(draining.wait())
        tasks.append(waiting)
        await asyncio.wait((waiting, now), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    _log.info("stopped")
