"""GenerationService: Generate, GenerateOnce and CancelGeneration."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from xllm_client.v1 import (
    generation_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    sampling_pb2,
    slot_pb2,
)
from xllm_service import convert
from xllm_service.admission import GenerationState, LiveGeneration, state_value
from xllm_service.engine import (
    AcceptedEvent,
    AsyncEngine,
    FinishedEvent,
    FinishReason,
    Model,
    PrefillEvent,
    TokenEvent,
)
from xllm_service.errors import InvalidFieldError, Reason, ServiceError
from xllm_service.interceptors import principal
from xllm_service.servicers.served import Served
from xllm_service.validation import ValidRequest, validate

_PROGRESS_INTERVAL_S = 0.5  # between two PrefillProgress events
_LONG_TEXT = 4096  # characters; longer text is read in a worker thread

_SAMPLER_ORDER = (
    sampling_pb2.SAMPLER_STAGE_LOGIT_BIAS,
    sampling_pb2.SAMPLER_STAGE_PENALTIES,
    sampling_pb2.SAMPLER_STAGE_MASK,
    sampling_pb2.SAMPLER_STAGE_TEMPERATURE,
    sampling_pb2.SAMPLER_STAGE_TOP_K,
    sampling_pb2.SAMPLER_STAGE_TOP_P,
    sampling_pb2.SAMPLER_STAGE_MIN_P,
)
_FINISH_REASONS = {
    FinishReason.NONE: generation_pb2.FINISH_REASON_MAX_DURATION,  # the only failure that is an ordinary end
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: generation_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: generation_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.MAX_TOKENS: generation_pb2.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_FULL: generation_pb2.FINISH_REASON_CONTEXT_FULL,
}

# Takes one event of a stream: Accepted, PrefillProgress, Delta, OutputFinished or Finished.
Send = Callable[[Any], Awaitable[None]]


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
        output = reply.outputs.add()
        texts: list[str] = []

        async def collect(event: Any) -> None:
            if isinstance(event, generation_pb2.Delta):
                texts.append(event.text)
                output.tokens.extend(event.tokens)
            elif isinstance(event, generation_pb2.Accepted):
                reply.accepted.CopyFrom(event)
            elif isinstance(event, generation_pb2.OutputFinished):
                output.finished.CopyFrom(event)
            elif isinstance(event, generation_pb2.Finished):
                reply.usage.CopyFrom(event.usage)
                reply.timings.CopyFrom(event.timings)

        await self._run("GenerateOnce", request.spec, context, collect)
        output.text = "".join(texts)
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

    async def _run(self, call: str, spec: generation_service_pb2.GenerationSpec, context: Any, send: Send) -> None:
        """Check a request, run it and send its events."""
        arrival = time.monotonic()
        engine = self._served.get_engine(spec.model)
        request = validate(spec, self._served.limits(engine.model))
        task = asyncio.current_task()
        assert task is not None
        live = LiveGeneration(
            request.request_id or secrets.token_hex(16),
            principal.get(),
            hashlib.sha256(spec.SerializeToString(deterministic=True)).digest(),
            task.cancel,
        )
        live.receipt.model = self._served.name
        self._served.generations.add(live)
        is_over = False
        code, reason = grpc.StatusCode.INTERNAL, Reason.INTERNAL.value
        # note: grpc.aio cancels this task when the client goes away; should it miss that, this does not.
        context.add_done_callback(lambda _: None if is_over else task.cancel())
        try:
            await _check_digest(engine.model, request.expected_digest)
            prompt = await _prompt(engine.model, request)
            await self._stream(engine, prompt, request, live, context, _Sender(self._served, send, live, arrival))
            code, reason = grpc.StatusCode.OK, ""
        except asyncio.CancelledError:
            failure = live.failure or _why_cancelled(context)
            code, reason = failure.code, failure.reason.value
            if live.failure is None:
                raise
            task.uncancel()
            raise live.failure from None
        except ServiceError as error:
            code, reason = error.code, error.reason.value
            _name_what_was_asked(error, call, spec)
            raise
        finally:
            is_over = True
            live.state = _STATES.get(code, GenerationState.FAILED)
            self._served.generations.remove(live, code, reason)

    async def _stream(
        self,
        engine: AsyncEngine,
        prompt: Sequence[int],
        request: ValidRequest,
        live: LiveGeneration,
        context: Any,
        sender: _Sender,
    ) -> None:
        def stalled() -> None:
            live.end(ServiceError(Reason.CLIENT_STALLED, "the client did not read its stream for too long"))

        events = engine.generate(prompt, request, deadline_s=context.time_remaining(), on_stall=stalled)
        async with aclosing(events):
            async for progress in events:
                if progress.accepted is not None:
                    live.state = GenerationState.RUNNING
                    await sender.accepted(engine, request, progress.accepted)
                if progress.prefill is not None and not progress.tokens and progress.finished is None:
                    await sender.prefill(progress.prefill)
                if progress.tokens or (progress.finished is not None and progress.finished.text):
                    await sender.delta(engine.model, request, progress.tokens, progress.finished)
                if progress.finished is not None:
                    await sender.finished(request, progress.finished)


_EVENT_FIELDS = {
    generation_pb2.Accepted: "accepted",
    generation_pb2.PrefillProgress: "prefill_progress",
    generation_pb2.Delta: "delta",
    generation_pb2.OutputFinished: "output_finished",
    generation_pb2.Finished: "finished",
}
_STATES = {
    grpc.StatusCode.OK: GenerationState.FINISHED,
    grpc.StatusCode.CANCELLED: GenerationState.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: GenerationState.TIMED_OUT,
}


class _Sender:
    """Turns one generation's engine events into events of the contract, in their order."""

    def __init__(self, served: Served, send: Send, live: LiveGeneration, arrival: float) -> None:
        self._served = served
        self._send = send
        self._live = live
        self._arrival = arrival
        self._accepted_at = arrival
        self._progress_at = float("-inf")
        self._first_token_at: float | None = None

    async def accepted(self, engine: AsyncEngine, request: ValidRequest, event: AcceptedEvent) -> None:
        self._accepted_at = time.monotonic()
        queue_s = self._accepted_at - self._arrival
        self._served.metrics.queue_time.observe(queue_s)
        self._live.receipt.usage.CopyFrom(convert.usage_message(event.num_prompt_tokens, event.num_cached_tokens, 0))
        self._live.receipt.timings.queue.CopyFrom(convert.duration(queue_s))
        await self._send(
            generation_pb2.Accepted(
                request_id=self._live.request_id,
                model=self._served.name,
                model_digest=engine.model.digest.value,
                decode_mode=convert.decode_mode(int(event.decode_mode)),
                slot=slot_pb2.SlotRef(name=f"{self._served.name}/{event.slot}", epoch=event.epoch),
                effective=_effective(request, event),
                num_prompt_tokens=event.num_prompt_tokens,
                num_cached_tokens=event.num_cached_tokens,
                queue_time=convert.duration(queue_s),
            )
        )

    async def prefill(self, event: PrefillEvent) -> None:
        now = time.monotonic()
        if now - self._progress_at < _PROGRESS_INTERVAL_S:
            return
        self._progress_at = now
        await self._send(
            generation_pb2.PrefillProgress(
                num_processed_tokens=event.num_computed_tokens,
                num_prompt_tokens=event.num_prompt_tokens,
                elapsed=convert.duration(now - self._accepted_at),
            )
        )

    async def delta(
        self, model: Model, request: ValidRequest, tokens: Sequence[TokenEvent], finished: FinishedEvent | None
    ) -> None:
        if tokens and self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self._served.metrics.time_to_first_token.observe(self._first_token_at - self._arrival)
        if tokens:
            self._served.metrics.coalesced.observe(len(tokens))
            self._live.receipt.usage.num_generated_tokens += len(tokens)
        text = "".join(token.text for token in tokens) + (finished.text if finished is not None else "")
        records = [_token(model, request, token) for token in tokens] if request.wants_tokens else ()
        await self._send(generation_pb2.Delta(text=text, tokens=records, num_tokens=len(tokens)))

    async def finished(self, request: ValidRequest, event: FinishedEvent) -> None:
        if event.num_generated_tokens > 1:
            self._served.metrics.inter_token_latency.observe(event.decode_s / (event.num_generated_tokens - 1))
        end = generation_pb2.OutputFinished(
            reason=_FINISH_REASONS[event.finish_reason], num_tokens=event.num_generated_tokens
        )
        if event.matched_stop is not None:
            end.stop_string = request.stop_strings[event.matched_stop]
        elif event.matched_token_id is not None:
            end.stop_token_id = event.matched_token_id
        await self._send(end)
        timings = generation_pb2.Timings(
            queue=convert.duration(self._accepted_at - self._arrival),
            prefill=convert.duration(event.prefill_s),
            decode=convert.duration(event.decode_s),
            total=convert.duration(time.monotonic() - self._arrival),
        )
        if self._first_token_at is not None:
            timings.time_to_first_token.CopyFrom(convert.duration(self._first_token_at - self._arrival))
        usage = convert.usage_message(event.num_prompt_tokens, event.num_cached_tokens, event.num_generated_tokens)
        self._live.receipt.outputs.append(end)
        self._live.receipt.usage.CopyFrom(usage)
        self._live.receipt.timings.CopyFrom(timings)
        await self._send(generation_pb2.Finished(usage=usage, timings=timings))


