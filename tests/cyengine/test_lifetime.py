"""Objects free what they hold: half built, closed twice, closed under a running call, or never closed."""

import gc
import pathlib
import select
import threading
import weakref

import pytest

from cyengine import (
    AcceptedEvent,
    Engine,
    EngineConfig,
    Event,
    FinishedEvent,
    Model,
    Request,
    Status,
    TokenEvent,
    errors,
)
from cyengine.types import Backend

CPU = EngineConfig(backend=Backend.CPU, num_threads=1)
ENDLESS = Request(prompt=[1, 2, 3], ignore_eos=True)


def wait_until_idle(engine: Engine) -> None:
    done = threading.Event()
    for _ in range(1000):
        stats = engine.stats()
        if stats.slots_used == 0 and stats.blocks_used == 0 and stats.num_waiting == 0:
            return
        done.wait(0.01)
    pytest.fail(f"slots or blocks never came back: {engine.stats()}")


def test_close_is_idempotent_and_later_calls_say_so(tiny_model: pathlib.Path) -> None:
    engine = Engine(tiny_model, CPU)
    engine.close()
    engine.close()
    with pytest.raises(errors.EngineFailedError, match="closed"):
        engine.stats()
    model = Model(tiny_model)
    model.close()
    model.close()
    with pytest.raises(errors.NotFoundError, match="closed"):
        model.encode("x")


def test_half_built_objects_are_freed(tiny_model: pathlib.Path) -> None:
    for _ in range(50):
        with pytest.raises(errors.XllmError):
            Engine(tiny_model, EngineConfig(backend=Backend.CPU, max_seq_len=10**9))
        with pytest.raises(TypeError):
            Engine()  # type: ignore[call-arg]
    blank = Engine.__new__(Engine)
    with pytest.raises(errors.EngineFailedError):
        blank.stats()
    del blank
    gc.collect()


def test_an_engine_outlives_its_model(tiny_model: pathlib.Path) -> None:
    model = Model(tiny_model)
    engine = Engine(model, CPU)
    expected = [e.token_id for e in engine.stream(Request(prompt=[5, 6], max_tokens=8)) if isinstance(e, TokenEvent)]
    model.close()
    again = [e.token_id for e in engine.stream(Request(prompt=[5, 6], max_tokens=8)) if isinstance(e, TokenEvent)]
    assert again == expected
    engine.close()


def test_closing_the_iterator_gives_slot_and_blocks_back(engine: Engine) -> None:
    stream = engine.stream(ENDLESS)
    assert isinstance(next(stream), AcceptedEvent)
    stream.close()  # type: ignore[attr-defined]
    wait_until_idle(engine)
    assert engine.stats().cancel_steps_max <= 1


def test_dropping_the_iterator_gives_slot_and_blocks_back(engine: Engine) -> None:
    stream = engine.stream(ENDLESS)
    next(stream)
    del stream
    gc.collect()
    wait_until_idle(engine)


@pytest.mark.parametrize("way", ["drop", "close"])
def test_an_iterator_that_was_never_begun_gives_its_slot_back(engine: Engine, way: str) -> None:
    stream = engine.stream(ENDLESS)
    if way == "close":
        stream.close()  # type: ignore[attr-defined]
    del stream
    gc.collect()
    wait_until_idle(engine)


def test_close_ends_calls_that_wait(tiny_model: pathlib.Path) -> None:
    engine = Engine(tiny_model, CPU)
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            engine.take_events(0, -1.0)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(outcome[0], errors.EngineFailedError)


def test_an_engine_with_live_requests_can_be_dropped(tiny_model: pathlib.Path) -> None:
    class Watched(Engine):
        __slots__ = ("__weakref__",)

    engine = Watched(tiny_model, CPU)
    engine.submit(ENDLESS)
    seen = weakref.ref(engine)
    del engine
    gc.collect()
    assert seen() is None


def test_waiting_for_events_releases_the_gil(engine: Engine) -> None:
    # Two threads wait without limit while a third makes what they wait for: with the GIL held nobody would get on.
    results: list[int] = []

    def consume() -> None:
        request = Request(prompt=[7], max_tokens=16, ignore_eos=True)
        ends = [event for event in engine.stream(request) if isinstance(event, FinishedEvent)]
        results.extend(end.num_generated_tokens for end in ends)

    threads = [threading.Thread(target=consume) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [16] * 8


def test_the_descriptor_is_readable_while_shared_events_wait(engine: Engine) -> None:
    assert select.select([engine.event_fd], [], [], 0)[0] == []
    request_id = engine.submit(Request(prompt=[1], max_tokens=1))
    assert select.select([engine.event_fd], [], [], 10)[0] == [engine.event_fd]
    events: list[Event] = []
    while not events or not isinstance(events[-1], FinishedEvent):
        events += engine.take_events(0, 10.0)
    assert {event.request_id for event in events} == {request_id}
    assert events[-1].status is Status.OK
    assert select.select([engine.event_fd], [], [], 0)[0] == []


def test_private_events_are_taken_by_their_id_alone(engine: Engine) -> None:
    request_id = engine.submit(Request(prompt=[1], max_tokens=4), private=True)
    while not isinstance(engine.take_events(request_id, 10.0)[-1], FinishedEvent):
        pass
    assert engine.take_events(0, 0.0) == []
    with pytest.raises(errors.NotFoundError):
        engine.take_events(request_id, 0.0)
