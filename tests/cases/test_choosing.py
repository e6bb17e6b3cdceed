"""Field cases of choosing a token: neutral values, the order of samplers, what penalties count (numbers 13 and 14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cyengine import AcceptedEvent, DecodeMode, Engine, FinishedEvent, Request, SamplingParams, Status, TokenEvent
from tests.cases.logits import MODES, cpu
from tests.tools.make_tiny_gguf import make_tiny_gguf

#: Sampled draws that stand for "always".
DRAWS = 60


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are all 0: biases alone decide."""
    path = tmp_path_factory.mktemp("choosing") / "flat.gguf"
    options: dict[str, Any] = {"dtype": "f16", "tied": False, "head_dtype": "f32"}
    rows = len(make_tiny_gguf(path, **options).tokens.tokens)
    make_tiny_gguf(path, **options, tensors={"output.weight": np.zeros((rows, 64), np.float32)})
    return path


def tokens_of(engine: Engine, request: Request) -> list[int]:
    return [event.token_id for event in engine.stream(request) if isinstance(event, TokenEvent)]


def forced(
    logits: Mapping[int, float], sampling: SamplingParams, prompt: Sequence[int] = (7,), max_tokens: int = 1
) -> Request:
    """A request whose logits are `logits`, the rest 0."""
    return Request(prompt=prompt, sampling=sampling, max_tokens=max_tokens, ignore_eos=True, logit_bias=logits)


# ---- 13: neutral values that are not neutral, and samplers in another order


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "neutral",
    [
        {"top_k": 0},
        {"top_k": 326},
        {"top_k": 10**6},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"repetition_penalty": 1.0},
        {"frequency_penalty": 0.0, "presence_penalty": 0.0},
    ],
    ids=str,
)
def test_neutral_values_change_no_token(tmp_path: Path, mode: DecodeMode, neutral: dict[str, Any]) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, dtype="f16", tied=False)
    with Engine(path, cpu(decode_mode=mode)) as engine:
        assert engine.model.info.vocab_size < 326
        for seed in range(3):
            plain = SamplingParams(temperature=1.5, seed=seed)
            with_value = SamplingParams(**{"temperature": 1.5, "seed": seed, **neutral})
            left, right = (
                tokens_of(engine, Request(prompt=[9, 8, 7], sampling=sampling, max_tokens=12, ignore_eos=True))
                for sampling in (plain, with_value)
            )
            assert left == right
            assert len(set(left)) > 3


def draws(engine: Engine, logits: Mapping[int, float], **sampling: Any) -> set[int]:
    """What comes of many seeds."""
    found: set[int] = set()
    for seed in range(DRAWS):
        found |= set(tokens_of(engine, forced(logits, SamplingParams(seed=seed, **sampling))))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_ends_of_each_range(flat: Path, mode: DecodeMode) -> None:
    # Three candidates; the rest is 90 below them.
    logits = {40: 92.0, 41: 91.9, 42: 91.8}
    with Engine(flat, cpu(decode_mode=mode)) as engine:
        assert draws(engine, logits, temperature=1.0) == {40, 41, 42}
        assert draws(engine, logits, temperature=1.0, top_p=0.0) == {40}
        assert draws(engine, logits, temperature=1.0, top_k=1) == {40}
        assert draws(engine, logits, temperature=1.0, top_k=2) == {40, 41}
        assert draws(engine, logits, temperature=1.0, min_p=1.0) == {40}
        tied = {50: 92.0, 43: 92.0, 42: 91.99}
        assert draws(engine, tied, temperature=1.0, min_p=1.0) == {43, 50}
        assert draws(engine, tied, temperature=1.0, top_p=0.0) == {43}


