"""Masks of constrained requests: computed in threads beside the step loop, and pushed into the core.

The event loop only says which token a request has got. One thread takes what has come since it last looked, lets a few
workers compute the masks of several requests at once (llguidance holds no GIL meanwhile), and pushes them together, so
that their rows share a step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cyengine.errors import XllmError
from cyengine.types import FinishedEvent, FinishReason, Status, TokenMask
from xllm_service.constraints import Constrained
from xllm_service.engine.core import CoreEngine
from xllm_service.engine.model import Model
from xllm_service.errors import Reason, ServiceError

_MAX_WORKERS = 4
_MIN_FOR_WORKERS = 12  # fewer masks, of some 50 µs each, are computed before workers would have woken up


class ConstraintComplete(FinishedEvent):
    """The end of a request whose constraint is satisfied and allows no further token."""


def end_of(row: Constrained, event: FinishedEvent) -> FinishedEvent | ServiceError:
    """Return how a request ends whose cancel was asked for here; any other end is left as it is."""
    if event.status is not Status.CANCELLED or not (row.is_complete or row.error):
        return event
    if row.error:
        return ServiceError(Reason.INVALID_CONSTRAINT, f"the output cannot go on: {row.error}", field=row.field)
    values = {name: getattr(event, name) for name in FinishedEvent.__dataclass_fields__}
    return ConstraintComplete(**{**values, "status": Status.OK, "finish_reason": FinishReason.NONE, "message": ""})


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A mask to be computed: of a request's token `index`, after it has got `token_id`."""

    request_id: int
    row: Constrained
    index: int
    token_id: int | None


@dataclass
class MaskWorker:
    """Computes masks for one engine, until `close`. Threads start with the first use.

    Args:
        core: whose requests they are.
        model: whose tokens.
    """

    core: CoreEngine
    model: Model
    _inbox: queue.SimpleQueue[list[_Wanted] | None] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None
    _pool: ThreadPoolExecutor | None = None

    def begin(self, requests: Sequence[tuple[int, Constrained]]) -> None:
        """Compute the first masks of requests."""
        self._put([_Wanted(request_id, row, 0, None) for request_id, row in requests])

    def advance(self, tokens: Sequence[tuple[int, Constrained, int, int]]) -> None:
        """Compute the next masks, of (request, row, index of the mask, token that came before it)."""
        self._put([_Wanted(request_id, row, index, token_id) for request_id, row, index, token_id in tokens])

    def close(self) -> None:
        """End the threads; what has not been computed is not needed any more."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _put(self, wanted: list[_Wanted]) -> None:
        if not wanted:
            return
        if self._thread is None:
            self._pool = ThreadPoolExecutor(_MAX_WORKERS, thread_name_prefix="xllm-mask")
            self._thread = threading.Thread(target=self._work, name="xllm-masks", daemon=True)
            self._thread.start()
        self._inbox.put(wanted)

    def _work(self) -> None:
        while (batch := self._inbox.get()) is not None:
            while not self._inbox.empty():
                more = self._inbox.get()
                if more is None:
                    return
                batch = batch + more
            self._push(batch)

    def _push(self, batch: list[_Wanted]) -> None:
        if len(batch) < _MIN_FOR_WORKERS or self._pool is None:
            masks = [self._compute(wanted) for wanted in batch]
        else:
            shares = [batch[first::_MAX_WORKERS] for first in range(_MAX_WORKERS)]
            done = list(self._pool.map(lambda share: [self._compute(wanted) for wanted in share], shares))
            masks = [done[place % _MAX_WORKERS][place // _MAX_WORKERS] for place in range(len(batch))]
        ready = [
            TokenMask(wanted.request_id, wanted.index, words)
            for wanted, words in zip(batch, masks, strict=True)
            if words
        ]
        try:
            self.core.push_masks(ready)
        except Exception as error:  # none of them has come: as in _compute
            for wanted in batch:
                wanted.row.error = wanted.row.error or type(error).__name__
        with contextlib.suppress(XllmError):  # the engine has failed, and says so itself
            for wanted in batch:
                if wanted.row.is_complete or wanted.row.error:
                    self.core.cancel(wanted.request_id)

    def _compute(self, wanted: _Wanted) -> bytes:
        """Return a mask; empty where the request is over instead."""
        row = wanted.row
        try:
            if wanted.token_id is not None:
                row.advance(wanted.token_id, self.model.piece(wanted.token_id))
            if row.free_until:
                return self.model.free_mask
            row.is_complete = row.matcher.is_complete
            words = b"" if row.is_complete or row.matcher.error else row.matcher.mask()
            row.error = row.matcher.error
        except Exception as error:  # a request must never wait for a mask that nobody computes
            row.error = f"{type(error).__name__}"
            return b""
        return words[: self.model.mask_bytes]
