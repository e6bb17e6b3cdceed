"""What callers get: the events of a stream, and whole results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xllm_client.v1 import chat_pb2, generation_pb2, generation_service_pb2


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a generation.

    `kind` is the event's name in the contract: accepted, prefill_progress, delta, output_finished or finished.
    `message` is the contract's message with everything it says; the properties below are empty for other kinds than
    delta.
    """

    kind: str
    message: generation_service_pb2.GenerateResponse

    @property
    def text(self) -> str:
        """New text of the answer."""
        return self.message.delta.text

    @property
    def reasoning_text(self) -> str:
        """New text of the reasoning section."""
        return self.message.delta.reasoning_text

    @property
    def tokens(self) -> Sequence[generation_pb2.Token]:
        """The tokens behind the text, where `token_ids` or `top_logprobs` asked for them."""
        return self.message.delta.tokens

    @property
    def output_index(self) -> int:
        """Which output a delta or output_finished belongs to; 0 for the other kinds."""
        finished = self.kind == "output_finished"
        return (self.message.output_finished if finished else self.message.delta).output_index


@dataclass(frozen=True, slots=True)
class Result:
    """A whole generation. The contract's messages say what is not spelled out here."""

    accepted: generation_pb2.Accepted
    outputs: Sequence[generation_pb2.Output]
    usage: generation_pb2.Usage
    timings: generation_pb2.Timings

    @property
    def text(self) -> str:
        """The answer of the first output; empty when a generation was closed before it had one."""
        return self._first.text

    @property
    def reasoning_text(self) -> str:
        """The reasoning section of the first output."""
        return self._first.reasoning_text

    @property
    def finish_reason(self) -> str:
        """What ended the first output, such as "EOS" or "MAX_TOKENS"; "UNSPECIFIED" when nothing did."""
        return finish_reason_name(self._first.finished.reason)

    @property
    def _first(self) -> generation_pb2.Output:
        return self.outputs[0] if self.outputs else generation_pb2.Output()


def finish_reason_name(reason: int) -> str:
    """Return "EOS" for FINISH_REASON_EOS and so on; the number as text for one this client does not know."""
    value = generation_pb2.FinishReason.DESCRIPTOR.values_by_number.get(reason)
    return value.name.removeprefix("FINISH_REASON_") if value is not None else str(reason)


class ResultBuilder:
    """Joins the events of a stream to a Result."""

    def __init__(self) -> None:
        self.accepted: generation_pb2.Accepted | None = None
        self._texts: dict[int, list[str]] = {}
        self._reasoning: dict[int, list[str]] = {}
        self._outputs: dict[int, generation_pb2.Output] = {}
        self._finished = generation_pb2.Finished()

    def add(self, kind: str, message: generation_service_pb2.GenerateResponse) -> None:
        """Take the next event."""
        match kind:
            case "accepted":
                self.accepted = message.accepted
            case "delta":
                self._add_delta(message.delta)
            case "output_finished":
                self._output(message.output_finished.output_index).finished.CopyFrom(message.output_finished)
            case "finished":
                self._finished = message.finished

    def result(self) -> Result:
        """Return what has come so far; complete once the stream has ended OK."""
        for index, output in self._outputs.items():
            output.text = "".join(self._texts.get(index, ()))
            output.reasoning_text = "".join(self._reasoning.get(index, ()))
        outputs = [self._outputs[index] for index in sorted(self._outputs)]
        accepted = self.accepted if self.accepted is not None else generation_pb2.Accepted()
        return Result(accepted, outputs, self._finished.usage, self._finished.timings)

    def _output(self, index: int) -> generation_pb2.Output:
        return self._outputs.setdefault(index, generation_pb2.Output(output_index=index))

    def _add_delta(self, delta: generation_pb2.Delta) -> None:
        output = self._output(delta.output_index)
        if delta.text:
            self._texts.setdefault(delta.output_index, []).append(delta.text)
        if delta.reasoning_text:
            self._reasoning.setdefault(delta.output_index, []).append(delta.reasoning_text)
        output.tokens.extend(delta.tokens)
        for part in delta.tool_calls:
            while len(output.tool_calls) <= part.call_index:
                output.tool_calls.append(chat_pb2.ToolCall())
            call = output.tool_calls[part.call_index]
            call.id = call.id or part.id
            call.name = call.name or part.name
            call.arguments_json += part.arguments_json
