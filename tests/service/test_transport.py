"""TLS whose files are replaced while the server runs, the health port, and limits that are given to gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.service.fake_engine import FakeEngine, FakeModel
from tests.service.tls import make_ca, make_certificate
from xllm_client import NO_RETRY, AsyncClient, Tls, UnavailableError
from xllm_service import app
from xllm_service.app import Server, StartError
from xllm_service.certificates import CertificateError, CertificateFiles, ReloadingCertificates
from xllm_service.config import load_config
from xllm_service.engine import Model


@contextlib.asynccontextmanager
async def serving(model_file: Path, engine: FakeEngine, **settings: object) -> AsyncIterator[Server]:
    engine.answer = ["ok"]
    config = load_config(model_file, {"listen": ["localhost:0"], **settings})
    async with app.running(config, loader=lambda _: (Model(FakeModel(model_file)), engine)) as server:
        yield server


def install(folder: Path, name: str) -> None:
    """Put a certificate and its key where the server's are, by renames, the certificate first."""
    for suffix in ("pem", "key"):
        copy = folder / f"incoming.{suffix}"
        copy.write_bytes((folder / f"{name}.{suffix}").read_bytes())
        os.replace(copy, folder / f"live.{suffix}")


async def is_let_in(server: Server, folder: Path, ca: str, client: str | None = None) -> bool:
    """Whether a new connection that trusts `ca`, with a client's certificate, is served."""
    own = (folder / f"{client}.key", folder / f"{client}.pem") if client else ()
    tls = Tls.from_files(folder / f"{ca}.pem", *own)
    async with AsyncClient(str(server.endpoints[0]), tls=tls, retry=NO_RETRY, timeout_s=5) as caller:
        try:
            return (await caller.generate_once("x")).text == "ok"
        except UnavailableError:
            return False


async def test_a_new_certificate_is_used_without_a_restart(
    tmp_path: Path, model_file: Path, engine: FakeEngine
) -> None:
    for ca in ("old", "new"):
        make_ca(tmp_path, ca)
        make_certificate(tmp_path, f"{ca}-server", ca)
    install(tmp_path, "old-server")
    tls = {"tls_cert": tmp_path / "live.pem", "tls_key": tmp_path / "live.key"}
    async with (
        serving(model_file, engine, **tls) as server,
        AsyncClient(str(server.endpoints[0]), tls=Tls.from_files(tmp_path / "old.pem"), retry=NO_RETRY) as early,
    ):
        assert (await early.generate_once("x")).text == "ok"
        install(tmp_path, "new-server")
        assert await is_let_in(server, tmp_path, "new")
        assert not await is_let_in(server, tmp_path, "old")
        assert (await early.generate_once("x")).text == "ok", "a connection that was there goes on"


async def test_another_client_ca_is_used_without_a_restart(
    tmp_path: Path, model_file: Path, engine: FakeEngine
) -> None:
    for ca in ("old", "new"):
        make_ca(tmp_path, ca)
        make_certificate(tmp_path, f"{ca}-client", ca)
    make_certificate(tmp_path, "server", "old")
    live = tmp_path / "clients.pem"
    live.write_bytes((tmp_path / "old.pem").read_bytes())
    tls = {"tls_cert": tmp_path / "server.pem", "tls_key": tmp_path / "server.key", "tls_client_ca": live}
    async with serving(model_file, engine, **tls) as server:
        assert await is_let_in(server, tmp_path, "old", "old-client")
        assert not await is_let_in(server, tmp_path, "old", "new-client")
        live.write_bytes((tmp_path / "new.pem").read_bytes())
        assert await is_let_in(server, tmp_path, "old", "new-client")
        assert not await is_let_in(server, tmp_path, "old", "old-client")
        assert not await is_let_in(server, tmp_path, "old")


async def test_half_a_replacement_leaves_the_old_certificate_in_use(
    tmp_path: Path, model_file: Path, engine: FakeEngine
) -> None:
    for ca in ("old", "new"):
        make_ca(tmp_path, ca)
        make_certificate(tmp_path, f"{ca}-server", ca)
    install(tmp_path, "old-server")
    tls = {"tls_cert": tmp_path / "live.pem", "tls_key": tmp_path / "live.key"}
    async with serving(model_file, engine, **tls) as server:
        (tmp_path / "live.pem").write_bytes((tmp_path / "new-server.pem").read_bytes())
        assert await is_let_in(server, tmp_path, "old"), "the key is not there yet"
        (tmp_path / "live.pem").unlink()
        assert await is_let_in(server, tmp_path, "old"), "the file has gone for a moment"
        install(tmp_path, "new-server")
        assert await is_let_in(server, tmp_path, "new")