@pytest.mark.parametrize("mode", MODES)
def test_temperature_zero_takes_the_lowest_of_equals_whatever_the_seed(flat: Path, mode: DecodeMode) -> None:
    with Engine(flat, cpu(decode_mode=mode)) as engine:
        for seed in (None, 0, 1, 2**64 - 1):
            for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}):
                sampling = SamplingParams(temperature=0.0, seed=seed, **filters)
                assert tokens_of(engine, forced({60: 5.0, 45: 5.0, 300: 5.0}, sampling, max_tokens=4)) == [45] * 4
        # After bias, penalties and masks: the bias alone would choose 45, its penalty takes it away.
        sampling = SamplingParams(frequency_penalty=2.0)
        assert tokens_of(engine, forced({45: 5.0, 60: 4.0}, sampling, max_tokens=4)) == [45, 60, 45, 60]
        assert tokens_of(engine, forced({45: 5.0, 60: 5.0, 61: -np.inf}, SamplingParams())) == [45]


@pytest.mark.parametrize("mode", MODES)
def test_temperature_comes_before_top_p(flat: Path, mode: DecodeMode) -> None:
    logits = {40: 92.0, 41: 91.2, 42: 90.1}
    with Engine(flat, cpu(decode_mode=mode)) as engine:
        # Divided first the best has 0.87 of the probability; at temperature 1 it has 0.62 and a second is kept.
        assert draws(engine, logits, temperature=0.4, top_p=0.75) == {40}
        assert draws(engine, logits, temperature=1.0, top_p=0.75) == {40, 41}
        # The other way about: a higher temperature keeps more.
        assert draws(engine, logits, temperature=4.0, top_p=0.75) == {40, 41, 42}
        # min_p likewise: 41 has exp(-0.8) of the best at temperature 1, exp(-2) at 0.4.
        assert draws(engine, logits, temperature=1.0, min_p=0.3) == {40, 41}
        assert draws(engine, logits, temperature=0.4, min_p=0.3) == {40}


def test_the_same_seed_draws_the_same_alone_and_among_others(flat: Path) -> None:
    def request(seed: int) -> Request:
        return forced({}, SamplingParams(temperature=1.0, seed=seed), max_tokens=16)

    with Engine(flat, cpu(max_slots=4)) as engine:
        alone = [tokens_of(engine, request(seed)) for seed in range(8)]
        assert len({tuple(tokens) for tokens in alone}) == 8
        order = {engine.submit(request(seed)): seed for seed in range(8)}
        together: list[list[int]] = [[] for _ in order]
        live = len(order)
        while live:
            for event in engine.take_events(timeout_s=60):
                if isinstance(event, TokenEvent):
                    together[order[event.request_id]].append(event.token_id)
                live -= isinstance(event, FinishedEvent)
        assert together == alone
        drawn = [
            event.seed for event in engine.stream(forced({}, SamplingParams())) if isinstance(event, AcceptedEvent)
        ]
        assert len(drawn) == 1  # echoed, whether it was set or not


# ---- 14: penalties count the wrong tokens

FREQUENCY = SamplingParams(frequency_penalty=2.0, presence_penalty=2.0)
REPETITION = SamplingParams(repetition_penalty=1.3)
FORCED = {40: 5.0, 41: 4.9}
#: Holds id 40 five times, id 41 never; longer than a KV block.
PROMPT = [40, 7, 40, 8, 40, 9, 40, 40, *range(100, 140)]

# What each choice is, worked out by hand. The first counts the answer alone: 5.0, then 4.9, then 1.0 and 0.9 ...
BY_FREQUENCY = [40, 41, 40, 41]
# ... and the second the prompt too: 5.0 / 1.3 = 3.85 from the first token on; 41 falls to 3.77 once it was said.
BY_REPETITION = [41, 40, 40, 40]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("sampling", "expected"), [(FREQUENCY, BY_FREQUENCY), (REPETITION, BY_REPETITION)])
def test_penalties_count_what_they_say_cold_and_from_the_cache(
    flat: Path, mode: DecodeMode, sampling: SamplingParams, expected: list[int]
) -> None:
    with Engine(flat, cpu(decode_mode=mode, block_size=16)) as engine:
        for turn in range(3):
            events = list(engine.stream(forced(FORCED, sampling, PROMPT, max_tokens=4)))
            (accepted,) = (event for event in events if isinstance(event, AcceptedEvent))
            assert (accepted.num_cached_tokens > 0) == (turn > 0)
            assert [event.token_id for event in events if isinstance(event, TokenEvent)] == expected


