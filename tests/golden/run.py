"""Runs the prompts of a fixture through an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cyengine import AcceptedEvent, Engine, FinishedEvent, Request, SamplingParams, Status, TokenEvent
from tests.golden.fixtures import Fixture, prompts_of

#: How the second half of a record is drawn: every stage of the sampler takes part.
SAMPLING = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=7)

Tokens = list[list[int]]
T = TypeVar("T")


@dataclass
class Answers:
    """What came out, per request in the order given.

    Attributes:
        tokens: Generated ids.
        logprobs: Of each generated token: a change of a single bit shows here long before it changes a token.
        slots: Where each ran.
        num_cached: Prompt tokens that came from the prefix cache.
    """

    tokens: Tokens
    logprobs: list[list[float | None]]
    slots: list[int] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)


def requests_of(fixture: Fixture) -> list[Request]:
    """Return the requests of a record: every prompt greedily, then every prompt sampled."""
    prompts = prompts_of(fixture)
    return [
        Request(prompt=prompt, sampling=sampling, max_tokens=fixture.num_tokens, ignore_eos=True, num_logprobs=0)
        for sampling in (SamplingParams(), SAMPLING)
        for prompt in prompts
    ]


def half(everything: Sequence[T]) -> list[T]:
    """Return every prompt once, of a list of all greedy ones and all sampled ones: alternately greedy and sampled."""
    num_prompts = len(everything) // 2
    return [everything[i + num_prompts * (i % 2)] for i in range(num_prompts)]


def run(engine: Engine, requests: Sequence[Request], disturb: bool = False) -> Answers:
    """Run all requests at once, as many side by side as there are slots.

    Args:
        engine: Idle.
        requests: What to run.
        disturb: Every token of theirs brings a neighbour that is cancelled at its first, second or third token.
    """
    order = {engine.submit(request): i for i, request in enumerate(requests)}
    answers = Answers([[] for _ in requests], [[] for _ in requests], [-1] * len(requests), [0] * len(requests))
    neighbours: dict[int, int] = {}
    num_started, num_live = 0, len(order)
    while num_live:
        for event in engine.take_events(timeout_s=60):
            index = order.get(event.request_id)
            if isinstance(event, AcceptedEvent) and index is not None:
                answers.slots[index], answers.num_cached[index] = event.slot, event.num_cached_tokens
            elif isinstance(event, TokenEvent) and index is not None:
                answers.tokens[index].append(event.token_id)
                answers.logprobs[index].append(event.logprob)
                if disturb and len(neighbours) < 6:
                    num_started += 1
                    neighbours[engine.submit(_neighbour(num_started))] = 1 + num_started % 3
            elif isinstance(event, TokenEvent):
                if event.token_index + 1 == neighbours.get(event.request_id):
                    engine.cancel(event.request_id)
            elif isinstance(event, FinishedEvent):
                if index is None:
                    neighbours.pop(event.request_id, None)
                    continue
                assert event.status == Status.OK, event.message
                num_live -= 1
    for request_id in neighbours:
        engine.cancel(request_id)
    return answers


def _neighbour(number: int) -> Request:
    """Return a request unlike the others of its kind: length, place in the queue and sampling by its number."""
    prompt = [3 + (17 * number + i * i) % 250 for i in range(1 + 31 * number % 150)]
    sampling = SamplingParams(temperature=1.0, seed=number) if number % 2 else SamplingParams()
    return Request(prompt=prompt, sampling=sampling, max_tokens=40, ignore_eos=True, priority=number % 2)
