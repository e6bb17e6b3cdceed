"""Decode and prefill rates of xLLM and llama.cpp on the same file, A B A B, on the CPU.

    python -m bench.bench_cpu_peer MODEL [--library LIBLLAMA] [--pairs 11] [--json bench/results/NAME.json]

Both engines are loaded once, with the same number of threads and f16 keys and values. A pair runs a cell through one
and at once through the other, the order changing from pair to pair, and gives one ratio of rates: what else the machine
does meets both. The figure of a cell is the median of the ratios with its quartiles; the rates beside it are medians
too and hold for a quiet machine alone.

On a machine that is busy otherwise, two threads that wait for one another at barriers are slowed beyond all proportion,
and llama.cpp, which spins there, most: such ratios flatter. `--threads 1 --cpu-time` compares tokens per second of the
process's CPU time instead, which waiting for a core does not change.

* decode    every sequence has `--depth` tokens behind it and is extended by `--steps`. xLLM's do not begin in the same
            step: those that came first go on until the last one decodes too, which makes them a little deeper, and
            then all are measured. xLLM's steps are whole ones, sampler and event queue included; llama.cpp computes
            the logits of given tokens and nothing else.
* prefill   one prompt of 512 tokens that no cache knows, up to its first token (llama.cpp: its last logits).

Beside one sequence's decode stands which share of the machine's read bandwidth xLLM's steps reach, weights, keys and
values together; the bandwidth is measured as `xllm bench` does, with as many threads.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import machine
from bench.llama_cpp import LlamaCpp
from cyengine import Engine, EngineConfig, FinishedEvent, Request, TokenEvent
from xllm_service.cli.benchmark.bandwidth import read_bandwidth

PREFILL = 512
#: Between two runs: the peer's threads go on spinning for a while.
PAUSE_S = 0.2
#: Steps that the first sequence may have done when the last one begins. What the prefix cache has not kept of a prompt
#: is computed beside those that decode already, a few rows a step where the gap between two tokens is bound.
LEAD = 256

Cell = dict[str, Any]

#: What rates are measured with; --cpu-time puts time.process_time here.
clock: Callable[[], float] = time.monotonic


class Peer:
    """llama.cpp with sequences that stand at `depth` and can be put back there."""

    def __init__(self, args: argparse.Namespace, batches: list[int]) -> None:
        """Fill one sequence per slot, and keep one for prompts."""
        self._num_seqs = max([*batches, 1])
        room = (self._num_seqs + 1) * max(args.depth + args.steps + 1, PREFILL)
        self.llama = LlamaCpp(args.model, args.threads, room, library=args.library, num_seqs=self._num_seqs + 1)
        self._depth: int = args.depth
        self._steps: int = args.steps
        self._random = random.Random(1)
        for seq in range(self._num_seqs if batches else 0):
            for start in range(0, self._depth, PREFILL):
                stop = min(start + PREFILL, self._depth)
                self.llama.step([(self._token(), position, seq) for position in range(start, stop)], 0)

    def _token(self) -> int:
        return self._random.randrange(300, self.llama.vocab_size - 300)

    def decode(self, batch: int) -> float:
        """Return tokens per second of `batch` sequences."""
        started = clock()
        for i in range(self._steps):
            self.llama.step([(self._token(), self._depth + i, seq) for seq in range(batch)], batch)
        elapsed = clock() - started
        for seq in range(batch):
            self.llama.rewind(seq, self._depth)
        return batch * self._steps / elapsed

    def prefill(self) -> float:
        """Return tokens per second of one prompt."""
        prompt = [(self._token(), position, self._num_seqs) for position in range(PREFILL)]
        started = clock()
        self.llama.step(prompt, 1)
        elapsed = clock() - started
        self.llama.rewind(self._num_seqs, 0)
        return PREFILL / elapsed


class Ours:
    """xLLM; prompts at `depth` come from the prefix cache after their first run."""

    def __init__(self, args: argparse.Namespace, batches: list[int], vocab_size: int) -> None:
        """Run every prompt once."""
        num_slots = max([*batches, 1])
        length = max(args.depth + LEAD + args.steps + 2, PREFILL + 2)
        config = EngineConfig(
            num_threads=args.threads,
            max_slots=num_slots,
            max_seq_len=length,
            prefill_chunk=PREFILL,
            allow_long_context=True,
            instruction_set=args.instruction_set,
        )
        self.engine = Engine(args.model, config)
        self._steps, self._random, self._vocab_size = args.steps, random.Random(2), vocab_size
        sizes = {tensor.name: tensor.size_bytes for tensor in self.engine.model.tensors()}
        if "output.weight" in sizes:  # an embedding that is not the head too is read row by row
            sizes.pop("token_embd.weight")
        kv_bytes = (args.depth + args.steps // 2) * self.engine.info.plan.kv_bytes_per_token
        #: What a step of one sequence reads.
        self.step_bytes = sum(sizes.values()) + kv_bytes
        self._prompts = [self._prompt(args.depth) for _ in range(num_slots)]
        if batches:
            self.decode(num_slots)

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(300, self._vocab_size - 300) for _ in range(length)]

    def _run(self, prompts: list[list[int]], num_tokens: int, num_together: int) -> list[list[float]]:
        """Return when each token of each prompt came.

        All end once `num_together` came of each while all decoded; 0: each goes on to its end.
        Raises RuntimeError where one of them has had its `num_tokens` before.
        """
        requests = [Request(prompt=prompt, max_tokens=num_tokens, ignore_eos=True) for prompt in prompts]
        times: dict[int, list[float]] = {self.engine.submit(request): [] for request in requests}
        live = set(times)
        is_enough = num_together == 0
        while live:
            for event in self.engine.take_events(timeout_s=600):
                if isinstance(event, TokenEvent):
                    times[event.request_id].append(clock())
                elif isinstance(event, FinishedEvent):
                    live.discard(event.request_id)
                    if not is_enough:
                        raise RuntimeError(f"a sequence had {num_tokens} tokens before all decoded together")
            if not is_enough and all(times.values()):
                started = max(t[0] for t in times.values())
                if min(sum(at > started for at in t) for t in times.values()) >= num_together:
                    is_enough = True
                    for request_id in live:
                        self.engine.cancel(request_id)
        return list(times.values())

    def decode(self, batch: int) -> float:
        """Return tokens per second of `batch` sequences, while all of them decode."""
        times = self._run(self._prompts[:batch], LEAD + self._steps, self._steps)
        started = max(t[0] for t in times)
        ended = min(t[-1] for t in times)
        return sum(started < at <= ended for t in times for at in t) / (ended - started)

    def prefill(self) -> float:
        """Return tokens per second of one prompt, from its submission to its first token."""
        prompt = self._prompt(PREFILL)
        started = clock()
        return PREFILL / (self._run([prompt], 1, 0)[0][0] - started)


def compare(name: str, pairs: int, ours: Callable[[], float], theirs: Callable[[], float]) -> Cell:
    """Run a cell `pairs` times through both."""
    rates: list[tuple[float, float]] = []
    for number in range(pairs):
        found: dict[bool, float] = {}
        for is_ours in (True, False) if number % 2 else (False, True):
            time.sleep(PAUSE_S)
            found[is_ours] = ours() if is_ours else theirs()
        rates.append((found[True], found[False]))
    ratios = [a / b for a, b in rates]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if pairs > 1 else ratios * 3
    cell = {
        "cell": name,
        "pairs": pairs,
        "ratio": round(median, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
        "tokens_per_s": round(statistics.median(a for a, _ in rates), 1),
        "peer_tokens_per_s": round(statistics.median(b for _, b in rates), 1),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }
    print(
        f"{name:12} {cell['ratio']:6.2f} x  ({low:.2f} to {high:.2f})   xLLM {cell['tokens_per_s']:8.1f} t/s   "
        f"llama.cpp {cell['peer_tokens_per_s']:8.1f} t/s",
        flush=True,
    )
    return cell


def main() -> None:
    """Measure, print and write."""
    global clock
    parser = argparse.ArgumentParser(description="Compare the CPU speed of xLLM and llama.cpp on the same file.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--library", type=Path, default=None, help="a libllama; default: that of xllamacpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--prefill-pairs", type=int, default=None, help="default: as --pairs")
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch", default="1,4,8", help="comma-separated; empty: no decode cells")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--instruction-set", default=None)
    parser.add_argument("--cpu-time", action="store_true", help="rates per second of the process's CPU time")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.monotonic

    batches = [int(batch) for batch in args.batch.split(",") if batch]
    bandwidth = read_bandwidth(args.threads)
    peer = Peer(args, batches)
    ours = Ours(args, batches, peer.llama.vocab_size)
    cells: list[Cell] = []
    for batch in batches:
        cells.append(
            compare(
                f"decode bs {batch}",
                args.pairs,
                lambda batch=batch: ours.decode(batch),  # type: ignore[misc]
                lambda batch=batch: peer.decode(batch),  # type: ignore[misc]
            )
        )
        if batch == 1:
            share = cells[-1]["tokens_per_s"] * ours.step_bytes / bandwidth
            cells[-1]["read_share"] = round(share, 3)
            print(f"{'':12} {100 * share:.0f} % of the read bandwidth, {bandwidth / 1e9:.1f} GB/s", flush=True)
    if not args.no_prefill:
        cells.append(compare(f"prefill {PREFILL}", args.prefill_pairs or args.pairs, ours.prefill, peer.prefill))
    document = {
        "machine": machine.describe(),
        "model": args.model.name,
        "threads": args.threads,
        "clock": "cpu" if args.cpu_time else "wall",
        "read_bandwidth": bandwidth,
        "depth": args.depth,
        "steps": args.steps,
        "kernels": ours.engine.info.kernels,
        "peer": peer.llama.version if args.library is None else args.library.name,
        "peer_system_info": peer.llama.system_info,
        "rows": cells,
    }
    ours.engine.close()
    peer.llama.close()
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
