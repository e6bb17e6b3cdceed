"""Times one cell: so many requests at once, of so many prompt tokens, decoding so many tokens each.

All requests are submitted together. The first step that all of them decode in is the first one that counts; which token
of which request that is, depends on how their prompts were chunked. So steps are counted on the request that started
last: its k-th token ends its step k, and the others go on until it is done.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xllm_service.cli.failures import Failure

if TYPE_CHECKING:
    from xllm_service.engine import LocalEngine

FIRST_STEP = 16  # steps before this one warm up caches, and the clock of the processor
_WAIT_S = 1.0


@dataclass(frozen=True)
class Cell:
    """What is timed: tokens per prompt, tokens generated per request, requests at once."""

    prompt_tokens: int
    gen_tokens: int
    bs: int


@dataclass
class Sample:
    """Times of one cell in seconds; lists grow with repetitions.

    Attributes:
        ttft_s: of every request, from submission to its first token.
        prefill_s: until the last request has its first token.
        step_s: of every step that counts.
        decode_mode: the mode in effect.
    """

    ttft_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    decode_mode: str = ""

    def add(self, other: Sample) -> None:
        """Take another run of the same cell in."""
        self.ttft_s += other.ttft_s
        self.prefill_s += other.prefill_s
        self.step_s += other.step_s
        self.decode_mode = other.decode_mode


def measure(engine: LocalEngine, cell: Cell, seed: str) -> Sample:
    """Run a cell once. `seed` draws the prompts: another one for every run, or the prefix cache would answer.

    Raises ServiceError when a request is refused or fails, and Failure when it ends too early to be timed.
    """
    from xllm_service.engine import AcceptedEvent, FinishedEvent, TokenEvent

    info = engine.info
    room = info.max_seq_len - cell.prompt_tokens
    if room < cell.gen_tokens:
        raise Failure(
            f"cap {info.max_seq_len} has no room for {cell.prompt_tokens} + {cell.gen_tokens} tokens; raise --cap"
        )
    prompts = make_prompts(cell, engine.model.info.num_real_tokens, seed)
    sample = Sample()
    started = time.perf_counter()
    # Those that start first must not end before the last one does. How many steps that is depends on how fast prompts
    # are beside the bound on token gaps, so they may use all the room there is; they are cancelled when it is done.
    live = {engine.submit(prompt, max_tokens=room, ignore_eos=True) for prompt in prompts}
    arrivals: dict[int, list[float]] = {request_id: [] for request_id in live}
    is_done = False
    try:
        while len(live) == cell.bs and not is_done:
            events = engine.take_events(_WAIT_S)
            now = time.perf_counter()
            for event in events:
                if isinstance(event, AcceptedEvent):
                    sample.decode_mode = event.decode_mode.name.lower().replace("_", "-")
                elif isinstance(event, TokenEvent):
                    arrivals[event.request_id].append(now)
                elif isinstance(event, FinishedEvent):
                    live.discard(event.request_id)
                    if event.status.name != "OK":
                        raise Failure(f"a request ended with {event.status.name}: {event.message}")
            if all(arrivals.values()):
                is_done = len(_last_started(arrivals)) >= cell.gen_tokens
    finally:
        _end(engine, live)
    if not is_done:
        raise Failure("the requests ended before all of them decoded together; raise --cap")
    sample.ttft_s = [times[0] - started for times in arrivals.values()]
    sample.prefill_s = [max(sample.ttft_s)]
    sample.step_s = counted_steps(_last_started(arrivals)[: cell.gen_tokens])
    return sample


def counted_steps(arrivals: Sequence[float]) -> list[float]:
    """Return the durations of the steps that count, from the arrival of one request's tokens."""
    steps = [after - before for before, after in itertools.pairwise(arrivals)]
    # steps[k - 1] ends with token k. Where there are few, half of them count.
    return steps[min(FIRST_STEP, len(steps) // 2 + 1) - 1 :] if steps else []


def make_prompts(cell: Cell, num_tokens: int, seed: str) -> list[list[int]]:
    """Return token ids of no meaning, no two prompts alike; the same for the same seed."""
    drawn = random.Random(seed)
    return [[drawn.randrange(num_tokens) for _ in range(cell.prompt_tokens)] for _ in range(cell.bs)]


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def _last_started(arrivals: dict[int, list[float]]) -> list[float]:
    return max(arrivals.values(), key=lambda times: times[0])


def _end(engine: LocalEngine, live: set[int]) -> None:
    """Cancel what still runs and take its last events, so that the next run finds an empty queue."""
    from xllm_service.engine import FinishedEvent

    for request_id in live:
        engine.cancel(request_id)
    while live:
        live -= {event.request_id for event in engine.take_events(_WAIT_S) if isinstance(event, FinishedEvent)}
