"""A real grpc.aio server on a unix socket, in this process, around an engine without a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.service.fake_engine import FakeEngine, FakeModel
from xllm_client import NO_RETRY, AsyncClient
from xllm_service.app import Server, running
from xllm_service.config import ServeConfig, load_config
from xllm_service.engine import Model

Serve = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Server, AsyncClient]]]


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"GGUF and nothing else")
    return path


@pytest.fixture
def serve(engine: FakeEngine, model_file: Path, tmp_path: Path) -> Serve:
    """Start a server with other settings than the usual ones; `info` changes the model file.

    `others` are the engines that CreateEngine makes, by name; an exception in the place of one is what its load raises.
    """

    @contextlib.asynccontextmanager
    async def start(
        info: dict[str, Any] | None = None,
        token: str | None = None,
        others: Mapping[str, FakeEngine | Exception] | None = None,
        **settings: object,
    ) -> AsyncIterator[tuple[Server, AsyncClient]]:
        listen = f"unix:{tmp_path}/s/x.sock"
        config = load_config(model_file, {"listen": [listen], **settings})

        def load(config: ServeConfig) -> tuple[Model, FakeEngine]:
            made = (others or {}).get(config.model_name, engine)
            if isinstance(made, Exception):
                raise made
            made.config = config
            return Model(FakeModel(config.model, **(info or {}))), made

        async with (
            running(config, loader=load) as server,
            AsyncClient(str(server.endpoints[0]), token=token, retry=NO_RETRY, timeout_s=20) as client,
        ):
            yield server, client

    return start


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[tuple[Server, AsyncClient]]:
    async with serve() as both:
        yield both


@pytest.fixture
def client(served: tuple[Server, AsyncClient]) -> AsyncClient:
    return served[1]


@pytest.fixture
def server(served: tuple[Server, AsyncClient]) -> Server:
    return served[0]