def test_files_that_cannot_be_used_are_named_by_their_flags(tmp_path: Path) -> None:
    make_ca(tmp_path, "one")
    make_ca(tmp_path, "two")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    one, two = tmp_path / "one.pem", tmp_path / "two.key"
    with pytest.raises(CertificateError, match=r"--tls-key .*two\.key.*key values mismatch"):
        ReloadingCertificates(CertificateFiles(one, two))
    with pytest.raises(CertificateError, match="--tls-client-ca"):
        ReloadingCertificates(CertificateFiles(one, tmp_path / "one.key", nonsense))
    with pytest.raises(CertificateError, match="No such file"):
        ReloadingCertificates(CertificateFiles(one, tmp_path / "none.key"))


# ---- the health port ----


async def test_the_health_port_asks_for_nothing_and_offers_nothing_else(
    tmp_path: Path, model_file: Path, engine: FakeEngine
) -> None:
    make_ca(tmp_path, "ca")
    make_certificate(tmp_path, "server", "ca")
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\n")
    tokens.chmod(0o600)
    settings = {
        "tls_cert": tmp_path / "server.pem",
        "tls_key": tmp_path / "server.key",
        "tls_client_ca": tmp_path / "ca.pem",
        "token_file": tokens,
        "health": "127.0.0.1:0",
    }
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(model_file, engine, **settings))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}"))
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "fake", "xllm.v1.GenerationService"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with AsyncClient(f"127.0.0.1:{server.health_port}", retry=NO_RETRY, timeout_s=20) as client:
            with pytest.raises(Exception, match="Method not found"):
                await client.generate_once("x")
        engine.has_failed = True
        server.health.look()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_health_or_metrics_port_in_use_is_named(model_file: Path, engine: FakeEngine) -> None:
    async with serving(model_file, engine, health="127.0.0.1:0", metrics="127.0.0.1:0") as server:
        for flag, port in (("health", server.health_port), ("metrics", server.metrics_port)):
            config = load_config(model_file, {"listen": ["127.0.0.1:0"], flag: f"127.0.0.1:{port}"})
            second = Server(config, loader=lambda _: (Model(FakeModel(model_file)), FakeEngine()))
            with pytest.raises(
                StartError, match=f"--{flag} 127.0.0.1:{port}: cannot listen there: address already in use"
            ):
                await second.start()


# ---- limits ----


@contextlib.asynccontextmanager
async def connection(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.endpoints[0].port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_connection_too_many_is_closed_and_one_that_ends_makes_room(
    model_file: Path, engine: FakeEngine
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(model_file, engine, listen=["127.0.0.1:0"], max_connections=2))
        client = await stack.enter_async_context(AsyncClient(str(server.endpoints[0]), retry=NO_RETRY, timeout_s=20))
        assert (await client.generate_once("x")).text == "ok"
        async with connection(server) as (reader, _):
            assert await reader.read(1), "the second is greeted"
            async with connection(server) as (too_many, _):
                assert await too_many.read(1) == b"", "closed before a word was said"
            assert (await client.generate_once("x")).text == "ok"
        async with asyncio.timeout(20):
            while True:  # until the server has seen that the second has gone
                async with connection(server) as (reader, _):
                    if await reader.read(1):
                        break


async def test_metadata_that_is_too_large_is_refused(model_file: Path, engine: FakeEngine) -> None:
    async with (
        serving(model_file, engine, listen=["127.0.0.1:0"], max_metadata_bytes="2KiB") as server,
        grpc.aio.insecure_channel(str(server.endpoints[0])) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        await health.Check(request, metadata=(("x-note", "a" * 500),), timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(request, metadata=(("x-note", "a" * 5000),), timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_connection_without_calls_is_closed_when_that_is_asked_for(
    model_file: Path, engine: FakeEngine
) -> None:
    async with (
        serving(model_file, engine, listen=["127.0.0.1:0"], max_connection_idle=1) as server,
        connection(server) as (reader, writer),
        asyncio.timeout(60),
    ):
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")  # the preface, empty SETTINGS
        said = await reader.read()  # to its end
        assert b"connection idle" in said
