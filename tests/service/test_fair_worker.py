"""One thread for several owners: turns, bounds, and work that nobody wants any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from tests.service.conftest import eventually
from xllm_service.fair_worker import FairWorker, TooManyWaitingError


class Held:
    """A worker that is busy until a test lets it go on, and notes in what order it did its work."""

    def __init__(self) -> None:
        self.worker = FairWorker("test", max_waiting=4)
        self.order: list[str] = []
        self.go_on = threading.Event()
        self.is_busy = threading.Event()

    def _hold(self) -> None:
        self.is_busy.set()
        assert self.go_on.wait(30)

    async def start(self) -> None:
        self.first = asyncio.create_task(self.worker.run("first", "held", self._hold))
        await eventually(self.is_busy.is_set)

    def note(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.order.append(name)
            return name

        return work

    def ask(self, owner: str, key: str) -> asyncio.Task[str]:
        return asyncio.create_task(self.worker.run(owner, key, self.note(owner + key)))


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    held = Held()
    await held.start()
    yield held
    held.go_on.set()
    await held.first
    await asyncio.to_thread(held.worker.close)


async def test_owners_take_turns_and_each_ones_work_is_done_in_its_order(held: Held) -> None:
    tasks = [held.ask("a", key) for key in "1234"] + [held.ask("b", "1")] + [held.ask("c", key) for key in "12"]
    await asyncio.sleep(0)
    held.go_on.set()
    assert await asyncio.gather(*tasks) == ["a1", "a2", "a3", "a4", "b1", "c1", "c2"]
    assert held.order == ["a1", "b1", "c1", "a2", "c2", "a3", "a4"]


async def test_one_who_has_too_much_waiting_is_refused_and_others_are_not(held: Held) -> None:
    tasks = [held.ask("a", key) for key in "1234"]
    await asyncio.sleep(0)
    with pytest.raises(TooManyWaitingError):
        await held.ask("a", "5")
    other = held.ask("b", "1")
    await asyncio.sleep(0)
    held.go_on.set()
    await asyncio.gather(*tasks, other)
    assert held.order == ["a1", "b1", "a2", "a3", "a4"]


async def test_what_nobody_waits_for_any_more_is_not_done_and_takes_no_place(held: Held) -> None:
    gone = [held.ask("a", key) for key in "1234"]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    stays = [held.ask("a", key) for key in "5678"]
    await asyncio.sleep(0)
    held.go_on.set()
    await asyncio.gather(*stays)
    assert held.order == ["a5", "a6", "a7", "a8"]


async def test_the_same_work_is_done_once_for_all_who_wait_for_it(held: Held) -> None:
    tasks = [held.ask("a", "1") for _ in range(9)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    held.go_on.set()
    assert await asyncio.gather(*tasks[1:]) == ["a1"] * 8
    assert held.order == ["a1"]


async def test_a_failure_is_that_of_its_own_work_alone(held: Held) -> None:
    def fail() -> str:
        raise ValueError("no")

    bad = asyncio.create_task(held.worker.run("a", "bad", fail))
    good = held.ask("a", "1")
    held.go_on.set()
    with pytest.raises(ValueError, match="no"):
        await bad
    assert await good == "a1"


async def test_closing_cancels_what_waits(held: Held) -> None:
    waiting = held.ask("a", "1")
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(held.worker.close))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held.go_on.set()
    await closing
    assert held.order == []
    with pytest.raises(RuntimeError):
        await held.worker.run("a", "1", held.note("late"))
