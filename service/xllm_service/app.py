"""The server: listens, loads, serves, drains.

Listeners come first, so that health can say NOT_SERVING while the model loads. SIGTERM and SIGINT drain: new calls get
UNAVAILABLE at once, running ones have the grace time to finish, then everything is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
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
)
from xllm_service import logs
from xllm_service.admission import Gate, Phase
from xllm_service.config import ConfigError, ServeConfig, read_tokens
from xllm_service.engine import AsyncEngine, CoreEngine, Model, create_core, open_model
from xllm_service.errors import Reason, ServiceError
from xllm_service.health import HealthServicer
from xllm_service.interceptors import CallInterceptor
from xllm_service.metrics import Metrics
from xllm_service.servicers.admin import AdminServicer
from xllm_service.servicers.generation import GenerationServicer
from xllm_service.servicers.model import ModelServicer
from xllm_service.servicers.reflection import add_reflection
from xllm_service.servicers.served import Served
from xllm_service.unix_socket import SocketError, UnixSocket

_log = logs.get_logger("app")

SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (generation_service_pb2, "GenerationService"),
        (model_service_pb2, "ModelService"),
        (admin_service_pb2, "AdminService"),
    )
)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_STOP_S = 1.0  # for what is cut off to say so

# Opens the model and starts its engine; blocks. Tests put an engine without a model in its place.
Loader = Callable[[ServeConfig], tuple[Model, CoreEngine]]


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


def load(config: ServeConfig) -> tuple[Model, CoreEngine]:
    """Open the model and start its engine; blocks until it can serve. Raises ServiceError."""
    model = open_model(config.model, pretokenizer=config.pretokenizer)
    try:
        return model, create_core(model, config, log_fd=_notices_fd(config))
    except BaseException:
        model.close()
        raise


def _notices_fd(config: ServeConfig) -> int | None:
    """Where the engine writes its notices: they are plain lines, so not into a log of JSON objects."""
    if config.log_format != "text":
        return None
    with contextlib.suppress(OSError, AttributeError):
        return sys.stderr.fileno()
    return None


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
        health: what health checks are told.
    """

    def __init__(self, config: ServeConfig, *, loader: Loader = load) -> None:
        self.config = config
        self.endpoints: list[Endpoint] = []
        self.metrics_port = 0
        self.gate = Gate(config.max_concurrent_calls)
        self.metrics = Metrics()
        self.health = HealthServicer((*SERVICES, config.model_name))
        self.served = Served(config, self.gate, self.metrics)
        self._loader = loader
        self._servers: list[grpc.aio.Server] = []
        self._sockets: list[UnixSocket] = []
        self._stop_metrics: Callable[[], None] | None = None
        self._model: Model | None = None
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on every address. Raises StartError; then nothing is left behind."""
        try:
            tokens = read_tokens(self.config.token_file) if self.config.token_file is not None else ()
            credentials = self._credentials()
            interceptor = CallInterceptor(self.gate, self.metrics, tokens)
            local = [address for address in self.config.listen if address.is_loopback]
            exposed = [address for address in self.config.listen if not address.is_loopback]
            for addresses, default in ((local, True), (exposed, False)):
                if addresses:
                    reflection = {"on": True, "off": False}.get(self.config.reflection, default)
                    await self._start_server(addresses, interceptor, credentials, reflection)
            if self.config.metrics is not None:
                self.metrics.watch_engine(self.config.model_name, self._stats)
                self.metrics_port, self._stop_metrics = self.metrics.serve(self.config.metrics)
        except (ConfigError, SocketError, OSError) as error:
            await self.stop()
            raise StartError(str(error)) from None
        except BaseException:
            await self.stop()
            raise

    async def load(self) -> None:
        """Load the model in a worker thread, then serve. Raises ServiceError."""
        started = time.monotonic()
        model, core = await asyncio.to_thread(self._loader, self.config)
        self._model = model
        engine = AsyncEngine(
            core,
            model,
            stuck_after_s=self.config.stuck_after,
            stall_allowance_s=self.config.stall_allowance,
        )
        self.served.engine = engine
        if self.gate.phase is Phase.LOADING:
            self.gate.phase = Phase.SERVING
            self.health.set_serving(True)
            self._follower = asyncio.create_task(self.health.follow(self._problem), name="xllm-health")
        info = engine.info
        _log.info(
            "serving %s",
            self.config.model_name,
            extra=logs.facts(
                seconds=round(time.monotonic() - started, 3),
                device=f"{info.device_kind} ({info.device_name})",
                kernels=info.kernels,
                threads=info.num_threads,
                threads_limit=info.threads_limit,
                decode_mode=info.decode_mode.name.lower(),
                max_slots=info.max_slots,
                max_seq_len=info.max_seq_len,
                kv_pool_bytes=info.plan.kv_pool_bytes,
            ),
        )
        model.digest.start()

    async def drain(self, grace_s: float) -> None:
        """Refuse new work and wait until nothing runs; what still does after `grace_s` ends with UNAVAILABLE."""
        self.gate.phase = Phase.DRAINING
        self.health.set_serving(False)
        # note: the engine takes requests a moment longer than the gate: calls that got past it are served.
        deadline = time.monotonic() + grace_s
        last = -1
        while (left := self.gate.num_calls) and time.monotonic() < deadline:
            if left != last:
                _log.info("draining", extra=logs.facts(open_calls=left, generations=len(self.served.generations)))
            last = left
            await asyncio.sleep(min(0.02, max(0.0, deadline - time.monotonic())))
        self.served.generations.end_all(ServiceError(Reason.DRAINING, "the server stops; the time to finish is over"))

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
        if self.served.engine is not None:
            await self.served.engine.close()
        if self._model is not None:
            self._model.close()
            self._model = None

    async def _start_server(
        self,
        addresses: Sequence[Endpoint],
        interceptor: CallInterceptor,
        credentials: grpc.ServerCredentials | None,
        reflection: bool,
    ) -> None:
        server = grpc.aio.server(
            interceptors=[interceptor],
            options=_options(self.config),
            maximum_concurrent_rpcs=_hard_limit(self.config),
        )
        self._servers.append(server)
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(self.served), server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(self.served), server)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.served), server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        if reflection:
            add_reflection(server, (*SERVICES, _HEALTH))
        for address in addresses:
            self._listen(server, address, credentials)
        await server.start()

    def _listen(self, server: grpc.aio.Server, address: Endpoint, credentials: grpc.ServerCredentials | None) -> None:
        if address.path is not None:
            held = UnixSocket(address.path)
            self._sockets.append(held)
            held.bind(lambda: _add_port(server, address, None))
            self.endpoints.append(address)
        else:
            port = _add_port(server, address, credentials)
            self.endpoints.append(Endpoint(host=address.host, port=port))
        _log.info("listening on %s", self.endpoints[-1])

    def _credentials(self) -> grpc.ServerCredentials | None:
        config = self.config
        if config.tls_cert is None or config.tls_key is None:
            return None
        authority = config.tls_client_ca.read_bytes() if config.tls_client_ca is not None else None
        return grpc.ssl_server_credentials(
            [(config.tls_key.read_bytes(), config.tls_cert.read_bytes())],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )

    def _problem(self) -> str:
        return self.served.engine.problem() if self.served.engine is not None else "the model is still loading"

    def _stats(self) -> Any:
        engine = self.served.engine
        return engine.stats() if engine is not None else None


def _add_port(server: grpc.aio.Server, address: Endpoint, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(str(address))
        return server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        raise StartError(f"--listen {address}: cannot listen there ({error}); is it in use?") from None


def _hard_limit(config: ServeConfig) -> int:
    """What bounds the calls that even get as far as our own limit, which answers with a reason."""
    return 2 * config.max_concurrent_calls + 64


def _options(config: ServeConfig) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", _hard_limit(config)),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.so_reuseport", 0),  # else a second server shares the port, and each gets half of the calls
        # A long prefill sends nothing for minutes: clients may ping every 10 s, also between calls.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # And we find out about clients whose machine has gone.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


@contextlib.asynccontextmanager
async def running(config: ServeConfig, *, loader: Loader = load) -> AsyncIterator[Server]:
    """Serve until the end of the `async with` statement, which stops without a grace time."""
    server = Server(config, loader=loader)
    await server.start()
    try:
        await server.load()
        yield server
    finally:
        await server.stop()


async def serve(
    config: ServeConfig, *, on_ready: Callable[[Server], None] | None = None, loader: Loader = load
) -> None:
    """Serve until SIGTERM or SIGINT, drain, and return; a second signal stops at once.

    `on_ready` is called once health says SERVING. Raises StartError or ServiceError when it cannot start; by then
    everything is given back. `logs.configure` is the caller's.
    """
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    insisted = asyncio.Event()

    def on_signal() -> None:
        (insisted if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    for line in config.describe():
        _log.debug("%s", line)
    server = Server(config, loader=loader)
    try:
        await server.start()
        loading = asyncio.create_task(server.load())
        stop = asyncio.create_task(asked.wait())
        await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
        if not asked.is_set():
            stop.cancel()
            await loading
            if on_ready is not None:
                on_ready(server)
            await asked.wait()
        else:
            server.gate.phase = Phase.DRAINING
            await loading  # a load cannot be cut short; it takes seconds
        _log.info("stopping", extra=logs.facts(grace_s=config.drain_grace))
        draining = asyncio.create_task(server.drain(config.drain_grace))
        now = asyncio.create_task(insisted.wait())
        await asyncio.wait((draining, now), return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, now):
            task.cancel()
        await asyncio.gather(draining, now, return_exceptions=True)
    finally:
        await server.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    _log.info("stopped")
