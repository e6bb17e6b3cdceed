"""A thread that works for several owners by turns: whoever has much to do keeps only himself waiting."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")


class TooManyWaitingError(Exception):
    """An owner has as much waiting as he may; what he asked for was not begun."""


@dataclass
class _Task:
    """One piece of work and those who wait for it."""

    work: Callable[[], Any]
    waiting: list[Future[Any]] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        return any(not one.cancelled() for one in self.waiting)


class FairWorker:
    """Does one piece of work at a time, of each owner in turn; an owner's own in the order they came.

    The thread starts with the first use. Methods may be called from any thread.

    Args:
        name: of the thread.
        max_waiting: pieces of work of one owner that may wait besides the one that is being done.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, OrderedDict[Hashable, _Task]] = OrderedDict()  # first: whose turn it is
        self._thread: threading.Thread | None = None
        self._is_closed = False

    async def run(self, owner: str, key: Hashable, work: Callable[[], _T]) -> _T:
        """Do work in the thread and return what it returns, or raise what it raises.

        Cancelled while it waits, it is not done. Work that waits under the same key already is done once for both.

        Raises TooManyWaitingError.
        """
        future: Future[_T] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the worker has been closed")
            queue = self._queues.setdefault(owner, OrderedDict())
            for one in [one for one, task in queue.items() if not task.is_wanted]:
                del queue[one]
            if key not in queue:
                if len(queue) >= self._max_waiting:
                    raise TooManyWaitingError(f"{len(queue)} wait already, which is the limit")
                queue[key] = _Task(work)
            queue[key].waiting.append(future)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread after what it does now; what waits is cancelled."""
        with self._changed:
            self._is_closed = True
            waiting = [one for queue in self._queues.values() for task in queue.values() for one in task.waiting]
            self._queues.clear()
            self._changed.notify()
        for one in waiting:
            one.cancel()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            wanted = [one for one in task.waiting if one.set_running_or_notify_cancel()]
            if not wanted:
                continue
            try:
                result = task.work()
            except BaseException as error:
                for one in wanted:
                    one.set_exception(error)
            else:
                for one in wanted:
                    one.set_result(result)

    def _next(self) -> _Task | None:
        """Wait for the next piece of work, whose owner then goes to the end of the line; None: closed."""
        with self._changed:
            while not self._queues:
                if self._is_closed:
                    return None
                self._changed.wait()
            owner, queue = self._queues.popitem(last=False)
            _, task = queue.popitem(last=False) if queue else (None, _Task(lambda: None))
            if queue:
                self._queues[owner] = queue
            return task
