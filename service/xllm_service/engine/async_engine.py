"""An engine behind an event loop.

A reader on the engine's descriptor wakes up once per step and hands each request's events to its own bounded stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from cyengine.errors import XllmError
from cyengine.types import (
    AcceptedEvent,
    DecodeMode,
    EngineInfo,
    EngineStats,
    FinishedEvent,
    Slot,
    SlotInfo,
    Status,
    TokenEvent,
)
from xllm_service import convert
from xllm_service.constraints import Constrained
from xllm_service.engine.core import CoreEngine
from xllm_service.engine.failures import to_service_error
from xllm_service.engine.masks import MaskWorker, end_of
from xllm_service.engine.model import Model
from xllm_service.engine.requests import CacheUse, core_request, failure_of, mode_mismatch
from xllm_service.engine.stream import Bounds, Progress, Stream
from xllm_service.errors import Reason, ServiceError
from xllm_service.logs import get_logger
from xllm_service.validation import DecodeChoices

_MAX_BUFFERED_TOKENS = 16384  # of one stream whose client does not read
_NUM_STEP_SAMPLES = 9  # steps that the typical step time is taken from: some five seconds of work
_STALLED_AFTER_S = 1.0  # a slot whose client has not read for so long is STALLED
_WATCH_S = 0.5  # between looks at the heartbeat and at clients that do not read

_log = get_logger("engine")


class AsyncEngine:
    """An engine behind an event loop. Make it on the loop, and `await close()` it there.

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
        self._masks = MaskWorker(core, model)
        self._constrained: dict[int, Constrained] = {}
        self._loop = asyncio.get_running_loop()
        self._fd = core.event_fd
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

    def refuse_when_full(self) -> None:
        """Raise QUEUE_FULL as a submission would now; before a prompt is read, which can take longer."""
        stats, info = self._core.stats(), self.info
        if stats.num_running + stats.num_waiting >= info.max_slots + info.max_queue:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"queue: {info.max_queue} requests wait already (max_queue); retry later",
                metadata={"queue_limit": info.max_queue},
            )

    def resolve_mode(self, requested: int, call: str) -> DecodeMode:
        """Return the mode that a request gets, by the table of DecodeMode. Raises DECODE_MODE_MISMATCH."""
        own, wanted = self.info.decode_mode, DecodeMode(requested)
        if own is DecodeMode.AUTO:
            return wanted or DecodeMode.BATCHED
        if wanted in (DecodeMode.AUTO, own):
            return own
        raise mode_mismatch(own, wanted, call)

    async def generate(
        self,
        prompt: Sequence[int],
        choices: DecodeChoices,
        bounds: Bounds | None = None,
        *,
        num_outputs: int = 1,
        cache: CacheUse | None = None,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Run one request and yield what happens to it; the last item, of each output, has `finished`.

        Closing the iterator cancels the request, and its slots and blocks are free within one step.

        Args:
            prompt: token ids.
            choices: how to generate.
            bounds: when it must be over; work that is late is not begun.
            num_outputs: how many answers to one prompt, which is computed once; each item has its output's index.
            cache: how it uses the prefix cache; None: as unsalted requests of nobody do.
            on_stall: called, besides the failure, when the client has not read for too long.

        Raises:
            ServiceError: refused before the first item; later, with the usage so far, when the generation fails.
        """
        bounds = bounds or Bounds()
        request = core_request(choices, bounds, prompt, cache)

        def submit() -> list[int]:
            if num_outputs > 1:
                return self._core.submit_outputs(request, num_outputs)
            return [self._core.submit(request)]

        async with aclosing(self._follow(submit, on_stall, _one_each(choices, num_outputs))) as batches:
            async for progress in _each(batches, bounds):
                yield progress

    def count_cached(self, prompt: Sequence[int], mode: int, cache: CacheUse) -> int:
        """How many leading tokens of a prompt the prefix cache would give it now; computes nothing."""
        with self._refusals():
            return self._core.count_cached(
                prompt, decode_mode=DecodeMode(mode), cache_salt=cache.salt, bypass_cache=cache.bypass
            )

    # ---- slots

    def slot(self, index: int) -> SlotInfo | None:
        """A snapshot of one slot; None where there is no such slot."""
        try:
            return self._core.slot(index)
        except XllmError:
            return None

    def acquire(self, mode: int, lease_s: float, index: int | None) -> Slot:
        """Own a free slot. Raises DECODE_MODE_MISMATCH, NO_FREE_SLOT, SLOT_NOT_FOUND, MEMORY, DRAINING."""
        with self._refusals():
            return self._core.acquire(DecodeMode(mode), lease_s=lease_s, slot=index)

    def renew(self, slot: Slot, lease_s: float) -> SlotInfo:
        """Start the lease anew. Raises STALE_EPOCH, LEASE_LOST."""
        with self._refusals():
            return self._core.renew(slot, lease_s)

    def release(self, slot: Slot) -> SlotInfo:
        """End an ownership; what runs in the slot ends with LEASE_LOST. Raises STALE_EPOCH, LEASE_LOST."""
        with self._refusals():
            return self._core.release(slot)

    def fork(self, slot: Slot, lease_s: float) -> Slot:
        """Own a further slot that continues a READY one. Raises SLOT_STATE, NO_FREE_SLOT, STALE_EPOCH, LEASE_LOST."""
        with self._refusals():
            return self._core.fork(slot, lease_s)

    async def prefill(
        self,
        slot: Slot,
        prompt: Sequence[int],
        bounds: Bounds,
        *,
        cache: CacheUse | None = None,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Compute a prompt into a slot, or append it; closing the iterator leaves the slot as it was.

        Raises ServiceError.
        """
        longest = bounds.seconds
        cache = cache or CacheUse()

        def submit() -> list[int]:
            return [
                self._core.submit_prefill(
                    slot, prompt, max_duration_s=longest, cache_salt=cache.salt, bypass_cache=cache.bypass
                )
            ]

        async with aclosing(self._follow(submit, on_stall)) as batches:
            async for progress in _each(batches, bounds):
                yield progress

    async def decode_slot(
        self,
        slot: Slot,
        choices: DecodeChoices,
        bounds: Bounds,
        *,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Per-slot API: generate in one slot. Closing the iterator leaves it READY. Raises ServiceError."""
        request = core_request(choices, bounds)

        def submit() -> list[int]:
            return [self._core.submit_decode_slot(slot, request)]

        async with aclosing(self._follow(submit, on_stall, [choices])) as batches:
            async for progress in _each(batches, bounds):
                yield progress

    async def generate_in(
        self,
        slot: Slot,
        prompt: Sequence[int],
        choices: DecodeChoices,
        bounds: Bounds,
        *,
        cache: CacheUse | None = None,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Append a prompt to a slot that is owned and generate in it: `generate`, with a slot that stays owned.

        The last item's figures are of both parts. Closing the iterator leaves the slot READY, or as it was before when
        its prompt was not computed yet. Raises ServiceError.
        """
        began = time.monotonic()
        prefilled: FinishedEvent | None = None
        async with aclosing(self.prefill(slot, prompt, bounds, cache=cache, on_stall=on_stall)) as filling:
            async for progress in filling:
                finished = progress.finished
                if finished is not None and finished.status is Status.OK:
                    prefilled, progress.finished = finished, None
                yield progress
        if prefilled is None:
            return  # its longest time was over
        rest = bounds.after(time.monotonic() - began)
        if slot.decode_mode is DecodeMode.PER_SLOT:
            decoding = self.decode_slot(slot, choices, rest, on_stall=on_stall)
        else:
            decoding = self._decode_one(slot, choices, rest, on_stall)
        async with aclosing(decoding):
            async for progress in decoding:
                progress.accepted = None  # the prefill's came before
                if progress.finished is not None:
                    progress.finished.num_prompt_tokens = prefilled.num_prompt_tokens
                    progress.finished.num_cached_tokens = prefilled.num_cached_tokens
                    progress.finished.prefill_s += prefilled.prefill_s
                yield progress

    async def _decode_one(
        self, slot: Slot, choices: DecodeChoices, bounds: Bounds, on_stall: Callable[[], None] | None
    ) -> AsyncGenerator[Progress, None]:
        """A batch of one."""
        async with aclosing(self.decode_batch([(slot, choices, bounds)], on_stall=on_stall)) as batches:
            async for (progress,) in batches:
                yield progress

    async def decode_batch(
        self,
        entries: Sequence[tuple[Slot, DecodeChoices, Bounds]],
        *,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[list[Progress], None]:
        """Batched API: generate in several slots in lock-step; yields what happened to each.

        An entry whose slot was released or lost its lease ends with that status in its `finished`; the others go on.
        Closing the iterator leaves the slots READY. Raises ServiceError: refused as a whole; later, when an entry fails
        in another way, or every one has lost its slot.
        """
        requests = [(slot, core_request(choices, bounds)) for slot, choices, bounds in entries]
        num_lost, accepted = 0, set[int]()
        every = [choices for _, choices, _ in entries]
        async with aclosing(self._follow(lambda: self._core.submit_decode_batch(requests), on_stall, every)) as batches:
            async for batch in batches:
                failure: ServiceError | None = None
                for progress in batch:
                    if progress.accepted is not None:
                        accepted.add(progress.index)
                    finished = progress.finished
                    if finished is None or finished.status is Status.OK:
                        continue
                    was_accepted = progress.index in accepted
                    if was_accepted and entries[progress.index][2].is_duration(finished):
                        continue
                    num_lost += finished.status is Status.LEASE_LOST
                    if finished.status is not Status.LEASE_LOST or num_lost == len(entries) or not was_accepted:
                        failure = failure_of(finished, was_accepted)
                        progress.finished = None
                yield batch
                if failure is not None:
                    raise failure

    async def _follow(
        self,
        submit: Callable[[], list[int]],
        on_stall: Callable[[], None] | None,
        choices: Sequence[DecodeChoices] = (),
    ) -> AsyncGenerator[list[Progress], None]:
        """Submit requests and yield what happens to them until each has finished; closing it cancels the rest."""
        if problem := self.problem():
            raise ServiceError(Reason.ENGINE_FAILED, problem)
        with self._refusals():
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

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
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

    async def close(self) -> None:
        """End what runs and free everything; waits for at most one step. Calling it again is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        self._watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watcher
        self._fail_all(ServiceError(Reason.DRAINING, "the server stops"))
        await asyncio.to_thread(self._masks.close)
        await asyncio.to_thread(self._core.close)

    def _dispatch(self) -> None:
        """Hand out what one step, or several, have brought."""
        try:
            events = self._core.take_events()
        except XllmError as error:
            # The descriptor stays readable from now on: there is nothing more to read.
            self._loop.remove_reader(self._fd)
            self._fail_all(to_service_error(error))
            return
        if num_decoding := len({event.request_id for event in events if isinstance(event, TokenEvent)}):
            self.on_batch(num_decoding)
        self._masks.advance(
            [
                (event.request_id, row, event.token_index + 1, event.token_id)
                for event in events
                if isinstance(event, TokenEvent) and event.wants_mask
                if (row := self._constrained.get(event.request_id)) is not None
            ]
        )
        for event in events:
            if isinstance(event, FinishedEvent) and (cancelled := self._cancelled_at.pop(event.request_id, None)):
                self.on_freed(time.monotonic() - cancelled)
            if isinstance(event, AcceptedEvent):
                self.loaded_modes.add(event.decode_mode)
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue  # it was cancelled, and nobody waits
            row = self._constrained.get(event.request_id)
            end = end_of(row, event) if row is not None and isinstance(event, FinishedEvent) else event
            if isinstance(end, ServiceError):
                stream.fail(end)
            else:
                stream.put(end)

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


async def _each(batches: AsyncGenerator[list[Progress], None], bounds: Bounds) -> AsyncGenerator[Progress, None]:
    """Yield what happens to the requests of a call; raises what the first one fails with, after what came before."""
    accepted = set[int]()
    async for batch in batches:
        for progress in batch:
            if progress.accepted is not None:
                accepted.add(progress.index)
            was_accepted = progress.index in accepted
            finished = progress.finished
            if finished is None or finished.status is Status.OK or (was_accepted and bounds.is_duration(finished)):
                yield progress
                continue
            if progress.accepted is not None or progress.tokens:
                progress.finished = None
                yield progress
            raise failure_of(finished, was_accepted)


def _one_each(choices: DecodeChoices, num_outputs: int) -> list[DecodeChoices]:
    """Return the choices of each output; what one has said constrains it alone."""
    row = choices.constrained
    if row is None:
        return [choices] * num_outputs
    return [choices, *(replace(choices, constrained=row.fork()) for _ in range(num_outputs - 1))]
