"""Masks of constrained requests through Python: the buffers they come in, the tokens they leave, and who waits."""

import pathlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from cyengine import (
    AcceptedEvent,
    Engine,
    EngineConfig,
    FinishedEvent,
    Request,
    SamplingParams,
    Status,
    TokenEvent,
    TokenMask,
    errors,
)
from cyengine.types import Backend

PROMPT = [(7 * i + 3) % 90 for i in range(50)]


@pytest.fixture(params=[Backend.CPU, pytest.param(Backend.CUDA, marks=pytest.mark.gpu)], ids=lambda value: value.name)
def engine(request: pytest.FixtureRequest, tiny_model: pathlib.Path) -> Iterator[Engine]:
    with Engine(tiny_model, EngineConfig(backend=request.param, num_threads=1, kv_memory=4 << 20)) as made:
        yield made


def words_of(engine: Engine, ids: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    words = np.zeros((engine.model.info.vocab_size + 31) // 32, dtype=np.uint32)
    for token_id in ids:
        words[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words.view(np.int32)


def generate(engine: Engine, request: Request, allowed: list[list[int]]) -> tuple[list[TokenEvent], FinishedEvent]:
    request_id = engine.submit(request, private=True)
    tokens: list[TokenEvent] = []
    while True:
        for event in engine.take_events(request_id, -1.0):
            if isinstance(event, FinishedEvent):
                return tokens, event
            if isinstance(event, TokenEvent):
                tokens.append(event)
            if isinstance(event, AcceptedEvent | TokenEvent) and event.wants_mask:
                mask = words_of(engine, allowed[len(tokens)])
                engine.push_masks([TokenMask(request_id, len(tokens), mask.data)])


def test_only_what_the_masks_allow_is_generated(engine: Engine) -> None:
    allowed = [[10 + i, 40 + i, 60] for i in range(12)]
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=3)):
        request = Request(PROMPT, sampling, max_tokens=12, ignore_eos=True, num_logprobs=5, is_constrained=True)
        tokens, finished = generate(engine, request, allowed)
        assert finished.status is Status.OK
        assert len(tokens) == 12
        for event, ids in zip(tokens, allowed, strict=True):
            assert event.token_id in ids
            assert sorted(c.token_id for c in event.candidates) == sorted(ids)
            assert sum(np.exp(c.logprob) for c in event.candidates) == pytest.approx(1, abs=1e-5)


def test_a_mask_of_everything_gives_the_bytes_of_no_mask(engine: Engine) -> None:
    request = Request(PROMPT, SamplingParams(temperature=0.9, seed=5), max_tokens=10, ignore_eos=True)
    free = [event for event in engine.stream(request) if isinstance(event, TokenEvent)]
    constrained = Request(PROMPT, request.sampling, max_tokens=10, ignore_eos=True, is_constrained=True)
    everything = list(range(engine.model.info.vocab_size))
    tokens, _ = generate(engine, constrained, [everything] * 10)
    assert [event.token_id for event in tokens] == [event.token_id for event in free]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_mask_comes_in_any_buffer(engine: Engine, kind: type) -> None:
    request_id = engine.submit(Request(PROMPT, max_tokens=2, is_constrained=True, ignore_eos=True), private=True)
    words = kind(words_of(engine, [17]).tobytes())
    engine.push_masks(TokenMask(request_id, index, words) for index in range(2))
    ids = []
    finished = False
    while not finished:
        for event in engine.take_events(request_id, -1.0):
            if isinstance(event, TokenEvent):
                ids.append(event.token_id)
            finished = isinstance(event, FinishedEvent)
    assert ids == [17, 17]


def test_neighbours_of_a_waiting_request_keep_pace(engine: Engine) -> None:
    waiting = engine.submit(Request(PROMPT, max_tokens=4, is_constrained=True), private=True)
    free = [e for e in engine.stream(Request(PROMPT, max_tokens=8, ignore_eos=True)) if isinstance(e, TokenEvent)]
    assert len(free) == 8
    events = engine.take_events(waiting, -1.0)
    assert isinstance(events[0], AcceptedEvent) and events[0].wants_mask
    assert not any(isinstance(event, TokenEvent) for event in events)
    engine.cancel(waiting)


def test_wrong_masks_are_refused_by_entry_and_none_is_taken(engine: Engine) -> None:
    request_id = engine.submit(Request(PROMPT, max_tokens=1, is_constrained=True, ignore_eos=True), private=True)
    good = TokenMask(request_id, 0, words_of(engine, [5]).tobytes())
    wrong: list[tuple[TokenMask, type[errors.XllmError]]] = [
        (TokenMask(request_id, 0, good.words[:-4]), errors.InvalidArgumentError),
        (TokenMask(request_id, 0, good.words[:-1]), errors.InvalidArgumentError),
        (TokenMask(request_id, 0, b""), errors.InvalidArgumentError),
        (TokenMask(request_id, 1 << 31, good.words), errors.InvalidArgumentError),
        (TokenMask(request_id + 1, 0, good.words), errors.NotFoundError),
    ]
    for mask, expected in wrong:
        with pytest.raises(expected) as caught:
            engine.push_masks([good, mask])
        assert caught.value.details["entry"] == "1"
    with pytest.raises(errors.InvalidArgumentError):
        engine.push_masks([TokenMask(-1, 0, good.words)])
    with pytest.raises((TypeError, BufferError)):
        engine.push_masks([TokenMask(request_id, 0, "text")])  # type: ignore[arg-type]
    assert engine.stats().num_generated_tokens == 0
    engine.push_masks([good])
    engine.push_masks([])
    tokens = [e for e in engine.take_events(request_id, -1.0) if isinstance(e, TokenEvent)]
    while not tokens:
        tokens = [e for e in engine.take_events(request_id, -1.0) if isinstance(e, TokenEvent)]
    assert tokens[0].token_id == 5


def test_masks_from_worker_threads(engine: Engine) -> None:
    requests = [
        engine.submit(Request([*PROMPT, i], max_tokens=6, is_constrained=True, ignore_eos=True), private=True)
        for i in range(6)
    ]
    answers: dict[int, list[int]] = {}

    def serve(request_id: int, token_id: int) -> None:
        ids: list[int] = []
        finished = False
        while not finished:
            for event in engine.take_events(request_id, -1.0):
                finished = isinstance(event, FinishedEvent)
                if isinstance(event, TokenEvent):
                    ids.append(event.token_id)
                if isinstance(event, AcceptedEvent | TokenEvent) and event.wants_mask:
                    engine.push_masks([TokenMask(request_id, len(ids), words_of(engine, [token_id]).tobytes())])
        answers[request_id] = ids

    threads = [threading.Thread(target=serve, args=(r, 20 + i)) for i, r in enumerate(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {r: [20 + i] * 6 for i, r in enumerate(requests)}
