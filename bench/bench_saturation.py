"""What a full server answers, and how fast: refusals and health checks while every slot and queue place is taken.

    python -m bench.bench_saturation MODEL --json bench/results/NAME.json

Starts `xllm serve` as a process of its own, fills it with generations that do not end, and then sends, for a while,
more of them at a steady rate, a burst of ten times the queue every few seconds where asked for, and health checks. Each
of these is timed by its client, from the call to the status; none waits for another one's answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.machine import describe
from xllm_client import NO_RETRY, AsyncClient, QueueFullError, XllmError


@asynccontextmanager
async def server(model: Path, args: argparse.Namespace) -> AsyncIterator[AsyncClient]:
    """Run a server and yield a client of it."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"unix:{folder}/s/x.sock"
        flags = ["--listen", endpoint, "--max-slots", str(args.slots), "--max-queue", str(args.queue)]
        flags += ["--log-level", "warning", *(["--threads", str(args.threads)] if args.threads else [])]
        command = [sys.executable, "-m", "xllm_service", "serve", str(model), *flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("XLLM_")}
        process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.DEVNULL)
        try:
            async with AsyncClient(endpoint, retry=NO_RETRY, timeout_s=600) as client:
                await client.wait_ready(60)
                yield client
        finally:
            process.terminate()
            await process.wait()


async def fill(client: AsyncClient, args: argparse.Namespace) -> list[asyncio.Task[None]]:
    """Take every slot and every place in the queue, and go on taking those that become free."""

    async def keep_one() -> None:
        while True:
            try:
                async for _ in client.generate("Once upon a time", max_tokens=4000, ignore_eos=True):
                    pass
            except XllmError:
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(keep_one()) for _ in range(args.slots + args.queue)]
    while True:
        (load,) = await client.load()
        if load.num_running_requests + load.num_waiting_requests >= args.slots + args.queue:
            return tasks
        await asyncio.sleep(0.1)


async def refusal_s(client: AsyncClient) -> float | None:
    """Time to a QUEUE_FULL; None where a place had become free."""
    begin = time.perf_counter()
    stream = client.generate("Once upon a time", max_tokens=4000, ignore_eos=True)
    try:
        await anext(stream)
    except QueueFullError:
        return time.perf_counter() - begin
    stream.close()
    return None


async def steadily(
    interval_s: float, end: float, ask: Callable[[], Awaitable[float | None]], found: list[float]
) -> None:
    """Ask at a steady rate, whether or not the last answer has come."""
    tasks: set[asyncio.Task[None]] = set()

    async def one() -> None:
        seconds = await ask()
        if seconds is not None:
            found.append(seconds)

    at = time.perf_counter()
    while at < end:
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        at += interval_s
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
    await asyncio.gather(*tasks)


def row(name: str, seconds: list[float], bound_ms: float) -> dict[str, Any]:
    """Quantiles in ms, and the share within the bound."""
    ms = sorted(1e3 * one for one in seconds)
    quantiles = statistics.quantiles(ms, n=100, method="inclusive")
    return {
        "what": name,
        "count": len(ms),
        "median_ms": round(statistics.median(ms), 2),
        "p95_ms": round(quantiles[94], 2),
        "p99_ms": round(quantiles[98], 2),
        "max_ms": round(ms[-1], 2),
        "bound_ms": bound_ms,
        "within_bound": round(sum(one < bound_ms for one in ms) / len(ms), 4),
    }


async def measure(model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run it once and return the rows."""
    refusals: list[float] = []
    bursts: list[float] = []
    checks: list[float] = []
    async with server(model, args) as client, grpc.aio.insecure_channel(client.endpoint) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)

        async def check_s() -> float:
            begin = time.perf_counter()
            reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            return time.perf_counter() - begin

        async def burst(end: float) -> None:
            while time.perf_counter() + args.burst_every < end:
                await asyncio.sleep(args.burst_every)
                found = await asyncio.gather(*(refusal_s(client) for _ in range(10 * args.queue)))
                bursts.extend(one for one in found if one is not None)

        fillers = await fill(client, args)
        end = time.perf_counter() + args.seconds
        work = [
            steadily(1 / args.rate, end, lambda: refusal_s(client), refusals),
            steadily(1 / args.checks, end, check_s, checks),
        ]
        if args.burst_every:
            work.append(burst(end))
        await asyncio.gather(*work)
        for filler in fillers:
            filler.cancel()
        await asyncio.gather(*fillers, return_exceptions=True)
    rows = [row("refusal", refusals, 20.0), row("health check", checks, 50.0)]
    if bursts:
        rows.append(row("refusal in a burst of ten times the queue", bursts, 20.0))
    return rows


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--queue", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0, help="of the engine; 0: its default")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second beyond what it can take")
    parser.add_argument("--checks", type=float, default=20.0, help="health checks a second")
    parser.add_argument("--burst-every", type=float, default=0.0, help="seconds between bursts; 0: none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = os.getloadavg()[0]
    rows = asyncio.run(measure(args.model, args))
    names = ("slots", "queue", "threads", "seconds", "rate", "checks", "burst_every")
    result = {
        "machine": describe(),
        "load_before": round(began, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "model": args.model.name,
        "settings": {name: getattr(args, name) for name in names},
        "rows": rows,
    }
    for one in rows:
        print(json.dumps(one))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
