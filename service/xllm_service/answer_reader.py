"""Tells reasoning, answer and tool calls apart in what a model writes, as it is written.

What may still become a tag or a stop string is held back; nothing else is. White space right behind a tag belongs to
the markup, and so does white space around a tool call. A tool call whose JSON cannot be read is text. Stop strings are
looked for in the answer alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from xllm_service.answer_markers import CallForm, Markers
from xllm_service.tool_calls import ToolCall, read_calls


class _State(enum.Enum):
    START = enum.auto()  # nothing but white space so far: a reasoning section may begin
    REASONING = enum.auto()
    ANSWER = enum.auto()
    CALL = enum.auto()
    STOPPED = enum.auto()


@dataclass(slots=True)
class Parts:
    """What a piece of the output brought.

    Attributes:
        text: of the answer.
        reasoning: of the reasoning section.
        calls: tool calls that are complete, with their index in the output.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[int, ToolCall]] = field(default_factory=list)

    def add(self, other: Parts) -> None:
        """Put what came later behind it."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.calls += other.calls

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


class AnswerReader:
    """Reads one output.

    Args:
        markers: the model's.
        starts_in_reasoning: the prompt ends inside a reasoning section.
        has_tools: the request offers tools; without, tool calls are text.
        stops: stop strings.

    Attributes:
        matched_stop: index of the stop string that ended the answer; None while none did.
        num_reasoning_tokens: pieces that were fed while a reasoning section was open.
    """

    def __init__(
        self, markers: Markers, *, starts_in_reasoning: bool = False, has_tools: bool = False, stops: Sequence[str] = ()
    ) -> None:
        self.matched_stop: int | None = None
        self.num_reasoning_tokens = 0
        self._reasoning = markers.reasoning
        self._call_form = markers.call_form if has_tools else None
        self._call_tags = markers.call_tags if has_tools else None
        self._stops = tuple(stops)
        self._state = _State.REASONING if starts_in_reasoning else _State.START
        self._held = ""  # read, and not yet decided about
        self._drops_space = False  # white space behind a tag
        self._can_reason = markers.reasoning is not None
        self._num_searched = 0  # characters of an open call without its closing tag
        self._num_calls = 0
        self._pending_stop = ""  # of the answer: what may become a stop string

    @property
    def in_reasoning(self) -> bool:
        """A reasoning section is open."""
        return self._state is _State.REASONING

    def feed(self, text: str, *, looks_for_stops: bool = True) -> Parts:
        """Read the text of one token. After a stop string has matched nothing more comes out."""
        if self.in_reasoning:
            self.num_reasoning_tokens += 1
        self._held += text
        return self._read(looks_for_stops, is_end=False)

    def finish(self) -> Parts:
        """Return what was held back: the output is over."""
        parts = self._read(True, is_end=True)
        if self._state is not _State.STOPPED:
            parts.text += self._pending_stop
            self._pending_stop = ""
        return parts

    def _read(self, looks_for_stops: bool, *, is_end: bool) -> Parts:
        parts = Parts()
        while True:
            before = (self._state, self._held)
            match self._state:
                case _State.START:
                    self._read_start(is_end)
                case _State.REASONING:
                    self._read_reasoning(parts, is_end)
                case _State.ANSWER:
                    self._answer(parts, self._take_answer(is_end), looks_for_stops)
                case _State.CALL:
                    self._read_call(parts, looks_for_stops, is_end)
                case _State.STOPPED:
                    self._held = ""
            if (self._state, self._held) == before:
                return parts

    def _read_start(self, is_end: bool) -> None:
        self._drop_space()
        begun = self._held.lstrip()
        opening = self._reasoning[0] if self._reasoning is not None and self._can_reason else ""
        is_bare = self._call_form is CallForm.BARE
        if opening and begun.startswith(opening):
            self._held, self._state, self._drops_space = begun[len(opening) :], _State.REASONING, True
        elif not is_end and opening.startswith(begun) and (opening or is_bare):
            return  # undecided
        else:
            self._state = _State.CALL if is_bare and begun.startswith("{") else _State.ANSWER

    def _read_reasoning(self, parts: Parts, is_end: bool) -> None:
        assert self._reasoning is not None
        self._drop_space()
        closing = self._reasoning[1]
        end = self._held.find(closing)
        if end >= 0:
            parts.reasoning += self._held[:end]
            self._held, self._state, self._drops_space = self._held[end + len(closing) :], _State.START, True
            self._can_reason = False
            return
        kept = 0 if is_end else _overlap(self._held, closing)
        parts.reasoning += self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]

    def _take_answer(self, is_end: bool) -> str:
        """Return what is certain to be text of the answer, and go on to a tool call where one begins."""
        self._drop_space()
        if self._call_tags is None:
            taken, self._held = self._held, ""
            return taken
        opening = self._call_tags[0]
        begin = self._held.find(opening)
        if begin >= 0:
            taken = self._held[:begin].rstrip()
            self._held, self._state = self._held[begin + len(opening) :], _State.CALL
            return taken
        if is_end:
            taken, self._held = self._held, ""
            return taken
        kept = _overlap(self._held, opening)
        certain = self._held[: len(self._held) - kept].rstrip()  # white space before a call is not text
        self._held = self._held[len(certain) :]
        return certain

    def _read_call(self, parts: Parts, looks_for_stops: bool, is_end: bool) -> None:
        tags = self._call_tags or ("", "")
        closing = tags[1]
        end = self._held.find(closing, self._num_searched) if closing else -1
        if end < 0 and not is_end:
            self._num_searched = max(0, len(self._held) - len(closing))
            return
        self._num_searched = 0
        written = self._held if end < 0 else self._held[:end]
        rest = "" if end < 0 else self._held[end + len(closing) :]
        calls = read_calls(written)
        self._held, self._state = rest, _State.ANSWER
        if calls is None:
            self._answer(parts, tags[0] + written + (closing if end >= 0 else ""), looks_for_stops)
            return
        self._drops_space = True
        for call in calls:
            parts.calls.append((self._num_calls, call))
            self._num_calls += 1

    def _drop_space(self) -> None:
        if self._drops_space:
            self._held = self._held.lstrip()
            self._drops_space = not self._held

    def _answer(self, parts: Parts, text: str, looks_for_stops: bool) -> None:
        """Put text into the answer, up to a stop string."""
        if not looks_for_stops or not self._stops:
            parts.text += self._pending_stop + text
            self._pending_stop = ""
            return
        text = self._pending_stop + text
        # Of the stop strings that end first, the longest: as if bytes came one by one.
        ends = [
            (at + len(stop), -len(stop), index)
            for index, stop in enumerate(self._stops)
            if (at := text.find(stop)) >= 0
        ]
        if ends:
            end, minus_size, self.matched_stop = min(ends)
            parts.text += text[: end + minus_size]
            self._pending_stop, self._held, self._state = "", "", _State.STOPPED
            return
        kept = max(_overlap(text, stop) for stop in self._stops)
        parts.text += text[: len(text) - kept]
        self._pending_stop = text[len(text) - kept :]


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` begin `tag`, less than the whole of it."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
