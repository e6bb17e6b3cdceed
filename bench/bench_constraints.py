"""What structured output costs: decode rates with a constraint and without, through gRPC on a unix socket, A B A B.

    python -m bench.bench_constraints MODEL.gguf [--batch 8] [--tokens 128] [--rounds 7] [--backend auto] [--json FILE]

Each round generates `batch` outputs at once, free ones and then constrained ones; both are of equal length, as the free
ones ignore ends and the constrained ones write a list that is longer than they may be. Both are greedy, as drawing from
fewer tokens would be faster. A rate is tokens per second of the whole batch, by the longest decode of the server's own
timings; on a machine that is busy otherwise the processor time of a token, which waiting does not change, says more.
The client runs in the same process as the server, in both cases alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import describe
from xllm_client import NO_RETRY, AsyncClient
from xllm_service.app import running
from xllm_service.config import load_config

#: Records of what schemas usually hold, more of them than any output here has room for.
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["person", "place", "thing"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 100_000},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "kind", "count", "tags"],
        "additionalProperties": False,
    },
}


async def rate(client: AsyncClient, batch: int, tokens: int, options: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second of one batch, and the processor time of a token in ms, prompts and client included."""
    began = time.process_time()
    calls = [
        client.generate_once(f"A list of {n} records as JSON:\n", max_tokens=tokens, seed=n, **options)
        for n in range(batch)
    ]
    replies = await asyncio.gather(*calls)
    for reply in replies:
        if reply.usage.num_generated_tokens != tokens:
            raise SystemExit(f"an output ended after {reply.usage.num_generated_tokens} of {tokens} tokens")
    longest: float = max(reply.timings.decode.ToTimedelta().total_seconds() for reply in replies)
    return batch * (tokens - 1) / longest, (time.process_time() - began) * 1e3 / (batch * tokens)


async def measure(model: Path, backend: str, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the rates of every round, and their ratio."""
    free: list[tuple[float, float]] = []
    constrained: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        listen = [f"unix:{folder}/x.sock"]
        settings = {"listen": listen, "backend": backend, "max_slots": str(batch), "kv_memory": "512MiB"}
        async with (
            running(load_config(model, settings)) as server,
            AsyncClient(str(server.endpoints[0]), retry=NO_RETRY, timeout_s=600) as client,
        ):
            await rate(client, batch, 8, {"json_schema": SCHEMA})  # builds the tables of the vocabulary
            for number in range(rounds):
                free.append(await rate(client, batch, tokens, {"ignore_eos": True}))
                constrained.append(await rate(client, batch, tokens, {"json_schema": SCHEMA}))
                (rate_without, cpu_without), (rate_with, cpu_with) = free[-1], constrained[-1]
                print(
                    f"{number + 1}/{rounds}: {rate_without:.1f} free, {rate_with:.1f} constrained tokens/s; "
                    f"{cpu_without:.2f} and {cpu_with:.2f} ms of processor time a token",
                    flush=True,
                )
            info = server.served.get("").engine.info
    pairs = list(zip(constrained, free, strict=True))
    ratios = [with_it[0] / without[0] for with_it, without in pairs]
    cpu_ratios = [with_it[1] / without[1] for with_it, without in pairs]
    return {
        "model": model.name,
        "device": info.device_name,
        "num_threads": info.num_threads,
        "bs": batch,
        "gen_tokens": tokens,
        "free_tok_s": [each[0] for each in free],
        "constrained_tok_s": [each[0] for each in constrained],
        "free_cpu_ms": [each[1] for each in free],
        "constrained_cpu_ms": [each[1] for each in constrained],
        "cpu_ratio_median": statistics.median(cpu_ratios),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="auto", help="auto, cpu or cuda (%(default)s)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = asyncio.run(measure(options.model, options.backend, options.batch, options.tokens, options.rounds))
    span = f"{result['ratio_min']:.3f} to {result['ratio_max']:.3f}"
    print(f"constrained / free: median {result['ratio_median']:.3f} ({span})")
    print(f"processor time, constrained / free: median {result['cpu_ratio_median']:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), "rows": [result]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
