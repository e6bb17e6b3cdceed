"""What streaming costs: tokens/s of Generate streams through a unix socket beside the same engine in process.

    python -m bench.bench_streams MODEL [--streams 1,8,64] [--runs 3] [--json FILE] [-- flags of xllm serve]

For each number of streams: the engine alone, its events taken in this process and thrown away; then a server in a
process of its own and that many Generate calls from client processes of their own, A B A B. Both are loaded before, and
one of them idles. Both decode the same prompts without an end. A rate is what came while all streams were decoding:
tokens after the last stream's first one and before the first stream's last one, over that time. For the server also the
gaps between the deltas of a stream, how many tokens a delta brought, and how many cores' worth of time its threads had.

The clients' processor time is no part of what a server costs, but where every core is busy it is taken from the engine.
`client_share` says how much of the machine they took in that time, and `ratio_without_clients` is the ratio with that
share of the time left out; where cores are free, look at `ratio`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import grpc.aio

from bench.machine import describe
from bench.thread_times import ThreadWatch
from cyengine import Engine, EngineConfig, FinishedEvent, Request, TokenEvent
from cyengine.types import Backend
from xllm_client import NO_RETRY, AsyncClient
from xllm_client.v1 import generation_service_pb2 as pb
from xllm_client.v1 import generation_service_pb2_grpc as pb_grpc

_NUM_PROMPT = 128
Row = dict[str, Any]


@dataclass(frozen=True)
class Arrivals:
    """What one reader saw of one stream: when (monotonic seconds), and how many tokens at once."""

    times: list[float]
    counts: list[int]


@dataclass(frozen=True)
class Window:
    """The time in which all streams decode."""

    begin: float
    end: float

    @classmethod
    def of(cls, streams: Sequence[Arrivals]) -> Window:
        """Return it; both ends belong to a delta that is not counted."""
        return cls(max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams))

    def rate(self, streams: Sequence[Arrivals]) -> float:
        """Return the tokens/s of all streams together."""
        tokens = sum(
            count
            for stream in streams
            for at, count in zip(stream.times, stream.counts, strict=True)
            if self.begin < at <= self.end
        )
        return tokens / (self.end - self.begin)


def prompt(stream: int) -> list[int]:
    """Return ids of no meaning, another beginning for each stream."""
    return [3 + (131 * stream + 7919 * i + i * i // 3) % 40_000 for i in range(_NUM_PROMPT)]


def in_process(engine: Engine, num_streams: int, max_tokens: int) -> list[Arrivals]:
    """Decode without a server."""
    streams = {}
    for i in range(num_streams):
        request = Request(prompt(i), max_tokens=max_tokens, ignore_eos=True, bypass_cache=True)
        streams[engine.submit(request)] = Arrivals([], [])
    num_live = num_streams
    while num_live:
        events = engine.take_events(timeout_s=-1.0)
        now = time.monotonic()
        for event in events:
            if isinstance(event, TokenEvent):
                seen = streams[event.request_id]
                if seen.times and seen.times[-1] == now:
                    seen.counts[-1] += 1
                else:
                    seen.times.append(now)
                    seen.counts.append(1)
            elif isinstance(event, FinishedEvent):
                num_live -= 1
    return list(streams.values())


async def _read(endpoint: str, ids: Sequence[int], max_tokens: int) -> list[Arrivals]:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub: Any = pb_grpc.GenerationServiceStub(cast(Any, channel))

        async def one(stream: int) -> Arrivals:
            spec = pb.GenerationSpec()
            spec.token_ids.ids.extend(prompt(stream))
            spec.limits.max_tokens = max_tokens
            spec.stop.ignore_eos = True
            spec.cache.bypass = True
            seen = Arrivals([], [])
            async for event in stub.Generate(pb.GenerateRequest(spec=spec)):
                if event.HasField("delta"):
                    seen.times.append(time.monotonic())
                    seen.counts.append(event.delta.num_tokens)
            return seen

        return list(await asyncio.gather(*(one(i) for i in ids)))


def _client(endpoint: str, ids: Sequence[int], max_tokens: int) -> tuple[list[Arrivals], float]:
    """Read some streams, in a process of their own; return what came, and the processor seconds it took."""
    before = time.process_time()
    streams = asyncio.run(_read(endpoint, ids, max_tokens))
    return streams, time.process_time() - before


class Clients:
    """Processes that read streams, for as long as the `with` statement runs."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._pool = multiprocessing.get_context("spawn").Pool(num_processes)

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def read(self, endpoint: str, num_streams: int, max_tokens: int) -> tuple[list[Arrivals], float]:
        """Decode through the socket; return the streams and the processor seconds that reading them took."""
        shares = [
            list(range(i, num_streams, self._num_processes)) for i in range(min(self._num_processes, num_streams))
        ]
        found = self._pool.starmap(_client, [(endpoint, share, max_tokens) for share in shares], chunksize=1)
        return [stream for streams, _ in found for stream in streams], sum(seconds for _, seconds in found)


