"""What a server itself costs per token: its processor time for streams of tokens that nothing had to compute.

    python -m bench.bench_stream_cost MODEL [--streams 1,8,64] [--step-ms 4,12,2] [--seconds 4] [--json FILE]

A server in a process of its own, around an engine that gives every stream a token each step (`token_source`), and
clients in processes of their own. Of MODEL the vocabulary alone is used. `--step-ms` names one step for each number of
streams. A row says how much of the rate the clients saw, the server's processor time per token and by thread while all
streams ran, and the gaps and sizes of deltas. `--profile FILE` writes a profile of the server's event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from bench.bench_streams import Clients, Samples, Window
from bench.machine import describe
from bench.thread_times import ThreadWatch
from bench.token_source import TokenSource
from xllm_client import NO_RETRY, AsyncClient

Row = dict[str, Any]


def _serve(model: Path, endpoint: str, num_slots: int, step_s: float, stop: Event, profile: Path | None) -> None:
    """Serve until `stop` is set; the body of a process."""
    from xllm_service.app import running
    from xllm_service.cli.serve import keep_what_is_there
    from xllm_service.config import ServeConfig, load_config
    from xllm_service.engine import CoreEngine, Model, open_model

    def load(config: ServeConfig) -> tuple[Model, CoreEngine]:
        return open_model(config.model), TokenSource(num_slots, step_s)

    async def run() -> None:
        config = load_config(model, {"listen": [endpoint], "log_level": "warning"})
        async with running(config, loader=load):
            keep_what_is_there()
            await asyncio.to_thread(stop.wait)

    profiler = cProfile.Profile() if profile is not None else None
    if profiler is not None:
        profiler.enable()
    asyncio.run(run())
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(str(profile))


def measure(model: Path, num_streams: int, step_s: float, options: argparse.Namespace) -> Row:
    """Measure one number of streams."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"unix:{folder}/s/x.sock"
        stop = context.Event()
        arguments = (model, endpoint, num_streams, step_s, stop, options.profile)
        server = context.Process(target=_serve, args=arguments)
        server.start()
        try:
            with Clients(min(options.clients, num_streams)) as clients:
                asyncio.run(_wait(endpoint))
                clients.read(endpoint, num_streams, 24)
                with ThreadWatch(server.pid or 0) as watch:
                    streams, client_s = clients.read(endpoint, num_streams, int(options.seconds / step_s))
        finally:
            stop.set()
            server.join()
    samples = Samples()
    samples.add_served(streams, client_s)
    window, asked = Window.of(streams), num_streams / step_s
    rate = window.rate(streams)
    samples.alone.append(asked)
    seen = samples.row(num_streams)
    threads = {name: round(1e6 * cores / rate, 2) for name, cores in watch.cores(window.begin, window.end).items()}
    return {
        "streams": num_streams,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": round(rate, 1),
        "ratio": round(rate / asked, 4),
        "server_us_per_token": round(sum(threads.values()), 1),
        "client_us_per_token": round(1e6 * client_s / sum(sum(stream.counts) for stream in streams), 1),
        **{name: value for name, value in seen.items() if name.startswith(("gap", "tokens_per_delta"))},
        "threads_us_per_token": {name: took for name, took in threads.items() if took},
    }


async def _wait(endpoint: str) -> None:
    async with AsyncClient(endpoint, retry=NO_RETRY) as client:
        await client.wait_ready(60)


def _numbers(text: str) -> Sequence[float]:
    return [float(one) for one in text.split(",")]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=_numbers, default=[1, 8, 64])
    parser.add_argument("--step-ms", type=_numbers, default=[4, 12, 2])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=4, help="client processes, at most one per stream")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("GRPC_POLL_STRATEGY", "poll")  # as `xllm serve` does for a unix socket
    rows = []
    for num_streams, step_ms in zip(options.streams, options.step_ms, strict=True):
        rows.append(measure(options.model, int(num_streams), step_ms / 1e3, options))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
