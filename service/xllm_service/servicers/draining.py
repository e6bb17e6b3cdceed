"""How a server stops taking work: by a signal or by the Drain call, the same way."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from xllm_service import logs
from xllm_service.admission import Gate, LiveGenerations, Phase
from xllm_service.errors import Reason, ServiceError

_POLL_S = 0.02

_log = logs.get_logger("drain")


class Draining:
    """Refuses new work, gives what runs some time, and ends the rest.

    Attributes:
        begun: set once it was asked for, by whomever; who runs the server stops it then.
        on_begin: called when it begins; the health answers change.
    """

    def __init__(self, gate: Gate, generations: LiveGenerations, grace_s: float) -> None:
        self.begun = asyncio.Event()
        self.on_begin: Callable[[], object] = lambda: None
        self._gate = gate
        self._generations = generations
        self._grace_s = grace_s
        self._end_at = math.inf

    def begin(self, grace_s: float | None = None) -> None:
        """Take no new work from now on; None: the server's own grace. Again: it may end sooner, never later."""
        grace_s = self._grace_s if grace_s is None else grace_s
        self._end_at = min(self._end_at, time.monotonic() + grace_s)
        self._gate.phase = Phase.DRAINING
        if not self.begun.is_set():
            self.begun.set()
            self.on_begin()

    @property
    def is_over(self) -> bool:
        """Nothing runs any more, or its time is over."""
        # note: a call that got past the gate before it closed is counted, though it may not be a generation yet.
        return self._gate.num_work == 0 or time.monotonic() >= self._end_at

    async def wait(self) -> None:
        """Wait until nothing runs; what still does when the time is over ends with UNAVAILABLE."""
        last = -1
        while not self.is_over:
            left = self._gate.num_work
            if left != last:
                _log.info("draining", extra=logs.facts(open_calls=left, generations=len(self._generations)))
            last = left
            await asyncio.sleep(min(_POLL_S, max(0.0, self._end_at - time.monotonic())))
        self._generations.end_all(ServiceError(Reason.DRAINING, "the server stops; the time to finish is over"))
