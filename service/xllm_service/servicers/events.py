"""The events of the contract, made of the engine's; shared by every call that generates."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from xllm_client.v1 import generation_pb2, sampling_pb2, slot_pb2
from xllm_service import convert
from xllm_service.admission import LiveGeneration
from xllm_service.answer_reader import Parts
from xllm_service.engine import (
    AcceptedEvent,
    ConstraintComplete,
    FinishedEvent,
    FinishReason,
    Model,
    PrefillEvent,
    Status,
    TokenEvent,
)
from xllm_service.metrics import Metrics
from xllm_service.servicers.answers import Answer
from xllm_service.servicers.clock import Clock
from xllm_service.servicers.ownership import Seat, slot_name
from xllm_service.servicers.roster import Hosted
from xllm_service.validation import DecodeChoices

_PROGRESS_INTERVAL_S = 0.5  # between two PrefillProgress events

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


class EventMaker:
    """Turns what the engine says of one call into events of the contract, and keeps its receipt.

    Args:
        hosted: what it runs on.
        live: whose receipt is kept.
        metrics: where times are counted.
        arrival: when the call came.
        num_outputs: of one prompt.
    """

    def __init__(
        self, hosted: Hosted, live: LiveGeneration, metrics: Metrics, arrival: float, num_outputs: int = 1
    ) -> None:
        self.clock = Clock(arrival)
        self._num_outputs = num_outputs
        self._hosted = hosted
        self._live = live
        self._metrics = metrics
        self._progress_at = float("-inf")
        self._reasoning: dict[int, int] = {}  # tokens of it, by output

    @property
    def model(self) -> Model:
        """Whose tokens they are."""
        return self._hosted.engine.model

    def seat(self, event: AcceptedEvent) -> None:
        """Note that the call runs in a slot from now on; again, for a further slot of the same call."""
        self._hosted.seats[event.slot] = Seat(event.epoch, self._live.request_id, self._live.owner)
        if self.clock.accepted is None:
            self.clock.accepted = time.monotonic()
            self._metrics.queue_time.observe(self.clock.queue_s)
            self._live.receipt.timings.queue.CopyFrom(convert.duration(self.clock.queue_s))

    def accepted(
        self, choices: DecodeChoices, event: AcceptedEvent, *, num_prompt: int | None = None, num_cached: int = 0
    ) -> generation_pb2.Accepted:
        """The first event; `num_prompt` and `num_cached` stand in where the prompt is in the slot already."""
        self.seat(event)
        if num_prompt is None:
            num_prompt, num_cached = event.num_prompt_tokens, event.num_cached_tokens
        usage = convert.usage_message(event.num_prompt_tokens, event.num_cached_tokens, 0)
        self._live.receipt.usage.MergeFrom(usage)
        return generation_pb2.Accepted(
            request_id=self._live.request_id,
            model=self._hosted.name,
            model_digest=self.model.digest.value,
            decode_mode=convert.decode_mode(int(event.decode_mode)),
            slot=slot_pb2.SlotRef(name=slot_name(self._hosted.name, event.slot), epoch=event.epoch),
            effective=_effective(choices, event, self._num_outputs),
            num_prompt_tokens=num_prompt,
            num_cached_tokens=num_cached,
            queue_time=convert.duration(self.clock.queue_s),
        )

    def prefill(self, event: PrefillEvent) -> generation_pb2.PrefillProgress | None:
        """How far a prompt is; None when the last one was told a moment ago."""
        now = time.monotonic()
        if now - self._progress_at < _PROGRESS_INTERVAL_S:
            return None
        self._progress_at = now
        return generation_pb2.PrefillProgress(
            num_processed_tokens=event.num_computed_tokens,
            num_prompt_tokens=event.num_prompt_tokens,
            elapsed=convert.duration(now - (self.clock.accepted or now)),
        )

    def delta(
        self,
        choices: DecodeChoices,
        tokens: Sequence[TokenEvent],
        finished: FinishedEvent | None,
        output_index: int = 0,
        answer: Answer | None = None,
        parts: Parts | None = None,
    ) -> generation_pb2.Delta | None:
        """New output; None when there is none. `parts`: it was read by `answer`, and stands in for the tokens' text."""
        if not tokens and not parts and (finished is None or not finished.text or answer is not None):
            return None
        if tokens and self.clock.first_token is None:
            self.clock.first_token = time.monotonic()
            self._metrics.time_to_first_token.observe(self.clock.first_token - self.clock.arrival)
        if tokens:
            now = time.monotonic()
            if self.clock.last_delta is not None:
                self._metrics.inter_token_latency.observe(now - self.clock.last_delta)
            self.clock.last_delta = now
            self._metrics.coalesced.observe(len(tokens))
            self._live.receipt.usage.num_generated_tokens += len(tokens)
        text = "".join(token.text for token in tokens) + (finished.text if finished is not None else "")
        records = [_token(self.model, choices, token) for token in tokens] if choices.wants_tokens else ()
        delta = generation_pb2.Delta(output_index=output_index, text=text, tokens=records, num_tokens=len(tokens))
        if answer is not None and parts is not None:
            delta.text, delta.reasoning_text = parts.text, parts.reasoning
            delta.tool_calls.extend(answer.tool_calls(parts))
            self._reasoning[output_index] = answer.num_reasoning_tokens
            self._live.receipt.usage.num_reasoning_tokens = sum(self._reasoning.values())
        return delta

    def output_finished(
        self, choices: DecodeChoices, event: FinishedEvent, output_index: int = 0
    ) -> generation_pb2.OutputFinished:
        """One output is complete."""
        if event.num_generated_tokens > 1:
            self._metrics.time_per_output_token.observe(event.decode_s / (event.num_generated_tokens - 1))
        end = generation_pb2.OutputFinished(
            output_index=output_index,
            reason=_reason(event),
            num_tokens=event.num_generated_tokens,
        )
        if event.matched_stop is not None:
            end.stop_string = choices.stop_strings[event.matched_stop]
        elif event.matched_token_id is not None:
            end.stop_token_id = event.matched_token_id
        self._live.receipt.outputs.append(end)
        return end

    def finished(self, events: Sequence[FinishedEvent]) -> generation_pb2.Finished:
        """The last event, with sums over all outputs."""
        usage, timings = self.used(events), self.timings(events)
        return generation_pb2.Finished(usage=usage, timings=timings)

    def used(self, events: Sequence[FinishedEvent]) -> generation_pb2.Usage:
        """What a call has used, for its end and its receipt."""
        prompts = events[:1] if self._num_outputs > 1 else events  # outputs of one request share theirs
        usage = convert.usage_message(
            sum(event.num_prompt_tokens for event in prompts),
            sum(event.num_cached_tokens for event in prompts),
            sum(event.num_generated_tokens for event in events),
        )
        usage.num_reasoning_tokens = sum(self._reasoning.values())
        usage.num_preemptions = sum(event.num_preemptions for event in events)
        self._live.receipt.usage.CopyFrom(usage)
        return usage

    def timings(self, events: Sequence[FinishedEvent]) -> generation_pb2.Timings:
        """Where a call's time went, for its end and its receipt."""
        clock = self.clock
        # note: by the engine's own clock, so that queue and prefill together never exceed the time to first token.
        before_s = (clock.submitted or clock.arrival) - clock.arrival
        timings = generation_pb2.Timings(
            queue=convert.duration(before_s + max((event.queue_s for event in events), default=0.0)),
            prefill=convert.duration(max((event.prefill_s for event in events), default=0.0)),
            decode=convert.duration(max((event.decode_s for event in events), default=0.0)),
            blocked_on_client=convert.duration(clock.blocked_s),
            total=convert.duration(time.monotonic() - clock.arrival),
        )
        if clock.first_token is not None:
            timings.time_to_first_token.CopyFrom(convert.duration(clock.first_token - clock.arrival))
        self._live.receipt.timings.CopyFrom(timings)
        return timings


