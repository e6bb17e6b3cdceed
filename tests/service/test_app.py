"""The server's life: listens before it loads, drains, gives everything back, and says why it cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import Serve, eventually
from tests.service.fake_engine import FakeEngine, FakeModel
from tests.service.tls import make_ca, make_certificate
from xllm_client import NO_RETRY, AsyncClient, NotFoundError, Tls, UnavailableError
from xllm_client.v1 import model_service_pb2
from xllm_service import app
from xllm_service.app import Server, StartError
from xllm_service.config import ServeConfig, load_config
from xllm_service.engine import Model
from xllm_service.errors import Reason, ServiceError
from xllm_service.servicers.roster import Loader
from xllm_service.transport import options


@pytest.fixture
def config(tmp_path: Path, model_file: Path) -> ServeConfig:
    return load_config(model_file, {"listen": [f"unix:{tmp_path}/s/x.sock"], "drain_grace": 20})


def loader(model_file: Path, engine: FakeEngine) -> Loader:
    return lambda _: (Model(FakeModel(model_file)), engine)


def connect(config: ServeConfig) -> AsyncClient:
    return AsyncClient(str(config.listen[0]), retry=NO_RETRY, timeout_s=20)


async def test_while_it_loads_health_says_so_and_calls_are_unavailable(
    config: ServeConfig, model_file: Path, engine: FakeEngine
) -> None:
    may_load = threading.Event()

    def load(_: ServeConfig) -> Any:
        may_load.wait()
        return Model(FakeModel(model_file)), engine

    server = Server(config, loader=load)
    await server.start()
    loading = asyncio.create_task(server.load())
    async with connect(config) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.generate_once("x")
        assert caught.value.reason == "LOADING"
        assert caught.value.retry_delay_s is not None
        assert not server.health.is_serving
        (model,) = await client.models()
        assert model.state == model_service_pb2.MODEL_STATE_LOADING
        assert (await client.server_info()).models
        may_load.set()
        await loading
        await client.wait_ready()
    await server.stop()
    assert engine.is_closed
    assert not config.listen[0].path.exists()  # type: ignore[union-attr]


async def test_the_socket_is_private(server: Server) -> None:
    path = server.endpoints[0].path
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_second_server_does_not_start_and_the_first_goes_on(
    serve: Serve, config: ServeConfig, model_file: Path, engine: FakeEngine
) -> None:
    engine.answer = ["ok"]
    async with serve() as (_, client):
        second = Server(config, loader=loader(model_file, FakeEngine()))
        with pytest.raises(StartError, match="another server listens there"):
            await second.start()
        assert (await client.generate_once("x")).text == "ok"


async def test_a_port_in_use_is_named(model_file: Path, engine: FakeEngine) -> None:
    first = Server(load_config(model_file, {"listen": ["127.0.0.1:0"]}), loader=loader(model_file, engine))
    await first.start()
    taken = str(first.endpoints[0])
    second = Server(load_config(model_file, {"listen": [taken]}), loader=loader(model_file, engine))
    with pytest.raises(StartError, match=taken):
        await second.start()
    await first.stop()


async def test_several_addresses_serve_the_same(model_file: Path, engine: FakeEngine, tmp_path: Path) -> None:
    engine.answer = ["ok"]
    listen = [f"unix:{tmp_path}/a/x.sock", "127.0.0.1:0", f"unix:{tmp_path}/b.sock"]
    config = load_config(model_file, {"listen": listen})
    async with app.running(config, loader=loader(model_file, engine)) as server:
        assert len(server.endpoints) == 3
        for endpoint in server.endpoints:
            async with AsyncClient(str(endpoint)) as client:
                assert (await client.generate_once("x")).text == "ok"


async def test_draining_refuses_new_work_and_finishes_the_old(serve: Serve, engine: FakeEngine) -> None:
    async with serve() as (server, client):
        running = client.generate("x")
        await eventually(lambda: engine.live)
        engine.accept()
        draining = asyncio.create_task(server.drain(20))
        await eventually(lambda: not server.health.is_serving)
        with pytest.raises(UnavailableError) as caught:
            await client.generate_once("y")
        assert caught.value.reason == "DRAINING"
        assert (await client.server_info()).is_draining
        assert not draining.done()
        engine.token(1, "whole")
        engine.finish()
        assert (await running.result()).text == "whole"
        await draining
        assert engine.cancelled == []


async def test_what_outlasts_the_grace_time_is_told_why(serve: Serve, engine: FakeEngine) -> None:
    async with serve() as (server, client):
        running = client.generate("x")
        await eventually(lambda: engine.live)
        engine.accept()
        await server.drain(0.05)
        with pytest.raises(UnavailableError) as caught:
            await running.result()
        assert caught.value.reason == "DRAINING"
        await eventually(lambda: engine.cancelled == [1])


async def test_a_signal_drains_and_a_second_one_stops(
    config: ServeConfig, model_file: Path, engine: FakeEngine
) -> None:
    ready = asyncio.Event()
    serving = asyncio.create_task(app.serve(config, on_ready=lambda _: ready.set(), loader=loader(model_file, engine)))
    await ready.wait()
    async with connect(config) as client:
        running = client.generate("x")
        await eventually(lambda: engine.live)
        engine.accept()
        await anext(running)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(UnavailableError):
            while True:
                await client.tokenize("x")
        assert not serving.done()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(UnavailableError):
            await running.result()
        await serving
    assert engine.is_closed
    assert engine.cancelled == [1]


async def test_a_model_that_does_not_load_leaves_nothing_behind(config: ServeConfig) -> None:
    def load(_: ServeConfig) -> Any:
        raise ServiceError(Reason.INVALID_MODEL, "blk.0: bad bytes at offset 7")

    with pytest.raises(ServiceError, match="offset 7"):
        await app.serve(config, loader=load)
    assert not config.listen[0].path.exists()  # type: ignore[union-attr]


async def test_starting_and_stopping_leaks_no_descriptor_and_no_task(serve: Serve, model_file: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def once() -> None:
        config = load_config(model_file, {"listen": [f"unix:{model_file.parent}/l/x.sock"]})
        engine = FakeEngine(answer=["ok"])
        async with app.running(config, loader=loader(model_file, engine)), connect(config) as client:
            await client.generate_once("x")

    await once()  # gRPC keeps some of its own from the first time
    await eventually(lambda: len(asyncio.all_tasks()) == 1)
    before = descriptors()
    for _ in range(5):
        await once()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)
    await eventually(lambda: descriptors() <= before)


async def test_pings_from_ten_seconds_on_are_allowed(config: ServeConfig) -> None:
    arguments = dict(options(config))
    assert arguments["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000
    assert arguments["grpc.keepalive_permit_without_calls"] == 1


# ---- TLS ----


def certificates(folder: Path) -> Path:
    """Make a CA, a server's certificate for localhost and two clients', one of them by another CA."""
    for ca in ("ca", "other"):
        make_ca(folder, ca)
    for name, ca in (("server", "ca"), ("friend", "ca"), ("stranger", "other")):
        make_certificate(folder, name, ca)
    return folder


@pytest.mark.parametrize("asks_for_client", [False, True])
async def test_tls_lets_in_whom_it_should(
    tmp_path: Path, model_file: Path, engine: FakeEngine, asks_for_client: bool
) -> None:
    engine.answer = ["ok"]
    folder = certificates(tmp_path)
    flags: dict[str, object] = {
        "listen": ["localhost:0"],
        "tls_cert": folder / "server.pem",
        "tls_key": folder / "server.key",
    }
    if asks_for_client:
        flags["tls_client_ca"] = folder / "ca.pem"
    callers = {
        "nobody": Tls.from_files(folder / "ca.pem"),
        "friend": Tls.from_files(folder / "ca.pem", folder / "friend.key", folder / "friend.pem"),
        "stranger": Tls.from_files(folder / "ca.pem", folder / "stranger.key", folder / "stranger.pem"),
        "plain": None,
    }
    welcome = {"friend"} if asks_for_client else {"nobody", "friend", "stranger"}
    async with app.running(load_config(model_file, flags), loader=loader(model_file, engine)) as server:
        for name, tls in callers.items():
            async with AsyncClient(str(server.endpoints[0]), tls=tls, retry=NO_RETRY, timeout_s=5) as client:
                if name in welcome:
                    assert (await client.generate_once("x")).text == "ok", name
                else:
                    with pytest.raises(UnavailableError):
                        await client.generate_once("x")
    assert len(engine.submitted) == len(welcome)


async def test_clients_without_a_common_name_are_told_apart(
    tmp_path: Path, model_file: Path, engine: FakeEngine
) -> None:
    engine.answer = ["ok"]
    folder = certificates(tmp_path)
    make_certificate(folder, "one", "ca", "/", names="URI:spiffe://here/one")
    make_certificate(folder, "other", "ca", "/", names="URI:spiffe://here/other")
    make_certificate(folder, "unnamed", "ca", "/", names="")
    files: dict[str, object] = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
    flags = {"listen": ["localhost:0"]} | {name: folder / str(file) for name, file in files.items()}
    async with app.running(load_config(model_file, flags), loader=loader(model_file, engine)) as server:
        for name in ("one", "other", "unnamed"):
            tls = Tls.from_files(folder / "ca.pem", folder / f"{name}.key", folder / f"{name}.pem")
            async with AsyncClient(str(server.endpoints[0]), tls=tls, retry=NO_RETRY, timeout_s=5) as client:
                with pytest.raises(NotFoundError):
                    await client.get_generation("mine")
                await client.generate_once("x", request_id="mine")
                assert (await client.get_generation("mine")).request_id == "mine", name


async def test_a_key_that_does_not_fit_is_named(tmp_path: Path, model_file: Path, engine: FakeEngine) -> None:
    pem = tmp_path / "x.pem"
    pem.write_text("nonsense")
    config = load_config(model_file, {"listen": ["localhost:0"], "tls_cert": pem, "tls_key": pem})
    with pytest.raises(StartError):
        await Server(config, loader=loader(model_file, engine)).start()
