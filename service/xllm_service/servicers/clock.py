"""When what happened in one call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """The times of one call, on the monotonic clock; None: not yet.

    Attributes:
        arrival: when the call came.
        submitted: when the engine got it.
        accepted: when it had its place in the batch.
        first_token: when its first token was there.
        last_delta: when its last tokens were there.
        blocked_s: how long its events have waited for a client that did not read.
    """

    arrival: float
    submitted: float | None = None
    accepted: float | None = None
    first_token: float | None = None
    last_delta: float | None = None
    blocked_s: float = 0.0

    @property
    def queue_s(self) -> float:
        """From arrival to a place in the batch; 0 while there is none."""
        return 0.0 if self.accepted is None else self.accepted - self.arrival
