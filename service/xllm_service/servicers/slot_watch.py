"""Who watches slots: one look at all of them serves every watcher."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from xllm_service.engine import SlotInfo
from xllm_service.servicers.ownership import slot_name
from xllm_service.servicers.roster import Hosted
from xllm_service.servicers.served import Served

_LOOK_S = 0.05  # between two looks


@dataclass(frozen=True, slots=True)
class _Seen:
    """A slot as it was found when it last differed from before.

    Attributes:
        version: of all that is seen, when this was new.
        facts: what makes it another than it was: all but times that are told anew with each look.
    """

    version: int
    hosted: Hosted
    info: SlotInfo
    facts: Any


class SlotWatch:
    """Looks at the slots of every engine while somebody watches, and wakes the watchers when something has changed."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._seen: dict[str, _Seen] = {}
        self._version = 0
        self._state: Any = None
        self._news = asyncio.Event()
        self._num_watchers = 0
        self._task: asyncio.Task[None] | None = None

    async def changes(self, model: str) -> AsyncGenerator[list[tuple[Hosted, SlotInfo]], None]:
        """Yield all slots of an engine, or of all for "", and from then on those that have changed.

        Raises DRAINING, and what `Served.get` raises once the engine has ended.
        """
        self._num_watchers += 1
        try:
            self._look()
            if self._task is None:
                self._task = asyncio.create_task(self._keep_looking(), name="xllm-watch-slots")
            told = 0
            while True:
                if model:
                    self._served.get(model)
                news = self._news
                changed = [
                    (seen.hosted, seen.info)
                    for seen in sorted(self._seen.values(), key=lambda one: (one.hosted.name, one.info.slot))
                    if seen.version > told and model in ("", seen.hosted.name)
                ]
                told = self._version
                if changed:
                    yield changed
                self._served.refuse_when_draining()
                if self._task.done():
                    self._task.result()
                await news.wait()
        finally:
            self._num_watchers -= 1
            if not self._num_watchers and self._task is not None:
                self._task.cancel()
                self._task = None
                self._seen.clear()

    async def _keep_looking(self) -> None:
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                self._look()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._tell()

    def _look(self) -> None:
        """Find what has changed since the last look."""
        found: dict[str, tuple[Hosted, SlotInfo, Any]] = {}
        for hosted in self._served.roster.loaded():
            for info in hosted.engine.slots():
                found[slot_name(hosted.name, info.slot)] = (hosted, info, _facts(hosted, info))
        version = self._version + 1
        fresh = {
            name: _Seen(version, hosted, info, facts)
            for name, (hosted, info, facts) in found.items()
            if name not in self._seen or self._seen[name].facts != facts
        }
        # A watcher also hears of the end of its engine, and of the server's.
        state = (self._served.is_draining, [(hosted.name, hosted.is_ending) for hosted in self._served.roster])
        if not fresh and state == self._state and len(found) == len(self._seen):
            return
        self._state = state
        self._seen = {name: seen for name, seen in self._seen.items() if name in found} | fresh
        self._version = version
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _facts(hosted: Hosted, info: SlotInfo) -> Any:
    is_stalled = info.request_id is not None and hosted.engine.is_stalled(info.request_id)
    rest = dataclasses.replace(info, lease_left_s=0.0, owned_s=0.0)
    return hosted, rest, is_stalled, hosted.owners.get(info.slot), hosted.seats.get(info.slot)
