"""SlotService: own a slot, fill it, decode it, give it back."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message

from xllm_client.v1 import generation_pb2, slot_pb2, slot_service_pb2, slot_service_pb2_grpc
from xllm_service import convert
from xllm_service.admission import GenerationState
from xllm_service.engine import (
    AcceptedEvent,
    Bounds,
    DecodeMode,
    FinishedEvent,
    PrefillEvent,
    Progress,
    Slot,
    SlotInfo,
    SlotState,
)
from xllm_service.errors import InvalidFieldError, Reason, ServiceError
from xllm_service.interceptors import principal
from xllm_service.servicers.events import EventMaker
from xllm_service.servicers.live_call import live_call
from xllm_service.servicers.ownership import Ownership, parse_slot_name, slot_name
from xllm_service.servicers.prompt import cache_use, check_digest, compiled, read_prompt
from xllm_service.servicers.roster import Hosted
from xllm_service.servicers.served import Served
from xllm_service.servicers.slot_access import (
    OwnedSlot,
    explain,
    explained,
    find_slot,
    no_slot,
    owned_slot,
    settled,
    told_of_entry,
)
from xllm_service.validation import Checker, DecodeChoices, validate_decode, validate_prompt

_DEFAULT_LEASE_S = 60.0
_POLL_S = 0.01  # between looks for a free slot
_MAX_WAIT_S = 86400.0
_WATCH_S = 0.05  # between looks of WatchSlots


class SlotServicer(slot_service_pb2_grpc.SlotServiceServicer):
    """Slots as a resource. Methods raise ServiceError; the interceptor makes a status of it."""

    def __init__(self, served: Served) -> None:
        self._served = served

    # ---- owning ----

    async def AcquireSlot(
        self, request: slot_service_pb2.AcquireSlotRequest, context: Any
    ) -> slot_service_pb2.AcquireSlotResponse:
        """Own a free slot for a while."""
        hosted = self._served.get(request.model)
        check = Checker()
        check.digest(request.expected_digest, "expected_digest")
        check.decode_mode(request.decode_mode, "decode_mode")
        lease_s = self._lease(check, request)
        max_wait_s = check.span(request, "max_wait", "", 0.0, high=_MAX_WAIT_S, open_low=False) or 0.0
        check.raise_if_any()
        index = _index_in(hosted, request.slot_name) if request.slot_name else None
        give_up_at = time.monotonic() + max_wait_s
        await check_digest(hosted.engine.model, request.expected_digest)
        while True:
            try:
                slot = hosted.engine.acquire(request.decode_mode, lease_s, index)
                break
            except ServiceError as error:
                explain(error, "AcquireSlot", request.slot_name)
                if error.reason is not Reason.NO_FREE_SLOT or time.monotonic() >= give_up_at:
                    raise
            await asyncio.sleep(min(_POLL_S, max(0.0, give_up_at - time.monotonic())))
            self._served.refuse_when_draining()
            hosted = self._served.get(hosted.name)  # it may have ended meanwhile
        ref, info = await self._hand_over(hosted, slot)
        return slot_service_pb2.AcquireSlotResponse(ref=ref, slot=info)

    async def RenewSlot(
        self, request: slot_service_pb2.RenewSlotRequest, context: Any
    ) -> slot_service_pb2.RenewSlotResponse:
        """Extend the lease, counted from now."""
        check = Checker()
        lease_s = self._lease(check, request)
        check.raise_if_any()
        owned = owned_slot(self._served, request.ref)
        with explained("RenewSlot", [owned]):
            info = owned.hosted.engine.renew(owned.ownership.slot, lease_s)
        return slot_service_pb2.RenewSlotResponse(slot=self._message(owned.hosted, info))

    async def ReleaseSlot(
        self, request: slot_service_pb2.ReleaseSlotRequest, context: Any
    ) -> slot_service_pb2.ReleaseSlotResponse:
        """Give a slot back."""
        owned = owned_slot(self._served, request.ref)
        with explained("ReleaseSlot", [owned]):
            info = owned.hosted.engine.release(owned.ownership.slot)
        return slot_service_pb2.ReleaseSlotResponse(slot=self._message(owned.hosted, info))

    async def ForkSlot(
        self, request: slot_service_pb2.ForkSlotRequest, context: Any
    ) -> slot_service_pb2.ForkSlotResponse:
        """Own a further slot that continues from where one of this caller's is."""
        check = Checker()
        lease_s = self._lease(check, request)
        check.raise_if_any()
        owned = owned_slot(self._served, request.ref)
        with explained("ForkSlot", [owned]):
            slot = owned.hosted.engine.fork(owned.ownership.slot, lease_s)
        ref, info = await self._hand_over(owned.hosted, slot)
        return slot_service_pb2.ForkSlotResponse(ref=ref, slot=info)

    async def _hand_over(self, hosted: Hosted, slot: Slot) -> tuple[slot_pb2.SlotRef, slot_pb2.Slot]:
        """Make this call's caller the owner of a slot that was acquired just now."""
        ownership = hosted.owners[slot.index] = Ownership.new(slot, principal.get())
        try:
            # note: one that goes while the reply is on its way is not heard of; then the lease gives the slot back.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            with contextlib.suppress(ServiceError):
                hosted.engine.release(slot)
            raise
        name = slot_name(hosted.name, slot.index)
        ref = slot_pb2.SlotRef(name=name, epoch=slot.epoch, secret=ownership.secret)
        return ref, self._message(hosted, _snapshot(hosted, slot.index))

    # ---- looking ----

    async def GetSlot(self, request: slot_service_pb2.GetSlotRequest, context: Any) -> slot_service_pb2.GetSlotResponse:
        """One slot as it is now."""
        hosted, info = find_slot(self._served, request.name, "name")
        return slot_service_pb2.GetSlotResponse(slot=self._message(hosted, info))

    async def ListSlots(
        self, request: slot_service_pb2.ListSlotsRequest, context: Any
    ) -> slot_service_pb2.ListSlotsResponse:
        """All slots as they are now."""
        roster = self._served.roster
        some = [self._served.get(request.model)] if request.model else roster.loaded()
        slots = [self._message(hosted, info) for hosted in some for info in hosted.engine.slots()]
        return slot_service_pb2.ListSlotsResponse(slots=slots)

    async def WatchSlots(  # type: ignore[override]  # a coroutine that writes, which grpc.aio takes too
        self, request: slot_service_pb2.WatchSlotsRequest, context: Any
    ) -> None:
        """All slots as they are now, then those that have changed."""
        seen: dict[str, bytes] = {}
        while True:
            hosts = [self._served.get(request.model)] if request.model else self._served.roster.loaded()
            changed = []
            for hosted in hosts:
                for info in hosted.engine.slots():
                    slot = self._message(hosted, info)
                    told = _without_clocks(slot)
                    if seen.get(slot.name) != told:
                        seen[slot.name] = told
                        changed.append(slot)
            if changed:
                # note: while a slow reader keeps this waiting nothing piles up: the next look finds the newest state.
                await context.write(slot_service_pb2.WatchSlotsResponse(slots=changed))
            self._served.refuse_when_draining()
            await asyncio.sleep(_WATCH_S)

    # ---- computing ----

    async def Prefill(  # type: ignore[override]  # a coroutine that writes, which grpc.aio takes too
        self, request: slot_service_pb2.PrefillRequest, context: Any
    ) -> None:
        """Compute a prompt into an ACQUIRED slot, or append one to a READY slot."""
        arrival = time.monotonic()
        owned = owned_slot(self._served, request.ref)
        hosted = owned.hosted
        engine = hosted.engine
        prompt = validate_prompt(request, self._served.limits(engine))
        stream = _Stream(context, slot_service_pb2.PrefillResponse)
        async with live_call(
            self._served, context, request_id="", model=hosted.name, fingerprint=_fingerprint(request)
        ) as live:
            with explained("Prefill", [owned], prompt_field=request.WhichOneof("input") or ""):
                owned.require([SlotState.ACQUIRED, SlotState.READY], "Prefill")
                is_first = owned.info.state is SlotState.ACQUIRED
                ids = (await read_prompt(engine.model, prompt, "", add_special=is_first)).ids
                make = EventMaker(hosted, live, self._served.metrics, arrival)
                make.clock.submitted = time.monotonic()
                slot = owned.ownership.slot
                bounds = Bounds(context.time_remaining())
                events = engine.prefill(slot, ids, bounds, cache=cache_use(prompt), on_stall=live.stalled)
                async with aclosing(events):
                    async for progress in events:
                        make.clock.blocked_s = progress.blocked_s
                        if progress.accepted is not None:
                            live.state = GenerationState.RUNNING
                            make.seat(progress.accepted)
                            first = _first_progress(progress.accepted, len(ids))
                            await stream.send(prefill_progress=make.prefill(first))
                        if progress.prefill is not None and progress.finished is None:
                            await stream.send(prefill_progress=make.prefill(progress.prefill))
                        if progress.finished is not None:
                            end = slot_service_pb2.PrefillFinished(
                                slot=self._message(hosted, _snapshot(hosted, slot.index)),
                                usage=make.used([progress.finished]),
                                timings=make.timings([progress.finished]),
                            )
                            await stream.send(finished=end)

    async def DecodeSlot(  # type: ignore[override]  # as above
        self, request: slot_service_pb2.DecodeSlotRequest, context: Any
    ) -> None:
        """Per-slot API: decode one READY slot."""
        arrival = time.monotonic()
        owned = owned_slot(self._served, request.ref)
        hosted = owned.hosted
        limits = self._served.limits(hosted.engine)
        (choices,) = validate_decode(request.request_id, {"options.": request.options}, limits)
        stream = _Stream(context, slot_service_pb2.DecodeSlotResponse)
        async with live_call(
            self._served,
            context,
            request_id=request.request_id,
            model=hosted.name,
            fingerprint=_fingerprint(request),
        ) as live:
            if live.is_retry:
                await settled([owned])
            with explained("DecodeSlot", [owned], options_path="options."):
                owned.require([SlotState.READY], "DecodeSlot", mode=DecodeMode.PER_SLOT)
                choices = await compiled(hosted.engine.model, choices, "options.")
                owned = owned.now()
                make = EventMaker(hosted, live, self._served.metrics, arrival)
                make.clock.submitted = time.monotonic()
                bounds = Bounds.of(choices, context.time_remaining(), make.clock.submitted - arrival)
                events = hosted.engine.decode_slot(owned.ownership.slot, choices, bounds, on_stall=live.stalled)
                async with aclosing(events):
                    async for progress in events:
                        make.clock.blocked_s = progress.blocked_s
                        if progress.accepted is not None:
                            live.state = GenerationState.RUNNING
                            await stream.send(accepted=_accepted(make, choices, progress.accepted, owned))
                        await _send_output(stream, make, choices, progress)
                        if progress.finished is not None:
                            await stream.send(finished=make.finished([progress.finished]))

    async def DecodeBatch(  # type: ignore[override]  # as above
        self, request: slot_service_pb2.DecodeBatchRequest, context: Any
    ) -> None:
        """Batched API: decode several READY slots of this caller in lock-step."""
        arrival = time.monotonic()
        entries = self._batch(request.entries)
        hosted = entries[0].hosted
        limits = self._served.limits(hosted.engine)
        paths = {f"entries[{index}].options.": entry.options for index, entry in enumerate(request.entries)}
        checked = validate_decode(request.request_id, paths, limits)
        stream = _Stream(context, slot_service_pb2.DecodeBatchResponse)
        async with live_call(
            self._served,
            context,
            request_id=request.request_id,
            model=hosted.name,
            fingerprint=_fingerprint(request),
        ) as live:
            if live.is_retry:
                await settled(entries)
            with explained("DecodeBatch", entries):
                for index, entry in enumerate(entries):
                    with told_of_entry(index):
                        entry.require([SlotState.READY], "DecodeBatch", mode=DecodeMode.BATCHED)
                model = hosted.engine.model
                choices = [await compiled(model, one, path) for one, path in zip(checked, paths, strict=True)]
                entries = [entry.now() for entry in entries]
                make = EventMaker(hosted, live, self._served.metrics, arrival)
                make.clock.submitted = time.monotonic()
                elapsed_s = make.clock.submitted - arrival
                bounds = [Bounds.of(one, context.time_remaining(), elapsed_s) for one in choices]
                slots = [entry.ownership.slot for entry in entries]
                batch_entries = list(zip(slots, choices, bounds, strict=True))
                events = hosted.engine.decode_batch(batch_entries, on_stall=live.stalled)
                accepted: dict[int, AcceptedEvent] = {}
                held: list[Progress] = []
                ended: list[FinishedEvent] = []
                async with aclosing(events):
                    async for batch in events:
                        if len(accepted) < len(entries):
                            # One Accepted for all of them: what comes before the last one's waits for it.
                            accepted |= {one.index: one.accepted for one in batch if one.accepted is not None}
                            held += batch
                            if len(accepted) < len(entries):
                                continue
                            live.state = GenerationState.RUNNING
                            told = [
                                _accepted(make, choices[index], accepted[index], entry)
                                for index, entry in enumerate(entries)
                            ]
                            await stream.send(accepted=slot_service_pb2.DecodeBatchAccepted(entries=told))
                            batch, held = held, []
                        for one in batch:
                            make.clock.blocked_s = one.blocked_s
                            await _send_output(stream, make, choices[one.index], one)
                            if one.finished is not None:
                                ended.append(one.finished)
                await stream.send(finished=make.finished(ended))

    # ---- helpers ----

    def _lease(self, check: Checker, request: Any) -> float:
        longest = self._served.config.max_lease
        default_s = min(_DEFAULT_LEASE_S, longest)
        return check.span(request, "ttl", "", default_s, low=1.0, high=longest, open_low=False) or default_s

    def _batch(self, entries: Sequence[slot_service_pb2.DecodeBatchEntry]) -> list[OwnedSlot]:
        """Return the slots of a batch. Raises also INVALID_FIELD for none, one given twice, and several engines."""
        if not entries:
            raise InvalidFieldError([("entries", "expected at least one slot, found nothing")])
        names: dict[str, int] = {}
        owned: list[OwnedSlot] = []
        for index, entry in enumerate(entries):
            path = f"entries[{index}].ref"
            one = owned_slot(self._served, entry.ref, path)
            if entry.ref.name in names:
                raise InvalidFieldError([(path, f"{entry.ref.name} is entry {names[entry.ref.name]} too")])
            if owned and one.hosted is not owned[0].hosted:
                raise InvalidFieldError([(path, f"expected a slot of {owned[0].hosted.name}, as entry 0 is")])
            names[entry.ref.name] = index
            owned.append(one)
        return owned

    def _message(self, hosted: Hosted, info: SlotInfo) -> slot_pb2.Slot:
        """Return a slot as this call's caller may see it."""
        is_free = info.state is SlotState.FREE
        engine = hosted.engine
        mode = engine.resolve_mode(DecodeMode.AUTO, "GetSlot") if is_free else info.decode_mode
        state = info.state
        if state is SlotState.DECODING and info.request_id is not None and engine.is_stalled(info.request_id):
            state = SlotState.STALLED
        slot = slot_pb2.Slot(
            name=slot_name(hosted.name, info.slot),
            epoch=info.epoch,
            state=slot_pb2.SlotState.Name(int(state) + 1),  # the contract's zero is UNSPECIFIED
            model=hosted.name,
            decode_mode=convert.decode_mode(int(mode)),
            num_tokens=info.num_tokens,
            num_kv_blocks=info.num_blocks,
            max_seq_len=engine.info.max_seq_len,
        )
        if is_free:
            return slot
        now = time.time()
        slot.acquire_time.CopyFrom(convert.timestamp(now - info.owned_s))
        ownership, seat = hosted.owners.get(info.slot), hosted.seats.get(info.slot)
        if info.is_acquired:
            slot.expire_time.CopyFrom(convert.timestamp(now + info.lease_left_s))
            if ownership is not None and ownership.slot.epoch == info.epoch:
                slot.owner = ownership.principal
                slot.acquire_time.CopyFrom(convert.timestamp(ownership.acquired_at))
        elif seat is not None and seat.epoch == info.epoch:
            slot.owner = seat.owner
        if info.request_id is not None and seat is not None and seat.epoch == info.epoch:
            caller = principal.get()
            if caller and caller == seat.owner:
                slot.request_id = seat.request_id
        return slot


