"""The calls that compute in slots: Prefill, DecodeSlot and DecodeBatch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message

from xllm_client.v1 import generation_pb2, slot_service_pb2, slot_service_pb2_grpc
from xllm_service.admission import GenerationState
from xllm_service.engine import (
    AcceptedEvent,
    Bounds,
    DecodeMode,
    FinishedEvent,
    PrefillEvent,
    Progress,
    SlotState,
)
from xllm_service.errors import InvalidFieldError
from xllm_service.servicers.events import EventMaker
from xllm_service.servicers.live_call import live_call
from xllm_service.servicers.prompt import cache_use, compiled, read_prompt
from xllm_service.servicers.served import Served
from xllm_service.servicers.slot_access import OwnedSlot, explained, owned_slot, settled, told_of_entry
from xllm_service.servicers.slot_messages import slot_message, snapshot
from xllm_service.validation import DecodeChoices, validate_decode, validate_prompt


class SlotDecoding(slot_service_pb2_grpc.SlotServiceServicer):
    """What fills slots and makes them speak; SlotServicer has the rest of the service."""

    def __init__(self, served: Served) -> None:
        self._served = served

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
                                slot=slot_message(hosted, snapshot(hosted, slot.index)),
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


def _fingerprint(request: Message) -> bytes:
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
