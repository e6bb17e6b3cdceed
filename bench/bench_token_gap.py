"""The gap between tokens of running streams while a long prompt is computed beside them.

``python -m bench.bench_token_gap MODEL [--streams 4] [--prompt 6000] [--bound 0.2]``: prints the worst gap before, and
while the prompt is computed, beside the bound; and the same without a bound.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from bench.machine import describe
from cyengine import Engine, EngineConfig, FinishedEvent, Model, Request, TokenEvent

_NUM_BEFORE = 40  # tokens of each stream before the prompt comes


def worst_gaps(engine: Engine, num_streams: int, prompt: Sequence[int]) -> tuple[float, float, float]:
    """Return the worst gap before and beside the prompt, and the prompt's time to first token, in seconds."""
    streams = [
        engine.submit(Request([5 + i, 6, 7], max_tokens=0, ignore_eos=True, bypass_cache=True))
        for i in range(num_streams)
    ]
    last: dict[int, float] = {}
    worst = {False: 0.0, True: 0.0}
    counts = dict.fromkeys(streams, 0)
    long_id, ttft_s = 0, 0.0
    while not ttft_s:
        events = engine.take_events(timeout_s=-1.0)
        now = time.monotonic()
        for event in events:
            if isinstance(event, FinishedEvent) and event.request_id == long_id:
                ttft_s = event.ttft_s
            if not isinstance(event, TokenEvent) or event.request_id == long_id:
                continue
            if event.request_id in last:
                worst[long_id > 0] = max(worst[long_id > 0], now - last[event.request_id])
            last[event.request_id] = now
            counts[event.request_id] += 1
        if not long_id and min(counts.values()) >= _NUM_BEFORE:
            long_id = engine.submit(Request(prompt, max_tokens=1, ignore_eos=True, bypass_cache=True))
    for request_id in streams:
        engine.cancel(request_id)
    return worst[False], worst[True], ttft_s


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of the long prompt")
    parser.add_argument("--bound", type=float, default=0.2, help="seconds")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with Model(options.model) as model:
        prompt = [(7 * i + i * i % 101) % model.info.num_real_tokens for i in range(options.prompt)]
        for bound in (options.bound, 0.0):
            config = EngineConfig(
                num_threads=options.threads,
                max_token_gap_s=bound,
                max_seq_len=max(model.info.context_length, options.prompt + 16),
                allow_long_context=True,
            )
            with Engine(model, config) as engine:
                before, beside, ttft_s = worst_gaps(engine, options.streams, prompt)
            rows.append(
                {
                    "model": Path(options.model).stem,
                    "bound_ms": 1e3 * bound or None,
                    "streams": options.streams,
                    "prompt_tokens": options.prompt,
                    "worst_gap_before_ms": round(1e3 * before, 1),
                    "worst_gap_beside_ms": round(1e3 * beside, 1),
                    "ttft_ms": round(1e3 * ttft_s, 1),
                }
            )
            told = f"bound {1e3 * bound:.0f} ms" if bound else "no bound"
            print(
                f"{told}: worst gap of {options.streams} streams {1e3 * before:.0f} ms before, "
                f"{1e3 * beside:.0f} ms beside a prompt of {options.prompt} tokens (first token after {ttft_s:.2f} s)"
            )
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
