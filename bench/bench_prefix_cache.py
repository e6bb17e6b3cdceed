"""Time to the first token of a further chat turn, with the prefix cache and without it, turn by turn.

``python -m bench.bench_prefix_cache MODEL [--shared 2000] [--new 64] [--pairs 7]``: prompts begin with the same
`shared` tokens and go on with `new` ones of their own. Prints the medians and their ratio; tells when the bytes differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.machine import describe
from cyengine import Engine, EngineConfig, FinishedEvent, Model, Request, TokenEvent

_NUM_TOKENS = 8


def answer(engine: Engine, prompt: Sequence[int], *, bypass: bool) -> tuple[float, list[int], int]:
    """Return time to first token in seconds, the tokens, and how many of the prompt came from the cache."""
    ids: list[int] = []
    for event in engine.stream(Request(prompt, max_tokens=_NUM_TOKENS, ignore_eos=True, bypass_cache=bypass)):
        if isinstance(event, TokenEvent):
            ids.append(event.token_id)
        elif isinstance(event, FinishedEvent):
            return event.ttft_s, ids, event.num_cached_tokens
    raise RuntimeError("the stream ended without its last event")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--shared", type=int, default=2000, help="tokens that all prompts begin with")
    parser.add_argument("--new", type=int, default=64, help="tokens of each prompt's own")
    parser.add_argument("--pairs", type=int, default=7, help="turns, each with and without")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with Model(options.model) as model, Engine(model, EngineConfig(num_threads=options.threads)) as engine:
        num_ids = model.info.num_real_tokens
        shared = [(7 * i + i * i % 101) % num_ids for i in range(options.shared)]
        answer(engine, shared, bypass=False)
        times: dict[bool, list[float]] = {True: [], False: []}
        is_same, num_cached = True, 0
        for turn in range(options.pairs):
            prompt = shared + [(13 * i + 17 * turn) % num_ids for i in range(options.new)]
            for bypass in (True, False):
                ttft_s, ids, cached = answer(engine, prompt, bypass=bypass)
                times[bypass].append(ttft_s)
                if bypass:
                    expected = ids
                else:
                    is_same, num_cached = is_same and ids == expected, cached
    without, cached_s = (statistics.median(times[bypass]) for bypass in (True, False))
    print(f"{options.shared} shared + {options.new} new tokens, {options.pairs} turns; {num_cached} tokens cached")
    print(f"time to first token: {1e3 * without:.1f} ms without the cache, {1e3 * cached_s:.1f} ms with it")
    print(f"ratio {cached_s / without:.1%}; bytes {'equal' if is_same else 'DIFFER'}")
    row = {
        "model": Path(options.model).stem,
        "shared_tokens": options.shared,
        "new_tokens": options.new,
        "cached_tokens": num_cached,
        "ttft_ms_without": [round(1e3 * value, 1) for value in times[True]],
        "ttft_ms_with": [round(1e3 * value, 1) for value in times[False]],
        "ratio": round(cached_s / without, 4),
        "same_bytes": is_same,
    }
    if options.json:
        options.json.write_text(json.dumps({"machine": describe(), "rows": [row]}, indent=1) + "\n")
    return 0 if is_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
