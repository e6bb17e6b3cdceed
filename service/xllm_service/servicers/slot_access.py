"""From a slot's name to the slot, for those who may use it; and refusals of calls on slots in the caller's words."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xllm_client.v1 import slot_pb2
from xllm_service.engine import DecodeMode, SlotInfo, SlotState
from xllm_service.errors import InvalidFieldError, Reason, ServiceError
from xllm_service.interceptors import principal
from xllm_service.servicers.ownership import Ownership, parse_slot_name, slot_name
from xllm_service.servicers.roster import Hosted
from xllm_service.servicers.served import Served

_POLL_S = 0.01  # between looks at a slot that a call is about to leave
_SETTLE_S = 5.0  # for it to do so; a step takes less
_IN_A_CALL = frozenset({SlotState.PREFILLING, SlotState.DECODING, SlotState.CANCELLING})


@dataclass(frozen=True, slots=True)
class OwnedSlot:
    """A slot that a call may use: its caller owns it."""

    hosted: Hosted
    ownership: Ownership
    info: SlotInfo

    def resolve_mode(self, requested: int, call: str) -> DecodeMode:
        """Return the slot's mode, which a request may repeat. Raises DECODE_MODE_MISMATCH."""
        own, wanted = self.info.decode_mode, DecodeMode(requested)
        if wanted in (DecodeMode.AUTO, own):
            return own
        raise self._mode_mismatch(wanted, call, f"request {own.name} or AUTO, or acquire a slot in mode {wanted.name}")

    def now(self) -> OwnedSlot:
        """Return it as it is now. Raises SLOT_NOT_FOUND, once its engine has ended."""
        info = self.hosted.engine.slot(self.info.slot)
        if info is None:
            raise no_slot(slot_name(self.hosted.name, self.info.slot))
        return replace(self, info=info)

    def require(self, states: Sequence[SlotState], call: str, *, mode: DecodeMode | None = None) -> None:
        """Refuse what the engine would refuse now, before work is done that only an accepted call is worth.

        The engine checks again as the call begins. Raises DECODE_MODE_MISMATCH, SLOT_STATE, STALE_EPOCH, LEASE_LOST.
        """
        info = self.now().info
        name = slot_name(self.hosted.name, info.slot)
        is_ours = info.epoch == self.ownership.slot.epoch and info.is_acquired and info.lease_left_s > 0
        if not is_ours or info.state in (SlotState.FREE, SlotState.CANCELLING):
            # The engine alone knows how an ownership has ended. A lease that still runs stays as it is.
            self.hosted.engine.renew(self.ownership.slot, max(info.lease_left_s, 1e-3))
        if mode not in (None, info.decode_mode):
            calls = "per-slot" if info.decode_mode is DecodeMode.PER_SLOT else "batched"
            remedy = f"decode this slot with the {calls} calls, or acquire one in mode {mode.name}"
            raise self._mode_mismatch(mode, call, remedy)
        if info.state not in states:
            names = " or ".join(state.name for state in states)
            is_empty = info.state is SlotState.ACQUIRED
            remedy = "prefill it first" if is_empty else "wait for the call that runs in it, or cancel it"
            raise ServiceError(
                Reason.SLOT_STATE,
                f"{call}: {name}: expected {names}, found {info.state.name}; {remedy}",
                metadata={"slot": name, "state": info.state.name, "call": call},
            )

    def _mode_mismatch(self, wanted: DecodeMode, call: str, remedy: str) -> ServiceError:
        own = self.info.decode_mode
        return ServiceError(
            Reason.DECODE_MODE_MISMATCH,
            f"{call}: the slot decodes {own.name}, the call asks for {wanted.name}; {remedy}",
            metadata={
                "engine_mode": self.hosted.engine.info.decode_mode.name,
                "requested_mode": wanted.name,
                "call": call,
                "remedy": remedy,
                "slot_mode": own.name,
            },
        )


def find_slot(served: Served, name: str, field: str) -> tuple[Hosted, SlotInfo]:
    """Return a slot by its name. Raises SLOT_NOT_FOUND."""
    if not name:
        raise InvalidFieldError([(field, "expected the name of a slot, found nothing")])
    parsed = parse_slot_name(name)
    hosted = served.roster.find(parsed[0]) if parsed is not None else None
    if parsed is None or hosted is None or not hosted.is_loaded:
        raise no_slot(name)
    info = hosted.engine.slot(parsed[1])
    if info is None:
        raise no_slot(name)
    return hosted, info


