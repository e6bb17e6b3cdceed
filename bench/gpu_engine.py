"""What an engine on a GPU must keep to, on models of real shape: long prompts, limits, TTFT at any cap, neighbours.

    python -m bench.gpu_engine [--models FOLDER] [--parts PART,..] [--json FILE] [--prompt-tokens N]

Parts: `decode` (step times of batches), `caps` (TTFT of a short prompt, creation time and memory at every cap),
`limits` (8 GiB in every decode mode), `neighbours` (two engines in one process), `plan` (planned memory beside used),
`long` (a long prompt under 32 GiB), `kv` (the types of keys and values, half as long a prompt). Models are synthesised
into the folder where they are not there yet. A part that fails is a row with `error`, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.machine import describe
from bench.synthesize import MIXES, SHAPES, synthesize
from cyengine import DecodeMode, Engine, EngineConfig, FinishedEvent, Model, Request, Status, TokenEvent, errors
from cyengine.types import Backend, KvType

GIB = 1 << 30
LARGE = ("qwen3-8b", "llama-3-8b")
SMALL = "qwen2.5-1.5b"
CAPS = (512, 2048, 8192, 32_768, 131_072)
CUDA = EngineConfig(backend=Backend.CUDA, allow_long_context=True)
Row = dict[str, Any]


class Bench:
    """The models, made on first use, and what was asked for."""

    def __init__(self, folder: Path, prompt_tokens: int) -> None:
        """Keep the folder; nothing is made yet."""
        self.folder = folder
        self.prompt_tokens = prompt_tokens

    def model(self, shape: str, mix: str = "q4_k_m") -> Path:
        """Return a model file of real shape."""
        assert mix in MIXES
        path = self.folder / f"{shape}-{mix}.gguf"
        if not path.exists():
            synthesize(path, SHAPES[shape], mix, 0)
        return path


class Timed:
    """When the tokens of some requests came, and which they were."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Run the requests together to their end."""
        start = time.perf_counter()
        order = {engine.submit(request): i for i, request in enumerate(requests)}
        self.times: list[list[float]] = [[] for _ in requests]
        self.tokens: list[list[int]] = [[] for _ in requests]
        num_live = len(requests)
        while num_live:
            events = engine.take_events(timeout_s=60)
            now = time.perf_counter() - start
            for event in events:
                at = order.get(event.request_id)
                if at is None:
                    continue
                if isinstance(event, TokenEvent):
                    self.times[at].append(now)
                    self.tokens[at].append(event.token_id)
                elif isinstance(event, FinishedEvent):
                    if event.status != Status.OK:
                        raise RuntimeError(f"a request ended with {event.status.name}: {event.message}")
                    num_live -= 1

    @property
    def ttft_ms(self) -> float:
        """Until the first request has its first token."""
        return 1e3 * self.times[0][0]

    @property
    def step_ms(self) -> float:
        """Median of the gaps of the request that began last, its first 16 left out where there are more."""
        times = max(self.times, key=lambda values: values[0])
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return 1e3 * statistics.median(gaps[16:] or gaps)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Return ids of no meaning; another seed, another beginning."""
    return [(131 * seed + 7919 * i + i * i // 3) % 50_000 for i in range(num_tokens)]


def greedy(num_prompt: int, max_tokens: int, seed: int = 0) -> Request:
    """Return a greedy request that runs to its end."""
    return Request(prompt=prompt(num_prompt, seed), max_tokens=max_tokens, ignore_eos=True)


@contextmanager
def timed_engine(path: Path, config: EngineConfig) -> Iterator[tuple[Engine, float]]:
    """Yield an engine and the seconds that its creation took."""
    start = time.perf_counter()
    with Engine(path, config) as engine:
        yield engine, time.perf_counter() - start


def warm_up(engine: Engine) -> None:
    """Run what is loaded or captured on first use."""
    Timed(engine, [greedy(9, 24, seed=99)])


def decode(bench: Bench) -> Iterator[Row]:
    """The standard decode cell, through the whole engine."""
    for shape in (*LARGE, SMALL):
        with timed_engine(bench.model(shape), replace(CUDA, max_slots=32, max_seq_len=4096, kv_memory=12 * GIB)) as (
            engine,
            _,
        ):
            warm_up(engine)
            for bs in (1, 8, 32):
                Timed(engine, [greedy(128, 40, seed=100 + i) for i in range(bs)])
                run = Timed(engine, [greedy(128, 128 + bs, seed=i) for i in range(bs)])
                yield {"part": "decode", "model": shape, "bs": bs, "step_ms": run.step_ms, "ttft_ms": run.ttft_ms}


def caps(bench: Bench) -> Iterator[Row]:
    """TTFT of nine tokens, creation and memory: the same whatever the cap."""
    for shape in LARGE:
        for cap in CAPS:
            config = replace(CUDA, max_slots=8, max_seq_len=cap, kv_memory=20 * GIB)
            with timed_engine(bench.model(shape), config) as (engine, create_s):
                warm_up(engine)
                ttfts = [Timed(engine, [greedy(9, 1, seed=i)]).ttft_ms for i in range(15)]
                running = engine.submit(greedy(9, 100), private=True)
                most = 0
                is_done = False
                while not is_done:
                    is_done = any(isinstance(event, FinishedEvent) for event in engine.take_events(running, 10))
                    most = max(most, engine.stats().blocks_used)
                plan = engine.info.plan
                yield {
                    "part": "caps", "model": shape, "cap": cap, "create_s": create_s,
                    "ttft_9_tokens_ms": statistics.median(ttfts), "ttft_max_ms": max(ttfts),
                    "planned_bytes": plan.total_bytes, "workspace_bytes": engine.stats().workspace_bytes,
                    "blocks_most": most, "blocks_allowed": -(-109 // plan.block_size),
                }  # fmt: skip


def limits(bench: Bench) -> Iterator[Row]:
    """8 GiB at cap 4096: enough for the quant blocks, not for f32."""
    path = bench.model(LARGE[0])
    config = replace(CUDA, memory_limit=8 * GIB, max_seq_len=4096, max_slots=1)
    for mode in (DecodeMode.BATCHED, DecodeMode.PER_SLOT, DecodeMode.AUTO):
        row: Row = {"part": "limits", "model": LARGE[0], "memory_limit": 8 * GIB, "cap": 4096, "engine": mode.name}
        try:
            with Engine(path, replace(config, decode_mode=mode)) as engine:
                row["planned_bytes"] = engine.info.plan.total_bytes
                if mode is not DecodeMode.PER_SLOT:
                    row["step_ms"] = Timed(engine, [greedy(128, 64)]).step_ms
                if mode is DecodeMode.AUTO:
                    try:
                        engine.submit(replace(greedy(9, 2), decode_mode=DecodeMode.PER_SLOT))
                        row["per_slot"] = "accepted"
                    except errors.MemoryLimitError as error:
                        row["per_slot"] = f"refused: {error}"
        except errors.MemoryLimitError as error:
            row["refused"] = str(error)
            row["details"] = dict(error.details)
        yield row


def neighbours(bench: Bench) -> Iterator[Row]:
    """Two engines in one process: bytes and step times as alone, the other idle; then both at work."""
    many = [greedy(100 + 9 * i, 160, seed=i) for i in range(8)]
    one = [greedy(128, 160)]
    small = (bench.model(SMALL), replace(CUDA, max_slots=8, max_seq_len=4096, kv_memory=8 * GIB), many)
    large = (bench.model(LARGE[0]), replace(CUDA, max_slots=1, max_seq_len=4096, kv_memory=8 * GIB), one)
    alone = []
    for path, config, requests in (small, large):
        with Engine(path, config) as engine:
            warm_up(engine)
            Timed(engine, requests)
            alone.append(Timed(engine, requests))
    with Engine(*small[:2]) as first, Engine(*large[:2]) as second:
        for name, engine, requests, before in ((SMALL, first, many, alone[0]), (LARGE[0], second, one, alone[1])):
            warm_up(engine)
            Timed(engine, requests)
            beside = Timed(engine, requests)
            yield {
                "part": "neighbours", "model": name, "slots": len(requests), "alone_step_ms": before.step_ms,
                "beside_idle_step_ms": beside.step_ms, "same_tokens": beside.tokens == before.tokens,
            }  # fmt: skip
        ids = [second.submit(replace(one[0], max_tokens=400))]
        busy = Timed(first, many)
        for request_id in ids:
            second.cancel(request_id)
        yield {
            "part": "neighbours", "model": SMALL, "slots": 8, "beside_busy_step_ms": busy.step_ms,
            "same_tokens": busy.tokens == alone[0].tokens,
        }  # fmt: skip


def plan(bench: Bench) -> Iterator[Row]:
    """Device memory before and with an engine that has worked, beside its Plan."""
    for shape, mode in ((SMALL, DecodeMode.BATCHED), (SMALL, DecodeMode.PER_SLOT), (LARGE[0], DecodeMode.BATCHED)):
        path = bench.model(shape)
        config = replace(CUDA, decode_mode=mode, max_slots=8, max_seq_len=4096, kv_memory=4 * GIB)
        with Engine(path, config) as engine:  # what the driver takes once for the process
            warm_up(engine)
        with Model(path) as model:
            before = model.plan(config).device_free_bytes
            with Engine(path, config) as engine:
                Timed(engine, [greedy(600, 32, seed=i) for i in range(8)])
                used = before - model.plan(config).device_free_bytes
                planned = engine.info.plan.total_bytes
            left = before - model.plan(config).device_free_bytes
        yield {
            "part": "plan", "model": shape, "mode": mode.name, "planned_bytes": planned, "used_bytes": used,
            "off_percent": 100 * (used / planned - 1), "left_after_bytes": left,
        }  # fmt: skip


def long(bench: Bench) -> Iterator[Row]:
    """A long prompt in a card of 32 GiB: prefill, and steps at that depth."""
    for shape in LARGE:
        n = bench.prompt_tokens
        config = replace(CUDA, max_slots=1, max_seq_len=n + 256, memory_limit=32 * GIB)
        with Engine(bench.model(shape), config) as engine:
            warm_up(engine)
            probe = Timed(engine, [greedy(2048, 2, seed=1)])
            row: Row = {
                "part": "long", "model": shape, "memory_limit": 32 * GIB, "prompt_tokens": n,
                "prefill_2048_tok_s": 2048e3 / probe.ttft_ms, "kv_pool_bytes": engine.info.plan.kv_pool_bytes,
            }  # fmt: skip
            print(json.dumps(row), flush=True)
            run = Timed(engine, [greedy(n, 80)])
            yield row | {
                "ttft_s": run.ttft_ms / 1e3, "prefill_tok_s": n / run.ttft_ms * 1e3, "step_ms": run.step_ms,
                "num_tokens": len(run.tokens[0]),
            }  # fmt: skip


def kv(bench: Bench) -> Iterator[Row]:
    """What each type of keys and values costs: bytes, prefill, steps at depth."""
    for kv_type in (KvType.F16, KvType.INT8, KvType.INT4):
        n = bench.prompt_tokens // 2
        config = replace(CUDA, max_slots=1, max_seq_len=n + 256, kv_memory=4 * GIB, kv_type=kv_type)
        with Engine(bench.model(LARGE[0]), config) as engine:
            warm_up(engine)
            run = Timed(engine, [greedy(n, 80)])
            yield {
                "part": "kv", "model": LARGE[0], "kv_type": kv_type.name, "prompt_tokens": n,
                "kv_bytes_per_token": engine.info.plan.kv_bytes_per_token, "ttft_s": run.ttft_ms / 1e3,
                "step_ms": run.step_ms,
            }  # fmt: skip


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "decode": decode, "caps": caps, "limits": limits, "neighbours": neighbours, "plan": plan, "long": long,
    "kv": kv,
}  # fmt: skip


def gpu() -> dict[str, str]:
    """Return the GPU's name and driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    name, _, driver = found[0].partition(", ") if found else ("unknown", "", "unknown")
    return {"gpu": name, "driver": driver}


def main() -> int:
    """Run the parts that were asked for and print a line per row."""
    parser = argparse.ArgumentParser(description="Measure an engine on a GPU with models of real shape.")
    parser.add_argument("--models", type=Path, help="where models are or are to be made; default: a temporary folder")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="write {machine, rows} there")
    parser.add_argument("--prompt-tokens", type=int, default=32_768, help="of the part long")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(args.models or Path(temporary), args.prompt_tokens)
        bench.folder.mkdir(parents=True, exist_ok=True)
        for name in args.parts.split(","):
            start = time.perf_counter()
            try:
                for row in PARTS[name](bench):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
            except Exception as error:  # the other parts go on
                rows.append({"part": name, "error": f"{type(error).__name__}: {error}"})
                print(json.dumps(rows[-1]), flush=True)
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
            if args.json:
                args.json.write_text(json.dumps({"machine": describe() | gpu(), "rows": rows}, indent=1) + "\n")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
