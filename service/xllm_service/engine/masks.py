"""Masks of constrained requests: computed in threads beside the step loop, and pushed into the core.

The event loop only says which token a request has got. One thread takes what has come since it last looked, has the
masks of several requests computed at once (without the GIL), and pushes them together, so that their rows share a step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from cyengine.errors import XllmError
from cyengine.types import FinishedEvent, FinishReason, Status, TokenMask
from xllm_service.constraints import Constrained, MaskMaker
from xllm_service.engine.core import CoreEngine
from xllm_service.engine.model import Model
from xllm_service.errors import Reason, ServiceError


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
        num_threads: that compute at once. Where the engine computes on all cores, more than one takes from it what
            they save.
    """

    core: CoreEngine
    model: Model
    num_threads: int = 1
    _inbox: queue.SimpleQueue[list[_Wanted] | None] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        """Have constraints compiled for them."""
        self.model.expect_mask_threads(self.num_threads)

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

    def _put(self, wanted: list[_Wanted]) -> None:
        if not wanted:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="xllm-masks", daemon=True)
            self._thread.start()
        self._inbox.put(wanted)

    def _work(self) -> None:
        maker = MaskMaker(self.num_threads, self.model.mask_bytes)
        while (batch := self._inbox.get()) is not None:
            while not self._inbox.empty():
                more = self._inbox.get()
                if more is None:
                    return
                batch = batch + more
            self._push(batch, maker)

    def _push(self, batch: list[_Wanted], maker: MaskMaker) -> None:
        try:
            self.core.push_masks(self._make(batch, maker))
        # note: what llguidance itself has done wrong, a panic of its, is no Exception.
        except BaseException as error:  # none of them has come, and no request may wait for ever
            for wanted in batch:
                wanted.row.error = wanted.row.error or type(error).__name__
        with contextlib.suppress(XllmError):  # the engine has failed, and says so itself
            for wanted in batch:
                if wanted.row.is_complete or wanted.row.error:
                    self.core.cancel(wanted.request_id)

    def _make(self, batch: list[_Wanted], maker: MaskMaker) -> list[TokenMask]:
        goes_on = [wanted for wanted in batch if self._advance(wanted)]
        held = [wanted for wanted in goes_on if not wanted.row.free_until]
        masks = maker.masks([wanted.row.matcher for wanted in held])
        ready = [
            TokenMask(wanted.request_id, wanted.index, self.model.free_mask)
            for wanted in goes_on
            if wanted.row.free_until
        ]
        for wanted, words in zip(held, masks, strict=True):
            wanted.row.error = wanted.row.matcher.error
            if words:
                ready.append(TokenMask(wanted.request_id, wanted.index, words))
        return ready

    def _advance(self, wanted: _Wanted) -> bool:
        """Tell a row which token it has got; False where it is over."""
        row = wanted.row
        try:
            if wanted.token_id is not None:
                row.advance(wanted.token_id, self.model.piece(wanted.token_id))
            if row.free_until:
                return True
            row.is_complete, row.error = row.matcher.is_complete, row.matcher.error
        except BaseException as error:  # a request must never wait for a mask that nobody computes
            row.error = type(error).__name__
        return not (row.is_complete or row.error)
