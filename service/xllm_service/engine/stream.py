"""Events of a call's requests on their way to its reader, and when the call must be over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cyengine.types import AcceptedEvent, Event, FinishedEvent, PrefillEvent, Status, TokenEvent
from xllm_service.errors import Reason, ServiceError
from xllm_service.validation import DecodeChoices


@dataclass(slots=True)
class Progress:
    """What has happened to one request since the last look. With a fast reader, one token; with a slow one, many.

    Attributes:
        index: which of the requests of one call, from 0.
        blocked_s: how long things have waited, in all, while the client did not read.
    """

    index: int = 0
    accepted: AcceptedEvent | None = None
    prefill: PrefillEvent | None = None
    tokens: list[TokenEvent] = field(default_factory=list)
    finished: FinishedEvent | None = None
    blocked_s: float = 0.0


class Stream:
    """Events of one call's requests on their way to its reader: coalesced, never lost, never more than a bound."""

    def __init__(self, request_ids: Sequence[int], on_stall: Callable[[], None] | None) -> None:
        self.waits_since: float | None = None  # when something began to wait for the reader
        self.blocked_s = 0.0  # how long things have waited for a reader that was elsewhere
        self.running = set(request_ids)  # whose end the reader has not seen
        self.failure: ServiceError | None = None
        self.on_stall = on_stall
        self.ended: set[int] = set()  # requests whose last event has come
        self._indices = {request_id: index for index, request_id in enumerate(request_ids)}
        self._pending: dict[int, Progress] = {}
        self._reader: asyncio.Future[None] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that wait for the reader."""
        return sum(len(progress.tokens) for progress in self._pending.values())

    def put_token(self, event: TokenEvent, now: float) -> None:
        """Add a token, at a monotonic time; never waits."""
        self._progress(event.request_id, now).tokens.append(event)

    def put(self, event: Event, now: float) -> None:
        """Add whatever has happened, at a monotonic time; never waits."""
        progress = self._progress(event.request_id, now)
        if isinstance(event, TokenEvent):
            progress.tokens.append(event)
        elif isinstance(event, FinishedEvent):
            progress.finished = event
            self.ended.add(event.request_id)
        elif isinstance(event, PrefillEvent):
            progress.prefill = event
        else:
            progress.accepted = event

    def _progress(self, request_id: int, now: float) -> Progress:
        """Return what the reader will be told next of a request, and let it know that there is something."""
        if self.waits_since is None:
            self.waits_since = now
            self._wake()
        index = self._indices[request_id]
        progress = self._pending.get(index)
        if progress is None:
            progress = self._pending[index] = Progress(index)
        return progress

    def fail(self, failure: ServiceError) -> None:
        """End it; what is already there can still be read."""
        if self.failure is None:
            self.failure = failure
        self._wake()

    async def take(self) -> list[Progress]:
        """Wait for something and take all of it; raises the failure when there is nothing left."""
        if self.waits_since is not None:
            self.blocked_s += time.monotonic() - self.waits_since
        while self.waits_since is None:
            if self.failure is not None:
                raise self.failure
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        taken, self._pending, self.waits_since = self._pending, {}, None
        for progress in taken.values():
            progress.blocked_s = self.blocked_s
            if progress.finished is not None:
                self.running.discard(progress.finished.request_id)
        return [taken[index] for index in sorted(taken)] if len(taken) > 1 else list(taken.values())

    def drop(self, request_id: int) -> None:
        """Forget one of several requests: its reader has heard enough of it."""
        self.running.discard(request_id)
        self._pending.pop(self._indices[request_id], None)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a call must be over, in seconds from its submission; None: no bound.

    Attributes:
        deadline_s: the call's own deadline: reached, it fails.
        duration_s: the longest time that was asked for: reached after it began, an ordinary end.
    """

    deadline_s: float | None = None
    duration_s: float | None = None

    @classmethod
    def of(cls, choices: DecodeChoices, deadline_s: float | None, elapsed_s: float) -> Bounds:
        """Return the bounds of a call that came `elapsed_s` ago and has `deadline_s` left."""
        longest = choices.max_duration_s
        return cls(deadline_s, None if longest is None else longest - elapsed_s)

    def after(self, elapsed_s: float) -> Bounds:
        """Return what is left of them."""
        deadline_s, duration_s = self.deadline_s, self.duration_s
        return Bounds(
            None if deadline_s is None else deadline_s - elapsed_s,
            None if duration_s is None else max(duration_s - elapsed_s, 1e-6),  # an end, not a refusal, by now
        )

    @property
    def seconds(self) -> float:
        """The tighter one, as the core takes it. Raises DEADLINE_EXCEEDED when it has passed."""
        bounds = [bound for bound in (self.deadline_s, self.duration_s) if bound is not None]
        if not bounds:
            return 0.0
        if min(bounds) <= 0:
            raise ServiceError(Reason.DEADLINE_EXCEEDED, "the time allowed was over before anything could begin")
        return min(bounds)

    def is_duration(self, finished: FinishedEvent) -> bool:
        """Whether it ended because of its own longest time, not by the call's deadline."""
        return (
            finished.status is Status.DEADLINE_EXCEEDED
            and self.duration_s is not None
            and (self.deadline_s is None or self.duration_s <= self.deadline_s)
        )