def _reason(event: FinishedEvent) -> generation_pb2.FinishReason:
    if event.status is Status.LEASE_LOST:
        return generation_pb2.FINISH_REASON_CANCELLED
    if isinstance(event, ConstraintComplete):
        return generation_pb2.FINISH_REASON_CONSTRAINT_COMPLETE
    return _FINISH_REASONS[event.finish_reason]


def _effective(choices: DecodeChoices, event: AcceptedEvent, num_outputs: int) -> generation_pb2.EffectiveParameters:
    effective = generation_pb2.EffectiveParameters(
        sampling=sampling_pb2.SamplingParams(
            temperature=choices.temperature,
            top_k=choices.top_k,
            top_p=choices.top_p,
            min_p=choices.min_p,
            repetition_penalty=choices.repetition_penalty,
            frequency_penalty=choices.frequency_penalty,
            presence_penalty=choices.presence_penalty,
            logit_bias=choices.logit_bias,
            seed=event.seed,
        ),
        stop=sampling_pb2.StopOptions(
            strings=choices.stop_strings,
            token_ids=choices.stop_token_ids,
            ignore_eos=choices.ignore_eos,
            min_tokens=choices.min_tokens,
        ),
        output=sampling_pb2.OutputOptions(token_ids=choices.wants_tokens, top_logprobs=choices.top_logprobs),
        limits=sampling_pb2.Limits(max_tokens=event.max_tokens),
        priority=choices.priority,
        num_outputs=num_outputs,
        sampler_order=_SAMPLER_ORDER,
    )
    if choices.max_queue_s is not None:
        effective.limits.max_queue_time.CopyFrom(convert.duration(choices.max_queue_s))
    if choices.max_duration_s is not None:
        effective.limits.max_duration.CopyFrom(convert.duration(choices.max_duration_s))
    if choices.top_logprobs is not None:
        effective.logprob_stage = sampling_pb2.LOGPROB_STAGE_MASKED
    return effective


def _token(model: Model, choices: DecodeChoices, event: TokenEvent) -> generation_pb2.Token:
    token = generation_pb2.Token(id=event.token_id, piece=b"" if model.is_control(event.token_id) else event.piece)
    if choices.top_logprobs is None or event.logprob is None:
        return token
    token.logprob = event.logprob
    if event.rank is not None:
        token.rank = event.rank
    for candidate in event.candidates:
        piece = b"" if model.is_control(candidate.token_id) else model.piece(candidate.token_id)
        token.candidates.add(id=candidate.token_id, piece=piece, logprob=candidate.logprob)
    return token