def _name_what_was_asked(error: ServiceError, call: str, spec: generation_service_pb2.GenerationSpec) -> None:
    """Say of a refusal from below, in the caller's words, which call and which field it is about."""
    if error.reason is Reason.DECODE_MODE_MISMATCH:
        error.message = error.message.replace(error.metadata.get("call", ""), call)
        error.metadata["call"] = call
    elif error.reason is Reason.TEMPLATE_REFUSED:
        error.field = f"spec.{error.field}"
    elif error.reason in (Reason.PROMPT_TOO_LONG, Reason.NEVER_FITS):
        error.field = f"spec.{spec.WhichOneof('input')}"


def _why_cancelled(context: Any) -> ServiceError:
    """Tell a deadline that has passed from a client that has gone."""
    left = context.time_remaining()
    if left is not None and left <= 0:
        return ServiceError(Reason.DEADLINE_EXCEEDED, "the call's deadline has passed")
    return ServiceError(Reason.CANCELLED, "the client has gone")


async def _check_digest(model: Model, expected: str) -> None:
    """Raise MODEL_DIGEST_MISMATCH for another model; waits where its digest is not known yet."""
    if not expected:
        return
    actual = model.digest.value or await asyncio.to_thread(model.digest.wait)
    if actual != expected:
        raise ServiceError(
            Reason.MODEL_DIGEST_MISMATCH,
            f"the model served is {actual}, not {expected}",
            metadata={"expected": expected, "actual": actual},
        )


