"""Constraints compiled for one model, by turns of those who ask for it, and kept for those who ask again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from xllm_service.constraints import CompiledConstraint, Constraint, Matcher
from xllm_service.errors import Reason, ServiceError
from xllm_service.fair_worker import FairWorker, TooManyWaitingError
from xllm_service.owned_store import OwnedStore

MAX_WAITING = 64  # constraints of one principal that may wait for their turn
# Of one principal, and of all. A matcher of an ordinary schema takes some 50 kB, one of a text made for it up to 1.5 MB
# for each kB of the text: longer ones are compiled again each time.
_MAX_KEPT = 16
_MAX_KEPT_OF_ALL = 64
_MAX_KEPT_BYTES = 4096


class Compilations:
    """Compiles one constraint at a time; principals take turns, so that one with costly ones delays none but himself.

    What was compiled is kept for its principal alone: how fast an answer comes tells nobody what others have sent.
    Failures are not kept, as some of them are the machine's.

    Args:
        compile_one: compiles one, in the worker's thread.

    Attributes:
        num_copies: that are made of one, the next with each call that asks for it again, so that outputs of several
            calls can be worked on at the same time.
    """

    def __init__(self, compile_one: Callable[[Constraint], CompiledConstraint]) -> None:
        self.num_copies = 1
        self._compile_one = compile_one
        self._worker = FairWorker("xllm-constraint", MAX_WAITING)
        self._kept: OwnedStore[Constraint, CompiledConstraint] = OwnedStore(_MAX_KEPT, _MAX_KEPT_OF_ALL)
        self._lock = threading.Lock()  # of what is kept

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, owner: str, constraint: Constraint) -> Matcher:
        """Return a matcher of the caller's own, at its beginning.

        Cancelled while it waits, nothing is compiled. Raises what `compile_one` raises, and QUEUE_FULL.
        """
        if (matcher := self._find(owner, constraint)) is not None:
            return matcher
        try:
            made = await self._worker.run(owner, constraint, lambda: self._make(owner, constraint))
        except TooManyWaitingError:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{MAX_WAITING} constraints of yours wait to be compiled already; retry later",
                metadata={"queue_limit": MAX_WAITING},
            ) from None
        with self._lock:
            return made.start()  # others may have waited for the same one

    def close(self) -> None:
        """End the thread after what it does now; what waits is cancelled."""
        self._worker.close()

    def _find(self, owner: str, constraint: Constraint) -> Matcher | None:
        with self._lock:
            kept = self._kept.get(owner, constraint)
            if kept is None or kept.num_copies < self.num_copies:
                return None
            self._kept.touch(owner, constraint)
            return kept.start()

    def _make(self, owner: str, constraint: Constraint) -> CompiledConstraint:
        with self._lock:
            compiled = self._kept.get(owner, constraint)
        if compiled is not None:
            compiled.add_copy()
        else:
            compiled = self._compile_one(constraint)
        if constraint.size_bytes <= _MAX_KEPT_BYTES:
            with self._lock:
                self._kept.put(owner, constraint, compiled)
        return compiled