def _without_clocks(slot: slot_pb2.Slot) -> bytes:
    """Return what makes a slot another than it was: all but times that are told anew with each look."""
    rest = slot_pb2.Slot()
    rest.CopyFrom(slot)
    rest.ClearField("acquire_time")
    rest.ClearField("expire_time")
    return bytes(rest.SerializeToString(deterministic=True))


class _Stream:
    """Numbers the events of one stream."""

    def __init__(self, context: Any, response: Any) -> None:
        self._context = context
        self._response = response
        self._sequence = 0

    async def send(self, **event: Message | None) -> None:
        """Write one event, given by the name of its field; None: nothing."""
        ((name, message),) = event.items()
        if message is None:
            return
        response = self._response(sequence=self._sequence, **{name: message})
        self._sequence += 1
        # note: initial metadata goes out with the first write, so a refusal before it can be tried again.
        await self._context.write(response)


async def _send_output(stream: _Stream, make: EventMaker, choices: DecodeChoices, progress: Progress) -> None:
    await stream.send(delta=make.delta(choices, progress.tokens, progress.finished, progress.index))
    if progress.finished is not None:
        await stream.send(output_finished=make.output_finished(choices, progress.finished, progress.index))


def _accepted(
    make: EventMaker, choices: DecodeChoices, event: AcceptedEvent, owned: OwnedSlot
) -> generation_pb2.Accepted:
    num_tokens = owned.info.num_tokens
    return make.accepted(choices, event, num_prompt=num_tokens, num_cached=max(0, num_tokens - 1))


def _first_progress(event: AcceptedEvent, num_prompt: int) -> PrefillEvent:
    return PrefillEvent(event.request_id, num_prompt, event.num_cached_tokens, event.num_cached_tokens)


def _snapshot(hosted: Hosted, index: int) -> SlotInfo:
    info = hosted.engine.slot(index)
    assert info is not None
    return info


def _index_in(hosted: Hosted, name: str) -> int:
    parsed = parse_slot_name(name)
    if parsed is None or parsed[0] != hosted.name or hosted.engine.slot(parsed[1]) is None:
        raise no_slot(name)
    return parsed[1]


def _fingerprint(request: Message) -> bytes:
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