async def _prompt(model: Model, request: ValidRequest) -> Sequence[int]:
    """Return the token ids of whatever the prompt came as; long work goes to a worker thread."""
    if request.token_ids is not None:
        return request.token_ids
    chat = request.chat
    if chat is not None:

        def read_chat() -> list[int]:
            pieces = model.render(
                chat.messages,
                tools=chat.tools,
                add_generation_prompt=chat.add_generation_prompt,
                arguments=chat.arguments,
            )
            model.check_tokenizer()
            return model.encode_pieces(pieces)

        ids = await asyncio.to_thread(read_chat)
    else:
        text = request.text or ""

        def read_text() -> list[int]:
            model.check_tokenizer()
            return model.encode(text, add_special=request.add_special_tokens, parse_special=request.parse_special)

        ids = await asyncio.to_thread(read_text) if len(text) > _LONG_TEXT else read_text()
    if not ids:
        path = "spec.chat" if chat is not None else "spec.text"
        raise InvalidFieldError([(path, "gives no token at all; a prompt needs at least one")])
    return ids


def _effective(request: ValidRequest, event: AcceptedEvent) -> generation_pb2.EffectiveParameters:
    effective = generation_pb2.EffectiveParameters(
        sampling=sampling_pb2.SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            logit_bias=request.logit_bias,
            seed=event.seed,
        ),
        stop=sampling_pb2.StopOptions(
            strings=request.stop_strings,
            token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens,
        ),
        output=sampling_pb2.OutputOptions(token_ids=request.wants_tokens, top_logprobs=request.top_logprobs),
        limits=sampling_pb2.Limits(max_tokens=event.max_tokens),
        priority=request.priority,
        num_outputs=1,
        sampler_order=_SAMPLER_ORDER,
    )
    if request.max_queue_s is not None:
        effective.limits.max_queue_time.CopyFrom(convert.duration(request.max_queue_s))
    if request.max_duration_s is not None:
        effective.limits.max_duration.CopyFrom(convert.duration(request.max_duration_s))
    if request.top_logprobs is not None:
        effective.logprob_stage = sampling_pb2.LOGPROB_STAGE_MASKED
    return effective


def _token(model: Model, request: ValidRequest, event: TokenEvent) -> generation_pb2.Token:
    token = generation_pb2.Token(id=event.token_id, piece=b"" if model.is_control(event.token_id) else event.piece)
    if request.top_logprobs is None or event.logprob is None:
        return token
    token.logprob = event.logprob
    for place, candidate in enumerate(event.candidates, 1):
        if candidate.token_id == event.token_id:
            token.rank = place
        piece = b"" if model.is_control(candidate.token_id) else model.piece(candidate.token_id)
        token.candidates.add(id=candidate.token_id, piece=piece, logprob=candidate.logprob)
    return token
