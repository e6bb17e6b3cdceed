"""An engine that computes nothing: every running request gets a token each `step_s` seconds, whoever looks.

What a server does with tokens can be measured with it at any rate, without the processor time that making them takes.
Tokens are made when they are taken, from a timer that counts the steps that have passed.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cyengine.errors import UnimplementedError
from cyengine.types import (
    AcceptedEvent,
    DecodeMode,
    EngineInfo,
    EngineStats,
    Event,
    FinishedEvent,
    FinishReason,
    KvType,
    Plan,
    Request,
    Slot,
    SlotInfo,
    Status,
    TokenEvent,
    TokenMask,
)

_PLAN = Plan(0, 0, 0, 0, 0, 1 << 20, 0, 0, 0, 0, 0, 16, True)
_PIECES = (" the", " of", "ing", " a", "\n", " model", ".", " sequence")
_CLOCK_MONOTONIC = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Live:
    slot: int
    max_tokens: int
    num_prompt: int
    num_tokens: int = 0


class TokenSource:
    """Has the surface of cyengine.Engine that the service uses for plain generations.

    Args:
        max_slots: requests at a time.
        step_s: between two tokens of a request.
    """

    def __init__(self, max_slots: int, step_s: float) -> None:
        self.event_fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.event_fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._step_ns = round(1e9 * step_s)
        self._live: dict[int, _Live] = {}
        self._new: list[Event] = []
        self._num_requests = 0
        self._num_steps = 0
        self._free = list(range(max_slots))
        self.info = EngineInfo(
            "cpu", "none", "none", 1, "computes nothing", DecodeMode.BATCHED, KvType.F16, max_slots, 1 << 16, 512, 16,
            1024, _PLAN, 0.0,
        )  # fmt: skip

    def submit(self, request: Request) -> int:
        """Begin a request; its first token comes with the next step."""
        self._num_requests += 1
        number, num_prompt = self._num_requests, len(request.prompt)
        self._live[number] = _Live(self._free.pop(), request.max_tokens, num_prompt)
        slot = self._live[number].slot
        self._new.append(
            AcceptedEvent(number, slot, number, DecodeMode.BATCHED, 0, request.max_tokens, num_prompt, 0, 0.0)
        )
        if len(self._live) == 1:
            self._arm(self._step_ns)
        return number

    def submit_outputs(self, request: Request, num_outputs: int) -> list[int]:
        """Begin several."""
        return [self.submit(request) for _ in range(num_outputs)]

    def cancel(self, request_id: int) -> None:
        """End a request."""
        if request_id in self._live:
            self._new.append(self._end(request_id, Status.CANCELLED))

    def take_events(self) -> list[Event]:
        """Take the tokens of the steps that have passed."""
        try:
            (num_steps,) = struct.unpack("Q", os.read(self.event_fd, 8))
        except BlockingIOError:
            num_steps = 0
        events, self._new = self._new, []
        for _ in range(num_steps):
            self._num_steps += 1
            for number in list(self._live):
                live = self._live[number]
                piece = _PIECES[live.num_tokens % len(_PIECES)]
                events.append(TokenEvent(number, 100, live.num_tokens, piece.encode(), piece, 0.0, []))
                live.num_tokens += 1
                if live.num_tokens == live.max_tokens:
                    events.append(self._end(number, Status.OK))
        return events

    def stats(self) -> EngineStats:
        """A snapshot."""
        used, slots = len(self._live), self.info.max_slots
        return EngineStats(
            used, 0, slots, used, 1 << 20, used, 0, self._num_steps, 0, 0, 0, 0, 0, 0, 0, self._step_ns / 1e9, 0.0, 0,
            0, False, False,
        )  # fmt: skip

    def close(self) -> None:
        """Give the timer back."""
        os.close(self.event_fd)

    def drain(self) -> None:
        """Nothing: what runs goes on."""

    def slots(self) -> list[SlotInfo]:
        """No slot can be looked at."""
        return []

    def slot(self, index: int) -> SlotInfo:
        """Refused."""
        raise _refusal()

    def acquire(
        self, decode_mode: DecodeMode = DecodeMode.AUTO, *, lease_s: float = 60.0, slot: int | None = None
    ) -> Slot:
        """Refused."""
        raise _refusal()

    def renew(self, slot: Slot, lease_s: float = 60.0) -> SlotInfo:
        """Refused."""
        raise _refusal()

    def release(self, slot: Slot) -> SlotInfo:
        """Refused."""
        raise _refusal()

    def fork(self, slot: Slot, lease_s: float = 60.0) -> Slot:
        """Refused."""
        raise _refusal()

    def count_cached(
        self,
        token_ids: Sequence[int],
        *,
        decode_mode: DecodeMode = DecodeMode.AUTO,
        cache_salt: bytes = b"",
        bypass_cache: bool = False,
    ) -> int:
        """Nothing is cached."""
        return 0

    def submit_prefill(
        self,
        slot: Slot,
        token_ids: Sequence[int],
        *,
        max_duration_s: float = 0.0,
        cache_salt: bytes = b"",
        bypass_cache: bool = False,
    ) -> int:
        """Refused."""
        raise _refusal()

    def submit_decode_slot(self, slot: Slot, request: Request) -> int:
        """Refused."""
        raise _refusal()

    def submit_decode_batch(self, entries: Sequence[tuple[Slot, Request]]) -> list[int]:
        """Refused."""
        raise _refusal()

    def push_masks(self, masks: Iterable[TokenMask]) -> None:
        """Refused."""
        raise _refusal()

    def _end(self, number: int, status: Status) -> FinishedEvent:
        live = self._live.pop(number)
        self._free.append(live.slot)
        if not self._live:
            self._arm(0)
        reason = FinishReason.MAX_TOKENS if status is Status.OK else FinishReason.NONE
        return FinishedEvent(
            number, status, reason, None, None, "", "", live.num_prompt, 0, live.num_tokens, 0.0, 0.0, 1.0, 0.001
        )

    def _arm(self, period_ns: int) -> None:
        seconds, nanoseconds = divmod(period_ns, 1_000_000_000)
        times = (ctypes.c_long * 4)(seconds, nanoseconds, seconds, nanoseconds)
        _libc.timerfd_settime(self.event_fd, 0, ctypes.byref(times), None)


def _refusal() -> Exception:
    return UnimplementedError("it computes nothing: only plain generations run on it")
