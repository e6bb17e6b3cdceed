"""The output of a conversation, read as reasoning, answer and tool calls on its way into deltas."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from array import array
from collections.abc import Sequence

from xllm_client.v1 import generation_pb2
from xllm_service.answer_reader import AnswerReader, Parts
from xllm_service.engine import AcceptedEvent, FinishedEvent, FinishReason, Model, Progress, Status
from xllm_service.servicers.clock import Clock
from xllm_service.validation import DecodeChoices


class Answer:
    """One output of a call whose prompt is a conversation.

    Stop strings are looked for here, in the answer alone, so the engine gets none of them; where one is found the call
    ends, and tokens that the engine has computed beyond it are neither sent nor counted.

    Args:
        model: whose output it is.
        choices: of the request.
        prompt: its tokens.
        starts_in_reasoning: they end inside a reasoning section.
        has_tools: the request offers tools.
    """

    def __init__(
        self, model: Model, choices: DecodeChoices, prompt: Sequence[int], starts_in_reasoning: bool, has_tools: bool
    ) -> None:
        self._model = model
        self._choices = choices
        self._reader = AnswerReader(
            model.markers,
            starts_in_reasoning=starts_in_reasoning,
            has_tools=has_tools,
            stops=choices.stop_strings,
        )
        self._num_tokens = 0
        self._accepted: AcceptedEvent | None = None
        # note: the same request gives the same ids, and two turns of a conversation give different ones.
        self._call_prefix = hashlib.sha256(array("q", prompt).tobytes()).hexdigest()[:12]

    @staticmethod
    def engine_choices(choices: DecodeChoices) -> DecodeChoices:
        """Return what the engine is asked for in place of `choices`."""
        return dataclasses.replace(choices, stop_strings=())

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning section so far."""
        return self._reader.num_reasoning_tokens

    def read(self, progress: Progress, clock: Clock) -> Parts:
        """Read what has come; where a stop string ends the answer, `progress` then ends at its last token."""
        if progress.accepted is not None:
            self._accepted = progress.accepted
        parts = Parts()
        for place, token in enumerate(progress.tokens, 1):
            looks = self._num_tokens >= self._choices.min_tokens
            self._num_tokens += 1
            text = token.text or self._model.marker_ids.get(token.token_id, "")
            parts.add(self._reader.feed(text, looks_for_stops=looks))
            if self._reader.matched_stop is not None:
                del progress.tokens[place:]
                progress.finished = self._stopped(clock)
                return parts
        if progress.finished is not None:
            if progress.finished.text:
                parts.add(self._reader.feed(progress.finished.text))
            parts.add(self._reader.finish())
            if self._reader.matched_stop is not None:
                progress.finished = self._stopped(clock)
        return parts

    def tool_calls(self, parts: Parts) -> list[generation_pb2.ToolCallDelta]:
        """Return the tool calls as a delta carries them."""
        return [
            generation_pb2.ToolCallDelta(
                call_index=index,
                id=f"call_{self._call_prefix}_{index}",
                name=call.name,
                arguments_json=call.arguments,
            )
            for index, call in parts.calls
        ]

    def _stopped(self, clock: Clock) -> FinishedEvent:
        """Return the end that a stop string makes, with what was used up to there."""
        accepted = self._accepted
        assert accepted is not None
        now = time.monotonic()
        first = clock.first_token or now
        return FinishedEvent(
            request_id=accepted.request_id,
            status=Status.OK,
            finish_reason=FinishReason.STOP_STRING,
            matched_token_id=None,
            matched_stop=self._reader.matched_stop,
            text="",
            message="",
            num_prompt_tokens=accepted.num_prompt_tokens,
            num_cached_tokens=accepted.num_cached_tokens,
            num_generated_tokens=self._num_tokens,
            queue_s=accepted.queue_s,
            prefill_s=first - (clock.accepted or first),
            decode_s=now - first,
            ttft_s=first - (clock.submitted or clock.arrival),
        )
