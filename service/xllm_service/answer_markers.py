"""How a model marks off reasoning and tool calls in what it writes, as its chat template tells."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class CallForm(enum.Enum):
    """How a model writes tool calls."""

    TAGGED = "tagged"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one pair of tags for each call
    LIST = "list"  # [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], to the end
    BARE = "bare"  # {"name": ..., "parameters": {...}} as the whole answer


_REASONING_TAGS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))
_CALL_TAGS = ("<tool_call>", "</tool_call>")
_LIST_TAG = "[TOOL_CALLS]"


@dataclass(frozen=True, slots=True)
class Markers:
    """What a model's answers are read with; everything empty for a model that marks nothing off.

    Attributes:
        reasoning: the tags around a reasoning section.
        call_form: None: the model has no tool calls that can be read.
    """

    reasoning: tuple[str, str] | None = None
    call_form: CallForm | None = None

    @property
    def call_tags(self) -> tuple[str, str] | None:
        """The tags around a tool call; the closing one is "" where a call goes on to the end."""
        if self.call_form is CallForm.TAGGED:
            return _CALL_TAGS
        return (_LIST_TAG, "") if self.call_form is CallForm.LIST else None

    @property
    def texts(self) -> list[str]:
        """Every tag: what a message says must not become one of these."""
        tags = [*(self.reasoning or ()), *(self.call_tags or ())]
        return [tag for tag in tags if tag]

    def starts_in_reasoning(self, template_texts: Sequence[str]) -> bool:
        """Whether a prompt ends inside a reasoning section, by the text in it that the template wrote."""
        if self.reasoning is None:
            return False
        opening, closing = self.reasoning
        text = "\0".join(template_texts)  # pieces that a message's text lies between never make one tag
        return text.rfind(opening) > text.rfind(closing)


def find_markers(template: str) -> Markers:
    """Return the markers that a chat template knows of: it has to write them itself, for earlier turns."""
    reasoning = next((tags for tags in _REASONING_TAGS if tags[1] in template), None)
    form = None
    if _CALL_TAGS[0] in template:
        form = CallForm.TAGGED
    elif _LIST_TAG in template:
        form = CallForm.LIST
    elif '"parameters"' in template and "tools" in template:
        form = CallForm.BARE
    return Markers(reasoning, form)


def marker_ids(markers: Markers, control_pieces: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Return the CONTROL tokens that are markers, which by themselves give no text, with the text they stand for."""
    texts = frozenset(markers.texts)
    return {token_id: piece for token_id, piece in control_pieces if piece in texts}