def owned_slot(served: Served, ref: slot_pb2.SlotRef, path: str = "ref") -> OwnedSlot:
    """Return the slot that a call means. Raises SLOT_NOT_FOUND, STALE_EPOCH, FOREIGN_SLOT.

    Whether the lease still runs is for the engine to say, in the call itself.
    """
    hosted, info = find_slot(served, ref.name, f"{path}.name")
    ownership = hosted.owners.get(info.slot)
    if ownership is None or ownership.slot.epoch != ref.epoch:
        if info.epoch != ref.epoch or info.state is SlotState.FREE:
            raise _stale(ref.name, ref.epoch, info.epoch)
        raise _foreign(ref.name)  # a generation's own slot
    if not ownership.is_of(principal.get(), ref.secret):
        raise _foreign(ref.name)
    return OwnedSlot(hosted, ownership, info)


async def settled(entries: Sequence[OwnedSlot]) -> None:
    """Wait for a call that is being replaced to leave its slots, which takes it a step."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        if not any(one.now().info.state in _IN_A_CALL for one in entries):
            return
        await asyncio.sleep(_POLL_S)


def no_slot(name: str) -> ServiceError:
    """Return the refusal of a name that no slot has."""
    return ServiceError(
        Reason.SLOT_NOT_FOUND, f"no slot {name!r} is here; see ListSlots", resource=("xllm.v1.Slot", name)
    )


def _foreign(name: str) -> ServiceError:
    return ServiceError(
        Reason.FOREIGN_SLOT, f"{name} belongs to somebody else; pass the SlotRef that AcquireSlot returned, as it is"
    )


def _stale(name: str, epoch: int, current: int) -> ServiceError:
    return ServiceError(
        Reason.STALE_EPOCH,
        f"{name} is no longer yours: epoch {epoch} is over; acquire a slot",
        metadata={"slot": name, "epoch": epoch, "current_epoch": current},
    )


@contextlib.contextmanager
def explained(
    call: str, entries: Sequence[OwnedSlot], *, prompt_field: str = "", options_path: str = ""
) -> Iterator[None]:
    """Say of a refusal from below, in the caller's words, which call, slot and field it is about."""
    try:
        yield
    except ServiceError as error:
        index = error.metadata.pop("entry", "")
        at = int(index) if index else 0
        owned = entries[at]
        name = slot_name(owned.hosted.name, owned.info.slot)
        if index and len(entries) > 1 and name not in error.message:
            error.message = f"entries[{at}] ({name}): {error.message}"
        path = f"entries[{at}].options." if call == "DecodeBatch" else options_path
        if prompt_field and error.reason in (Reason.PROMPT_TOO_LONG, Reason.NEVER_FITS):
            error.field = prompt_field
        elif error.field.startswith("spec."):
            error.field = path + error.field.removeprefix("spec.")
        explain(error, call, name)
        if error.reason is Reason.STALE_EPOCH:
            epoch = owned.ownership.slot.epoch
            info = owned.hosted.engine.slot(owned.info.slot)
            error.metadata = {"slot": name, "epoch": str(epoch), "current_epoch": str(info.epoch if info else epoch)}
        elif error.reason is Reason.SLOT_STATE:
            info = owned.hosted.engine.slot(owned.info.slot) or owned.info
            error.metadata |= {"state": info.state.name}
        raise


@contextlib.contextmanager
def told_of_entry(index: int) -> Iterator[None]:
    """Say of a refusal which entry of a batch it is about, as the engine does."""
    try:
        yield
    except ServiceError as error:
        error.metadata["entry"] = str(index)
        raise


def explain(error: ServiceError, call: str, name: str) -> None:
    """Name the call, and the slot, in a refusal that is about them."""
    if error.reason is Reason.DECODE_MODE_MISMATCH:
        error.message = error.message.replace(error.metadata.get("call", ""), call)
        error.metadata["call"] = call
    elif error.reason in (Reason.SLOT_STATE, Reason.LEASE_LOST):
        error.metadata |= {"slot": name, "call": call}
    elif error.reason is Reason.NO_FREE_SLOT and "slot" in error.metadata:  # the engine knows its slots by number
        error.message = error.message.replace(f"slot {error.metadata['slot']}", name)
        error.metadata["slot"] = name