def test_penalties_in_a_batch_belong_to_their_request(flat: Path) -> None:
    with Engine(flat, cpu(max_slots=4, block_size=16, prefill_chunk=7)) as engine:
        expected = {}
        for number in range(12):
            sampling, tokens = ((FREQUENCY, BY_FREQUENCY), (REPETITION, BY_REPETITION), (SamplingParams(), [40] * 4))[
                number % 3
            ]
            prompt = [*PROMPT, *range(200, 200 + number)]
            expected[engine.submit(forced(FORCED, sampling, prompt, max_tokens=4))] = tokens
        found: dict[int, list[int]] = {number: [] for number in expected}
        live = len(expected)
        while live:
            for event in engine.take_events(timeout_s=60):
                if isinstance(event, TokenEvent):
                    found[event.request_id].append(event.token_id)
                if isinstance(event, FinishedEvent):
                    assert event.status == Status.OK
                    live -= 1
        assert found == expected


def test_penalties_are_the_same_after_a_preemption(flat: Path) -> None:
    with Engine(flat, cpu()) as engine:
        block = engine.info.plan.kv_bytes_per_token * 16
    sampling = SamplingParams(frequency_penalty=0.25, presence_penalty=0.5, repetition_penalty=1.1)
    logits = {token: 5.0 - 0.05 * (token - 40) for token in range(40, 60)}
    requests = [forced(logits, sampling, [*PROMPT[:20], 200 + number], max_tokens=40) for number in range(4)]
    with Engine(flat, cpu(max_slots=1, block_size=16)) as engine:
        alone = [tokens_of(engine, request) for request in requests]
    num_preemptions = 0
    for num_blocks in range(5, 13):
        with Engine(flat, cpu(max_slots=4, block_size=16, kv_memory=num_blocks * block)) as engine:
            order = {engine.submit(request): number for number, request in enumerate(requests)}
            found: list[list[int]] = [[] for _ in requests]
            live = len(order)
            while live:
                for event in engine.take_events(timeout_s=60):
                    if isinstance(event, TokenEvent):
                        found[order[event.request_id]].append(event.token_id)
                    live -= isinstance(event, FinishedEvent)
            assert found == alone, num_blocks
            num_preemptions += engine.stats().num_preemptions
    assert num_preemptions > 0


def test_a_negative_logit_is_multiplied(flat: Path) -> None:
    # All below zero: divided, 40 would rise to -3.8 and be chosen; multiplied it falls to -6.5.
    with Engine(flat, cpu()) as engine:
        rows = engine.model.info.vocab_size
        logits = dict.fromkeys(range(rows), -50.0) | {40: -5.0, 41: -6.0}
        assert tokens_of(engine, forced(logits, SamplingParams(), PROMPT)) == [40]
        assert tokens_of(engine, forced(logits, REPETITION, PROMPT)) == [41]


def test_a_slot_counts_as_a_request_does(flat: Path) -> None:
    with Engine(flat, cpu(block_size=16)) as engine:
        for sampling, expected in ((FREQUENCY, BY_FREQUENCY), (REPETITION, BY_REPETITION)):
            slot = engine.acquire()
            engine.prefill(slot, PROMPT)
            found: list[int] = []
            request = Request(sampling=sampling, max_tokens=4, ignore_eos=True, logit_bias=FORCED)
            (call,) = engine.submit_decode_batch([(slot, request)], private=True)
            while True:
                events = engine.take_events(call, timeout_s=60)
                found += [event.token_id for event in events if isinstance(event, TokenEvent)]
                if any(isinstance(event, FinishedEvent) for event in events):
                    break
            assert found == expected
            engine.release(slot)
