"""GenerationService: from prompt to tokens, and what is known of it."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from xllm_client.v1 import generation_pb2, generation_service_pb2, generation_service_pb2_grpc
from xllm_service import convert
from xllm_service.admission import GenerationState, state_value
from xllm_service.engine import AcceptedEvent, AsyncEngine, Bounds, DecodeMode, FinishedEvent, SlotState
from xllm_service.errors import InvalidFieldError, Reason, ServiceError
from xllm_service.interceptors import principal
from xllm_service.servicers.answers import Answer
from xllm_service.servicers.events import EventMaker, Send
from xllm_service.servicers.live_call import live_call
from xllm_service.servicers.prompt import cache_use, check_digest, compiled, read_prompt
from xllm_service.servicers.roster import Hosted
from xllm_service.servicers.said import Said
from xllm_service.servicers.served import Served
from xllm_service.servicers.slot_access import OwnedSlot, explained, owned_slot, settled
from xllm_service.validation import DecodeChoices, validate


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """Runs generations. Methods raise ServiceError; the interceptor makes a status of it."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def Generate(  # type: ignore[override]  # a coroutine that writes, which grpc.aio takes too
        self, request: generation_service_pb2.GenerateRequest, context: Any
    ) -> None:
        """Stream one generation."""
        sequence = 0

        async def send(event: Any) -> None:
            nonlocal sequence
            response = generation_service_pb2.GenerateResponse(sequence=sequence, **{_EVENT_FIELDS[type(event)]: event})
            sequence += 1
            # note: initial metadata goes out with the first write, so a refusal before it can be tried again.
            await context.write(response)

        await self._run("Generate", request.spec, context, send)

    async def GenerateOnce(
        self, request: generation_service_pb2.GenerateOnceRequest, context: Any
    ) -> generation_service_pb2.GenerateOnceResponse:
        """Run one generation and return the whole of it."""
        reply = generation_service_pb2.GenerateOnceResponse()
        texts: defaultdict[int, list[str]] = defaultdict(list)
        reasoning: defaultdict[int, list[str]] = defaultdict(list)

        def output(index: int) -> generation_pb2.Output:
            while len(reply.outputs) <= index:
                reply.outputs.add(output_index=len(reply.outputs))
            return reply.outputs[index]

        async def collect(event: Any) -> None:
            if isinstance(event, generation_pb2.Delta):
                texts[event.output_index].append(event.text)
                reasoning[event.output_index].append(event.reasoning_text)
                for part in event.tool_calls:
                    output(event.output_index).tool_calls.add(
                        id=part.id, name=part.name, arguments_json=part.arguments_json
                    )
                output(event.output_index).tokens.extend(event.tokens)
            elif isinstance(event, generation_pb2.Accepted):
                reply.accepted.CopyFrom(event)
            elif isinstance(event, generation_pb2.OutputFinished):
                output(event.output_index).finished.CopyFrom(event)
            elif isinstance(event, generation_pb2.Finished):
                reply.usage.CopyFrom(event.usage)
                reply.timings.CopyFrom(event.timings)

        await self._run("GenerateOnce", request.spec, context, collect)
        for index, whole in enumerate(reply.outputs):
            whole.text, whole.reasoning_text = "".join(texts[index]), "".join(reasoning[index])
        return reply

    async def CancelGeneration(
        self, request: generation_service_pb2.CancelGenerationRequest, context: Any
    ) -> generation_service_pb2.CancelGenerationResponse:
        """Stop a generation of this caller."""
        if not request.request_id:
            raise InvalidFieldError([("request_id", "expected the id of a generation, found nothing")])
        state = self._served.generations.cancel(principal.get(), request.request_id)
        return generation_service_pb2.CancelGenerationResponse(state=state_value(state))

    async def GetGeneration(
        self, request: generation_service_pb2.GetGenerationRequest, context: Any
    ) -> generation_service_pb2.GetGenerationResponse:
        """The state of a generation of this caller, or its receipt."""
        if not request.request_id:
            raise InvalidFieldError([("request_id", "expected the id of a generation, found nothing")])
        receipt = self._served.generations.receipt(principal.get(), request.request_id)
        return generation_service_pb2.GetGenerationResponse(receipt=receipt)

    async def EstimateGeneration(
        self, request: generation_service_pb2.EstimateGenerationRequest, context: Any
    ) -> generation_service_pb2.EstimateGenerationResponse:
        """What a generation would meet; computes nothing but the prompt's tokens."""
        spec = request.spec
        hosted, owned = self._place(spec)
        engine = hosted.engine
        valid = validate(spec, self._served.limits(engine))
        mode = _mode(engine, owned, valid.choices, "EstimateGeneration")
        await check_digest(engine.model, valid.expected_digest)
        await compiled(engine.model, valid.choices, "spec.")
        prompt = (await read_prompt(engine.model, valid.prompt, "spec.", add_special=_is_first(owned))).ids
        num_held = owned.info.num_tokens if owned is not None else 0
        num_tokens = num_held + len(prompt)
        info, stats = engine.info, engine.stats()
        left = info.max_seq_len - num_tokens
        bound = valid.choices.max_tokens
        max_new = max(0, left if bound is None else min(left, bound))
        reason = ""
        if left < 1:
            reason = Reason.PROMPT_TOO_LONG.value
        elif num_tokens + 1 > stats.blocks_total * info.block_size:
            reason = Reason.NEVER_FITS.value
        num_cached = num_held
        if not num_held and not reason:
            num_cached = engine.count_cached(prompt, int(mode), cache_use(valid.prompt))
        can_start = owned is not None or (stats.num_waiting == 0 and stats.slots_used < stats.slots_total)
        return generation_service_pb2.EstimateGenerationResponse(
            model=hosted.name,
            decode_mode=convert.decode_mode(int(mode)),
            num_prompt_tokens=num_tokens,
            num_cached_tokens=num_cached,
            max_new_tokens=max_new,
            num_kv_blocks_needed=-(-(num_tokens + max_new) // info.block_size),
            fits=not reason,
            refusal_reason=reason,
            queue_position=0 if can_start else stats.num_waiting + 1,
        )

    async def _run(self, call: str, spec: generation_service_pb2.GenerationSpec, context: Any, send: Send) -> None:
        """Check a request, run it and send its events."""
        arrival = time.monotonic()
        hosted, owned = self._place(spec)
        engine = hosted.engine
        request = validate(spec, self._served.limits(engine))
        choices = request.choices
        fingerprint = hashlib.sha256(spec.SerializeToString(deterministic=True)).digest()
        async with live_call(
            self._served, context, request_id=request.request_id, model=hosted.name, fingerprint=fingerprint
        ) as live:
            with _in_the_callers_words(call, spec, owned):
                # What the request says, then what the engine and the slot are, then what costs something.
                _mode(engine, owned, choices, call)
                await check_digest(engine.model, request.expected_digest)
                if owned is None:
                    engine.refuse_when_full()
                else:
                    if live.is_retry:
                        await settled([owned])
                    owned.require([SlotState.ACQUIRED, SlotState.READY], call)
                read = await read_prompt(engine.model, request.prompt, "spec.", add_special=_is_first(owned))
                prompt, chat = read.ids, request.prompt.chat
                said = Said(engine.model, live, self._served.config.log_prompts)
                said.prompt(prompt)
                tags = engine.model.markers.reasoning
                free_until = tags[1] if tags is not None and read.starts_in_reasoning else ""
                choices = await compiled(engine.model, choices, "spec.", free_until=free_until)
                num_outputs = request.num_outputs
                answers: list[Answer | None] = [None] * num_outputs
                if chat is not None:
                    # note: what a constraint shapes is the answer, also where it looks like a tool call.
                    has_tools = bool(chat.tools) and choices.constraint is None
                    in_reasoning = read.starts_in_reasoning
                    answers = [
                        Answer(engine.model, choices, prompt, in_reasoning, has_tools) for _ in range(num_outputs)
                    ]
                asked = choices if chat is None else Answer.engine_choices(choices)
                make = EventMaker(hosted, live, self._served.metrics, arrival, num_outputs)
                make.clock.submitted = time.monotonic()
                bounds = Bounds.of(choices, context.time_remaining(), make.clock.submitted - arrival)
                cache = cache_use(request.prompt)
                if owned is None:
                    events = engine.generate(
                        prompt, asked, bounds, num_outputs=num_outputs, cache=cache, on_stall=live.stalled
                    )
                else:
                    owned = owned.now()
                    if choices.seed is None:  # drawn here, as the first event tells it before the decode begins
                        choices = replace(choices, seed=secrets.randbits(64))
                        asked = replace(asked, seed=choices.seed)
                    slot = owned.ownership.slot
                    events = engine.generate_in(slot, prompt, asked, bounds, cache=cache, on_stall=live.stalled)
                ended: dict[int, FinishedEvent] = {}
                async with aclosing(events):
                    async for progress in events:
                        index, answer = progress.index, answers[progress.index]
                        make.clock.blocked_s = progress.blocked_s
                        if progress.accepted is not None and live.state is GenerationState.RUNNING:
                            make.seat(progress.accepted)  # a further output's
                        elif progress.accepted is not None:
                            live.state = GenerationState.RUNNING
                            accepted = _accepted(make, choices, progress.accepted, owned)
                            accepted.starts_in_reasoning = read.starts_in_reasoning
                            await send(accepted)
                        if progress.prefill is not None and not progress.tokens and progress.finished is None:
                            told = make.prefill(progress.prefill)
                            if told is not None:
                                await send(told)
                        parts = answer.read(progress, make.clock) if answer is not None else None
                        delta = make.delta(
                            choices, progress.tokens, progress.finished, index, answer=answer, parts=parts
                        )
                        if delta is not None:
                            await send(delta)
                        said.output(progress)
                        if progress.finished is None:
                            continue
                        ended[index] = progress.finished
                        await send(make.output_finished(choices, progress.finished, index))
                        if len(ended) == num_outputs:
                            await send(make.finished([ended[i] for i in range(num_outputs)]))
                            break  # where a stop string ended it, the engine still runs
                        engine.drop(progress.finished.request_id)

    def _place(self, spec: generation_service_pb2.GenerationSpec) -> tuple[Hosted, OwnedSlot | None]:
        """Return the engine that is meant, and the caller's own slot where one is named."""
        if not spec.HasField("slot"):
            return self._served.get(spec.model, "spec.model"), None
        owned = owned_slot(self._served, spec.slot, "spec.slot")
        if spec.model and spec.model != owned.hosted.name:
            raise InvalidFieldError([("spec.slot", f"expected a slot of {spec.model}, found {spec.slot.name}")])
        return self._served.get(owned.hosted.name, "spec.model"), owned


_EVENT_FIELDS = {
    generation_pb2.Accepted: "accepted",
    generation_pb2.PrefillProgress: "prefill_progress",
    generation_pb2.Delta: "delta",
    generation_pb2.OutputFinished: "output_finished",
    generation_pb2.Finished: "finished",
}


def _is_first(owned: OwnedSlot | None) -> bool:
    """Whether a prompt begins a sequence, so that the tokenizer's own tokens go around it."""
    return owned is None or owned.info.state is SlotState.ACQUIRED


def _mode(engine: AsyncEngine, owned: OwnedSlot | None, choices: DecodeChoices, call: str) -> DecodeMode:
    """Return the mode in effect: the slot's own, where there is one. Raises DECODE_MODE_MISMATCH."""
    if owned is None:
        return engine.resolve_mode(choices.decode_mode, call)
    return owned.resolve_mode(choices.decode_mode, call)


def _accepted(
    make: EventMaker, choices: DecodeChoices, event: AcceptedEvent, owned: OwnedSlot | None
) -> generation_pb2.Accepted:
    if owned is None:
        return make.accepted(choices, event)
    num_held = owned.info.num_tokens
    num_prompt = num_held + event.num_prompt_tokens
    left = owned.hosted.engine.info.max_seq_len - num_prompt
    event.seed = choices.seed or 0
    event.max_tokens = left if choices.max_tokens is None else min(left, choices.max_tokens)
    return make.accepted(choices, event, num_prompt=num_prompt, num_cached=num_held + event.num_cached_tokens)


@contextlib.contextmanager
def _in_the_callers_words(
    call: str, spec: generation_service_pb2.GenerationSpec, owned: OwnedSlot | None
) -> Iterator[None]:
    """Say of a refusal from below which call, slot and field of the request it is about."""
    try:
        with explained(call, [owned], options_path="spec.") if owned is not None else contextlib.nullcontext():
            yield
    except ServiceError as error:
        if error.reason is Reason.DECODE_MODE_MISMATCH:
            error.message = error.message.replace(error.metadata.get("call", ""), call)
            error.metadata["call"] = call
        elif error.reason in (Reason.PROMPT_TOO_LONG, Reason.NEVER_FITS):
            error.field = f"spec.{spec.WhichOneof('input')}"
        raise
