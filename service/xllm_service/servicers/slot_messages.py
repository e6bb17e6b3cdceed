"""A slot as the contract shows it, to the caller of the call that asks."""

from __future__ import annotations

import time

from xllm_client.v1 import slot_pb2
from xllm_service import convert
from xllm_service.engine import DecodeMode, SlotInfo, SlotState
from xllm_service.interceptors import principal
from xllm_service.servicers.ownership import slot_name
from xllm_service.servicers.roster import Hosted


def slot_message(hosted: Hosted, info: SlotInfo) -> slot_pb2.Slot:
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


def snapshot(hosted: Hosted, index: int) -> SlotInfo:
    """A slot that is there, as it is now."""
    info = hosted.engine.slot(index)
    assert info is not None
    return info
