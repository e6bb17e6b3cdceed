"""When a refused call is tried again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from xllm_client.errors import ResourceExhaustedError, UnavailableError, XllmError


@dataclass(frozen=True)
class RetryPolicy:
    """Tries a call again when the server refused it and said when to come back (google.rpc.RetryInfo).

    That is the only safe case: such a refusal comes before a generation is accepted, so nothing ran and nothing is
    generated twice. A broken connection is not retried, because the server may have begun.

    Attributes:
        max_attempts: Calls in all, the first one included; 1 never retries.
        backoff_s: Least wait before the second attempt; doubles with each further one. The server's delay is a floor
            besides it.
        max_delay_s: A longer wait than this is not made: the refusal is raised instead.
    """

    max_attempts: int = 4
    backoff_s: float = 0.1
    max_delay_s: float = 30.0

    def delay_s(self, failure: XllmError, attempt: int, time_left_s: float | None) -> float | None:
        """Return the seconds to wait after `failure` of the attempt numbered from 1, or None to give up.

        `time_left_s` is what the caller's timeout leaves; a wait that would use it up is not begun. Up to a tenth is
        added at random, so that clients refused together do not return together.
        """
        retryable = isinstance(failure, UnavailableError | ResourceExhaustedError)
        if not retryable or failure.retry_delay_s is None or attempt >= self.max_attempts:
            return None
        delay = max(failure.retry_delay_s, self.backoff_s * 2.0 ** (attempt - 1))
        delay *= 1.0 + 0.1 * random.random()
        if delay > self.max_delay_s or (time_left_s is not None and delay >= time_left_s):
            return None
        return delay


NO_RETRY = RetryPolicy(max_attempts=1)


def time_left(deadline: float | None) -> float | None:
    """Return the seconds until a time.monotonic() deadline, at least 0; None without one."""
    return max(0.0, deadline - time.monotonic()) if deadline is not None else None