class Server:
    """`xllm serve` on a unix socket, in a process of its own."""

    def __init__(self, model: Path, num_streams: int, options: argparse.Namespace) -> None:
        """Start it and wait until it serves."""
        self._folder = tempfile.TemporaryDirectory()
        self.endpoint = f"unix:{self._folder.name}/s/x.sock"
        flags = ["--listen", self.endpoint, "--max-slots", str(num_streams), "--log-level", "warning"]
        if options.max_seq_len:
            flags += ["--max-seq-len", str(options.max_seq_len)]
        if options.threads:
            flags += ["--threads", str(options.threads)]
        if options.kv_memory:
            flags += ["--kv-memory", str(options.kv_memory)]
        flags += ["--backend", options.backend, *options.serve]
        command = [sys.executable, "-m", "xllm_service", "serve", str(model), *flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("XLLM_")}
        self._process = subprocess.Popen(command, env=environment)
        try:
            asyncio.run(self._wait())
        except BaseException:
            self.close()
            raise

    async def _wait(self) -> None:
        async with AsyncClient(self.endpoint, retry=NO_RETRY) as client:
            await client.wait_ready(300)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def close(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Samples:
    """What the runs of one number of streams found."""

    alone: list[float] = field(default_factory=list)
    through: list[float] = field(default_factory=list)
    client_shares: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    cores: dict[str, float] = field(default_factory=dict)

    def add_served(self, streams: Sequence[Arrivals], client_s: float) -> None:
        """Take what clients saw."""
        window = Window.of(streams)
        self.through.append(window.rate(streams))
        took = max(stream.times[-1] for stream in streams) - min(stream.times[0] for stream in streams)
        self.client_shares.append(client_s / took / len(os.sched_getaffinity(0)))
        for stream in streams:
            inside = [at for at in stream.times if window.begin <= at <= window.end]
            self.gaps_ms += [1e3 * (b - a) for a, b in itertools.pairwise(inside)]
            self.counts += stream.counts[1:]

    def row(self, num_streams: int) -> Row:
        """Return the medians."""
        alone, through = statistics.median(self.alone), statistics.median(self.through)
        client_share = statistics.median(self.client_shares)
        ratios = [b / a for a, b in zip(self.alone, self.through, strict=True)]
        ratio = statistics.median(ratios)
        return {
            "streams": num_streams,
            "in_process_tokens_per_s": round(alone, 1),
            "served_tokens_per_s": round(through, 1),
            "ratio": round(ratio, 4),
            "client_share": round(client_share, 4),
            "ratio_without_clients": round(ratio / (1 - client_share), 4),
            "ratios": [round(value, 4) for value in ratios],
            "step_ms": round(1e3 * num_streams / alone, 3),
            "gap_ms_median": round(statistics.median(self.gaps_ms), 3),
            "gap_ms_p99": round(_quantile(self.gaps_ms, 0.99), 3),
            "tokens_per_delta_median": statistics.median(self.counts),
            "tokens_per_delta_max": max(self.counts),
            "server_cores": {name: round(cores, 3) for name, cores in self.cores.items() if cores >= 0.0005},
        }


def measure(model: Path, sizes: Sequence[int], options: argparse.Namespace) -> list[Row]:
    """Measure every number of streams, `runs` times each; an engine or server has slots for the most of them."""
    config = EngineConfig(
        backend=Backend[options.backend.upper()],
        max_slots=max(sizes),
        max_seq_len=options.max_seq_len,
        num_threads=options.threads,
        kv_memory=options.kv_memory,
    )
    samples = {size: Samples() for size in sizes}
    with Clients(min(options.clients, max(sizes))) as clients, Engine(model, config) as engine:
        server = Server(model, max(sizes), options)
        try:
            for size in sizes:  # what is made on first use
                in_process(engine, size, 24)
                clients.read(server.endpoint, size, 24)
            for _, size in itertools.product(range(options.runs), sizes):
                streams = in_process(engine, size, options.tokens)
                samples[size].alone.append(Window.of(streams).rate(streams))
                with ThreadWatch(server.pid) as watch:
                    read, client_s = clients.read(server.endpoint, size, options.tokens)
                samples[size].add_served(read, client_s)
                window = Window.of(read)
                samples[size].cores = watch.cores(window.begin, window.end)
        finally:
            server.close()
    return [samples[size].row(size) for size in sizes]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4, help="client processes, at most one per stream")
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max-seq-len", type=int, default=0)
    parser.add_argument("--kv-memory", type=int, default=0, help="bytes of each of the two KV pools")
    parser.add_argument("--json", type=Path)
    parser.add_argument("serve", nargs="*", help="further flags of xllm serve, after --")
    options = parser.parse_args()
    found = measure(options.model, [int(one) for one in options.streams.split(",")], options)
    rows: list[Row] = [{"model": options.model.stem, "backend": options.backend} | row for row in found]
    for row in rows:
        print(json.dumps(row))
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
