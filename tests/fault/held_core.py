"""An engine whose events a test can watch and hold back: what has happened in it is not known outside until then.

That forces, without any waiting by the clock, the races between an end that comes from inside (a last token) and one
that comes from outside (a cancel, a deadline, a lost connection, the end of a lease).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cyengine.types import Event
from xllm_service.app import Server

Hold = Callable[[Event], bool]


class HeldCore:
    """Everything of an engine, with its events in between.

    Attributes:
        seen: every event in the order in which the engine told it; None: they are not kept.
        newest_id: the highest request id of any event.
        hold: events for which it holds are kept back, and what follows them of the same request.
    """

    def __init__(self, core: Any) -> None:
        self.seen: list[Event] | None = None
        self.newest_id = 0
        self.hold: Hold = lambda _event: False
        self._core = core
        self._held: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        """Whatever is not about events is the engine's own."""
        return getattr(self._core, name)

    def take_events(self) -> list[Event]:
        """Take what has happened, but for what is held."""
        new = self._core.take_events()
        if self.seen is not None:
            self.seen += new
        self.newest_id = max((self.newest_id, *(event.request_id for event in new)))
        out: list[Event] = []
        before, self._held = self._held, []
        held_ids: set[int] = set()
        for event in (*before, *new):
            if event.request_id in held_ids or self.hold(event):
                held_ids.add(event.request_id)
                self._held.append(event)
            else:
                out.append(event)
        return out

    @property
    def num_held(self) -> int:
        """Events that are kept back now."""
        return len(self._held)

    def release(self, server: Server) -> None:
        """Let everything through, in this turn of the event loop."""
        self.hold = lambda _event: False
        asyncio.get_running_loop().call_soon(server.served.get("").engine._dispatch)
