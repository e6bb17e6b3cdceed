"""SlotService: own a slot, fill it, decode it, give it back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import aclosing
from typing import Any

from xllm_client.v1 import slot_pb2, slot_service_pb2
from xllm_service.engine import Slot
from xllm_service.errors import Reason, ServiceError
from xllm_service.interceptors import principal
from xllm_service.servicers.ownership import Ownership, parse_slot_name, slot_name
from xllm_service.servicers.prompt import check_digest
from xllm_service.servicers.roster import Hosted
from xllm_service.servicers.served import Served
from xllm_service.servicers.slot_access import explain, explained, find_slot, no_slot, owned_slot
from xllm_service.servicers.slot_decoding import SlotDecoding
from xllm_service.servicers.slot_messages import slot_message, snapshot
from xllm_service.servicers.slot_watch import SlotWatch
from xllm_service.validation import Checker

_DEFAULT_LEASE_S = 60.0
_POLL_S = 0.01  # between looks for a free slot
_MAX_WAIT_S = 86400.0


class SlotServicer(SlotDecoding):
    """Slots as a resource. Methods raise ServiceError; the interceptor makes a status of it."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self._watch = SlotWatch(served)

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
        return slot_service_pb2.RenewSlotResponse(slot=slot_message(owned.hosted, info))

    async def ReleaseSlot(
        self, request: slot_service_pb2.ReleaseSlotRequest, context: Any
    ) -> slot_service_pb2.ReleaseSlotResponse:
        """Give a slot back."""
        owned = owned_slot(self._served, request.ref)
        with explained("ReleaseSlot", [owned]):
            info = owned.hosted.engine.release(owned.ownership.slot)
        return slot_service_pb2.ReleaseSlotResponse(slot=slot_message(owned.hosted, info))

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
        return ref, slot_message(hosted, snapshot(hosted, slot.index))

    # ---- looking ----

    async def GetSlot(self, request: slot_service_pb2.GetSlotRequest, context: Any) -> slot_service_pb2.GetSlotResponse:
        """One slot as it is now."""
        hosted, info = find_slot(self._served, request.name, "name")
        return slot_service_pb2.GetSlotResponse(slot=slot_message(hosted, info))

    async def ListSlots(
        self, request: slot_service_pb2.ListSlotsRequest, context: Any
    ) -> slot_service_pb2.ListSlotsResponse:
        """All slots as they are now."""
        roster = self._served.roster
        some = [self._served.get(request.model)] if request.model else roster.loaded()
        slots = [slot_message(hosted, info) for hosted in some for info in hosted.engine.slots()]
        return slot_service_pb2.ListSlotsResponse(slots=slots)

    async def WatchSlots(  # type: ignore[override]  # a coroutine that writes, which grpc.aio takes too
        self, request: slot_service_pb2.WatchSlotsRequest, context: Any
    ) -> None:
        """All slots as they are now, then those that have changed."""
        async with aclosing(self._watch.changes(request.model)) as changes:
            async for changed in changes:
                slots = [slot_message(hosted, info) for hosted, info in changed]
                # note: while a slow reader keeps this waiting nothing piles up: the next look finds the newest state.
                await context.write(slot_service_pb2.WatchSlotsResponse(slots=slots))

    # ---- helpers ----

    def _lease(self, check: Checker, request: Any) -> float:
        longest = self._served.config.max_lease
        default_s = min(_DEFAULT_LEASE_S, longest)
        return check.span(request, "ttl", "", default_s, low=1.0, high=longest, open_low=False) or default_s


def _index_in(hosted: Hosted, name: str) -> int:
    parsed = parse_slot_name(name)
    if parsed is None or parsed[0] != hosted.name or hosted.engine.slot(parsed[1]) is None:
        raise no_slot(name)
    return parsed[1]
