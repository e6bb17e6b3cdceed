"""An engine behind an event loop: its calls, each an iterator of what happens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from cyengine.errors import XllmError
from cyengine.types import DecodeMode, FinishedEvent, Slot, SlotInfo, Status
from xllm_service.engine.engine_streams import EngineStreams
from xllm_service.engine.requests import CacheUse, core_request, failure_of, mode_mismatch
from xllm_service.engine.stream import Bounds, Progress
from xllm_service.errors import Reason, ServiceError
from xllm_service.validation import DecodeChoices


class AsyncEngine(EngineStreams):
    """What calls do with an engine: generate, and own, fill and decode slots."""

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

    def generate(
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

        return _each(self.follow(submit, on_stall, _one_each(choices, num_outputs)), bounds)

    def count_cached(self, prompt: Sequence[int], mode: int, cache: CacheUse) -> int:
        """How many leading tokens of a prompt the prefix cache would give it now; computes nothing."""
        with self.refusals():
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
        with self.refusals():
            return self._core.acquire(DecodeMode(mode), lease_s=lease_s, slot=index)

    def renew(self, slot: Slot, lease_s: float) -> SlotInfo:
        """Start the lease anew. Raises STALE_EPOCH, LEASE_LOST."""
        with self.refusals():
            return self._core.renew(slot, lease_s)

    def release(self, slot: Slot) -> SlotInfo:
        """End an ownership; what runs in the slot ends with LEASE_LOST. Raises STALE_EPOCH, LEASE_LOST."""
        with self.refusals():
            return self._core.release(slot)

    def fork(self, slot: Slot, lease_s: float) -> Slot:
        """Own a further slot that continues a READY one. Raises SLOT_STATE, NO_FREE_SLOT, STALE_EPOCH, LEASE_LOST."""
        with self.refusals():
            return self._core.fork(slot, lease_s)

    def prefill(
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

        return _each(self.follow(submit, on_stall), bounds)

    def decode_slot(
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

        return _each(self.follow(submit, on_stall, [choices]), bounds)

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
        async with aclosing(self.follow(lambda: self._core.submit_decode_batch(requests), on_stall, every)) as batches:
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


async def _each(batches: AsyncGenerator[list[Progress], None], bounds: Bounds) -> AsyncGenerator[Progress, None]:
    """Yield what happens to the requests of a call; raises what the first one fails with, after what came before."""
    accepted = set[int]()
    async with aclosing(batches):
        async for batch in batches:
            for progress in batch:
                if progress.accepted is not None:
                    accepted.add(progress.index)
                finished = progress.finished
                if finished is None or finished.status is Status.OK:
                    yield progress
                    continue
                was_accepted = progress.index in accepted
                if was_accepted and bounds.is_duration(finished):
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
    return [choices, *(replace(choices, constrained=row.another()) for _ in range(num_outputs - 1))]
