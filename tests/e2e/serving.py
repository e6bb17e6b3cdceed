"""Servers around the real engine: in this process, where its statistics can be seen, and as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from cyengine.types import EngineStats
from xllm_client import NO_RETRY, AsyncClient, Client
from xllm_service.app import Server, load, running
from xllm_service.config import ServeConfig, load_config
from xllm_service.engine import CoreEngine, Model


async def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def stats(server: Server, model: str = "") -> EngineStats:
    """What an engine says of itself now; "" is the only one."""
    return server.served.get(model).engine.stats()


def is_idle(server: Server) -> bool:
    """Slots, KV blocks, queue and calls are back at their baseline."""
    every = server.served.roster.stats().values()
    is_empty = not any(now.num_running or now.num_waiting or now.slots_used or now.blocks_used for now in every)
    return is_empty and server.gate.num_calls == 0 and len(server.served.generations) == 0


@contextlib.asynccontextmanager
async def serving(model: Path, folder: Path, **settings: object) -> AsyncIterator[tuple[Server, AsyncClient]]:
    """Serve `model` on a unix socket in `folder`, in this process."""
    async with serving_around(model, folder, lambda core: core, settings) as both:
        yield both


@contextlib.asynccontextmanager
async def serving_around(
    model: Path, folder: Path, wrap: Callable[[CoreEngine], CoreEngine], settings: Mapping[str, object]
) -> AsyncIterator[tuple[Server, AsyncClient]]:
    """Serve as `serving` does, with something around the engine."""
    config = load_config(model, {"listen": [f"unix:{folder}/s/x.sock"], "kv_memory": "32MiB", **settings})

    def loader(config: ServeConfig) -> tuple[Model, CoreEngine]:
        model, core = load(config)
        return model, wrap(core)

    async with (
        running(config, loader=loader) as server,
        AsyncClient(str(server.endpoints[0]), retry=NO_RETRY, timeout_s=60) as client,
    ):
        yield server, client


@contextlib.contextmanager
def server_process(model: Path, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `xllm serve` until the end of the `with` statement; yields the process and its endpoint, SERVING."""
    endpoint = f"unix:{folder}/p/x.sock"
    command = [sys.executable, "-m", "xllm_service", "serve", str(model), "--listen", endpoint, *flags]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("XLLM_")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        with Client(endpoint) as client:
            client.wait_ready(60)
        yield process, endpoint
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
    """Send a signal and return the exit code and what was logged."""
    process.send_signal(number)
    _, log = process.communicate(timeout=60)
    return process.returncode, log
