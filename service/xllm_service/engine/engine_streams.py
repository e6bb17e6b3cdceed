"""A started engine and the streams of its requests, on an event loop.

A reader on the engine's descriptor wakes up once per step and hands each request's events to its own bounded stream.
Where the engine computes on every core there is, each wake-up takes from the next step: there several streams share one
for all the steps of some milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from cyengine.errors import XllmError
from cyengine.types import (
    AcceptedEvent,
    DecodeMode,
    EngineInfo,
    EngineStats,
    Event,
    FinishedEvent,
    SlotInfo,
    TokenEvent,
)
from xllm_service import convert
from xllm_service.constraints import Constrained
from xllm_service.engine.core import CoreEngine
from xllm_service.engine.failures import to_service_error
from xllm_service.engine.masks import MaskWorker, end_of
from xllm_service.engine.model import Model
from xllm_service.engine.stream import Progress, Stream
from xllm_service.errors import Reason, ServiceError
from xllm_service.logs import get_logger
from xllm_service.validation import DecodeChoices

_MAX_BUFFERED_TOKENS = 16384  # of one stream whose client does not read
_NUM_STEP_SAMPLES = 9  # steps that the typical step time is taken from: some five seconds of work
_STALLED_AFTER_S = 1.0  # a slot whose client has not read for so long is STALLED
# Between two wake-ups for several streams where each takes time from the engine: messages take some 2 % of a core then.
_INTERVAL_PER_STREAM_S = 0.006
_LONGEST_INTERVAL_S = 0.05
_MAX_MASK_THREADS = 4  # more gain nothing: a batch takes as long as its costliest mask
_WATCH_S = 0.5  # between looks at the heartbeat and at clients that do not read

_log = get_logger("engine")


class EngineStreams:
    """A started engine, and who waits for what it does. Make it on the loop, and `await close()` it there.

    Args:
        core: a started engine; closed with this object.
        model: what the engine runs; not closed.
        stuck_after_s: a heartbeat older than this means that the step loop is stuck.
        stall_allowance_s: how long a client may not read before its request ends with CLIENT_STALLED.
    """

    def __init__(
        self, core: CoreEngine, model: Model, *, stuck_after_s: float = 30.0, stall_allowance_s: float = 30.0
    ) -> None:
        self.model = model
        self.info: EngineInfo = core.info
        self._core = core
        self._stuck_after_s = stuck_after_s
        self._stall_allowance_s = stall_allowance_s
        self._streams: dict[int, Stream] = {}
        # Weight sets in memory: that of the engine's mode; with AUTO each one from its first use on.
        self.loaded_modes = {self.info.decode_mode} - {DecodeMode.AUTO}
        self._step_times: deque[float] = deque(maxlen=_NUM_STEP_SAMPLES)
        self._num_steps_seen = 0
        self._is_closed = False
        # Told seconds from a cancel to its slot and blocks being free, and how many requests one wake-up had tokens of.
        self.on_freed: Callable[[float], object] = lambda _: None
        self.on_batch: Callable[[int], object] = lambda _: None
        self._cancelled_at: dict[int, float] = {}
        self._takes_all_cores = _computes_on_all_cores(self.info)
        self._masks = MaskWorker(core, model, 1 if self._takes_all_cores else _num_mask_threads())
        self._constrained: dict[int, Constrained] = {}
        self._loop = asyncio.get_running_loop()
        self._fd = core.event_fd
        self._resting: asyncio.TimerHandle | None = None  # nothing is handed out before it has run
        self._taken: list[Event] = []  # and not handed out yet
        self._loop.add_reader(self._fd, self._dispatch)
        self._watcher = self._loop.create_task(self._watch(), name="xllm-engine-watch")

    @property
    def is_closed(self) -> bool:
        """It gives everything back, or has."""
        return self._is_closed

    @property
    def num_streams(self) -> int:
        """Requests whose events somebody waits for."""
        return len(self._streams)

    def stats(self) -> EngineStats:
        """A snapshot; never waits for the step loop."""
        return self._core.stats()

    def slots(self) -> list[SlotInfo]:
        """A snapshot of every slot; never waits for the step loop."""
        return self._core.slots()

    @property
    def step_time_s(self) -> float | None:
        """Median duration of steps of the last seconds of work; None before there was any."""
        return statistics.median(self._step_times) if self._step_times else None

    def problem(self) -> str:
        """Why the engine cannot serve, by its own heartbeat; empty while it can."""
        if self._is_closed:
            return "the engine is closed"
        stats = self._core.stats()
        if stats.has_failed:
            return "the engine has stopped after a fault; restart the server"
        if stats.heartbeat_age_s > self._stuck_after_s:
            return f"the engine's step loop has not moved for {stats.heartbeat_age_s:.0f} s"
        return ""

    def drain(self) -> None:
        """Refuse new requests; those that are in go on."""
        if not self._is_closed:
            self._core.drain()

    async def close(self) -> None:
        """End what runs and free everything; waits for at most one step. Calling it again is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        if self._resting is not None:
            self._resting.cancel()
        self._watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watcher
        self._fail_all(ServiceError(Reason.DRAINING, "the server stops"))
        await asyncio.to_thread(self._masks.close)
        await asyncio.to_thread(self._core.close)

    def drop(self, request_id: int) -> None:
        """End one of the requests of a call, whose reader has heard enough of it; the others go on."""
        stream = self._streams.pop(request_id, None)
        self._constrained.pop(request_id, None)
        if stream is None:
            return
        stream.drop(request_id)
        if request_id not in stream.ended:  # else it has ended by itself, and no further event of it comes
            self._cancel(request_id)

    def is_stalled(self, request_id: int) -> bool:
        """Whether what a request has brought waits, for a second or more, for a client that does not read."""
        stream = self._streams.get(request_id)
        if stream is None or stream.waits_since is None:
            return False
        return time.monotonic() - stream.waits_since >= _STALLED_AFTER_S

    async def follow(
        self,
        submit: Callable[[], list[int]],
        on_stall: Callable[[], None] | None,
        choices: Sequence[DecodeChoices] = (),
    ) -> AsyncGenerator[list[Progress], None]:
        """Submit requests and yield what happens to them until each has finished; closing it cancels the rest."""
        if problem := self.problem():
            raise ServiceError(Reason.ENGINE_FAILED, problem)
        with self.refusals():
            request_ids = submit()
        stream = Stream(request_ids, on_stall)
        self._streams.update(dict.fromkeys(request_ids, stream))
        rows = [(number, one.constrained) for number, one in zip(request_ids, choices, strict=False)]
        self._constrained.update({number: row for number, row in rows if row is not None})
        self._masks.begin([(number, row) for number, row in rows if row is not None])
        try:
            while stream.running:
                yield await stream.take()
        finally:
            for request_id in request_ids:
                self._streams.pop(request_id, None)
                self._constrained.pop(request_id, None)
            for request_id in stream.running:
                # The one release path: a slot comes back here, whoever ended the call and however.
                self._cancel(request_id)
                if request_id in stream.ended:  # it had ended by itself, and nobody had read of it
                    self._cancelled_at.pop(request_id, None)

    def _cancel(self, request_id: int) -> None:
        if self._is_closed:
            return
        with contextlib.suppress(XllmError):
            self._core.cancel(request_id)
            self._cancelled_at[request_id] = time.monotonic()

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Say in our words why the core takes something not."""
        try:
            yield
        except XllmError as error:
            failure = to_service_error(error)
            if failure.reason is Reason.PROMPT_TOO_LONG:  # the core tells how long the prompt may be
                failure.metadata["max_seq_len"] = str(self.info.max_seq_len)
            elif failure.reason is Reason.MEMORY:
                plan = convert.plan_message(self.info.plan, convert.plan_context(self.info))
                plan.fits, plan.remedy = False, failure.metadata.get("remedy", "")
                failure.extra.append(plan)
            raise failure from error

    def _dispatch(self) -> None:
        """Take what one step, or several, have brought, and hand it out unless that has just been done."""
        try:
            events = self._core.take_events()
        except XllmError as error:
            # The descriptor stays readable from now on: there is nothing more to read.
            self._loop.remove_reader(self._fd)
            self._hand_out()
            self._fail_all(to_service_error(error))
            return
        if self._constrained:
            self._advance_masks(events)  # wanted at once
        self._taken += events
        if self._resting is None:
            self._hand_out()

    def _hand_out(self) -> None:
        events, self._taken = self._taken, []
        streams, now = self._streams, time.monotonic()
        decoding = set[int]()
        for event in events:
            number = event.request_id
            stream = streams.get(number)
            if isinstance(event, TokenEvent):  # all but a few
                decoding.add(number)
                if stream is not None:
                    stream.put_token(event, now)
                continue
            if isinstance(event, FinishedEvent) and (cancelled := self._cancelled_at.pop(number, None)):
                self.on_freed(now - cancelled)
            if isinstance(event, AcceptedEvent):
                self.loaded_modes.add(event.decode_mode)
            if stream is None:
                continue  # it was cancelled, and nobody waits
            row = self._constrained.get(number)
            end = end_of(row, event) if row is not None and isinstance(event, FinishedEvent) else event
            if isinstance(end, ServiceError):
                stream.fail(end)
            else:
                stream.put(end, now)
        if decoding:
            self.on_batch(len(decoding))
        if len(decoding) > 1 and self._takes_all_cores and self._resting is None:
            if not self._constrained:
                self._loop.remove_reader(self._fd)
            interval_s = min(_INTERVAL_PER_STREAM_S * len(decoding), _LONGEST_INTERVAL_S)
            self._resting = self._loop.call_later(interval_s, self._end_rest)

    def _end_rest(self) -> None:
        self._resting = None
        self._loop.add_reader(self._fd, self._dispatch)
        self._dispatch()

    def _advance_masks(self, events: Sequence[Event]) -> None:
        """Have the next masks computed, before anything else is done."""
        self._masks.advance(
            [
                (event.request_id, row, event.token_index + 1, event.token_id)
                for event in events
                if isinstance(event, TokenEvent) and event.wants_mask
                if (row := self._constrained.get(event.request_id)) is not None
            ]
        )

    def _fail_all(self, failure: ServiceError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(failure)

    async def _watch(self) -> None:
        """Look after clients that do not read and a step loop that does not move, and at how long steps take."""
        while True:
            await asyncio.sleep(min(_WATCH_S, self._stall_allowance_s / 4))
            stats = self._core.stats()
            if stats.num_steps != self._num_steps_seen:
                self._num_steps_seen = stats.num_steps
                self._step_times.append(stats.last_step_s)
            if self._streams and (problem := self.problem()):
                _log.error("%s", problem)
                self._fail_all(ServiceError(Reason.ENGINE_FAILED, problem))
            now = time.monotonic()
            for stream in set(self._streams.values()):
                if stream.waits_since is None:
                    continue
                is_late = now - stream.waits_since > self._stall_allowance_s
                if is_late or stream.num_tokens > _MAX_BUFFERED_TOKENS:
                    stream.fail(
                        ServiceError(Reason.CLIENT_STALLED, "the client did not read its stream for too long; read on")
                    )
                    if stream.on_stall is not None:
                        stream.on_stall()


def _num_mask_threads() -> int:
    """Threads that compute masks beside an engine that leaves cores free; two cores stay with the service."""
    return max(1, min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0)) - 2))


def _computes_on_all_cores(info: EngineInfo) -> bool:
    """Whether an engine computes on all that this process may use."""
    has_all = info.num_threads >= len(os.sched_getaffinity(0)) or info.threads_limit == "cgroup quota"
    return info.device_kind == "cpu" and has_all
