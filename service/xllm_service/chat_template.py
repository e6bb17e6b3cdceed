"""Chat messages to a prompt, by the model's own Jinja template.

The template comes with the model file, so it is code from a stranger: it runs in minijinja, which has no access to
Python objects, in a process of its own (template_sandbox.py) with a budget of instructions, processor time, memory and
output. The environment is the one of `transformers` (`apply_chat_template`): trim_blocks and lstrip_blocks, one
trailing newline dropped, loop controls, `raise_exception`, `strftime_now`, and a `tojson` that keeps key order,
integers and characters.

Text that came in a message must never become a control token, whichever role or field it came in. Where a message's
text spells one (or ends with the beginning of one, which the next piece could complete), the first character of the
spelling is marked with a noncharacter before rendering. Afterwards the marked characters become untrusted pieces, which
the tokenizer never joins into a control token. All other text renders exactly as it would have. A second rendering, in
which every character that could begin a control token is marked on both sides, finds out whether the template itself
puts one together from a message's text, forwards or backwards; that is refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xllm_service.template_sandbox import TemplateError, TemplateSandbox

# Characters one rendering may put out beyond those that the messages hold.
MAX_GROWTH = 4_000_000
# Noncharacters (Unicode 23.7): for internal use, never part of text. One that no input contains becomes the mark.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
# `{% generation %}` only marks spans for training masks and renders to nothing.
_GENERATION_TAG = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")
# Jinja2 reads every kind of line end in a template as \n, and keeps the one after `{% raw %}`; minijinja does neither.
_LINE_END = re.compile(r"\r\n?")
_RAW_LINE = re.compile(r"(\{%[-+]?\s*raw\s*%\}\n)")

_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
# Where the first character of a text may come out as its last one.
_REVERSAL = re.compile(r"\breverse|::")
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


class TemplateUnusableError(Exception):
    """The model has no chat template, or one that does not compile: chat is off, plain completion works."""


class TemplateRenderError(Exception):
    """The template refused these messages, failed on them, or used up its budget."""


# Messages, tools and arguments of a call.
_Inputs = tuple[Sequence[Mapping[str, Any]], Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of rendered text; only a trusted one may spell control tokens."""

    text: str
    trusted: bool


def _as_jinja2_reads(source: str) -> str:
    source = _RAW_LINE.sub(r"\1\n", _LINE_END.sub("\n", source))
    return _GENERATION_TAG.sub(r"{#\1 #}", source)


def _strings_of(source: str) -> list[str]:
    """Return the strings in the code of a template, longest first, taken apart at what is escaped."""
    strings = [
        part
        for code in _CODE.findall(source)
        for quoted in _STRING.findall(code)
        for part in re.split(r"\\.", quoted[1:-1])
    ]
    return sorted(set(strings), key=len, reverse=True)


class ChatTemplate:
    """A compiled template of one model.

    Args:
        source: the Jinja text; empty means that the model has none.
        control_tokens: the written forms of the model's CONTROL tokens, and of the tags that its answers are read with.
        variables: names the template may use besides those of a call, such as ``bos_token`` and ``eos_token``.
    """

    def __init__(
        self, source: str, control_tokens: Iterable[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        self._control_tokens = sorted({token for token in control_tokens if token}, key=len, reverse=True)
        # A look-ahead, so that spellings which overlap are all found.
        self._spellings = (
            re.compile(f"(?={'|'.join(map(re.escape, self._control_tokens))})") if self._control_tokens else None
        )
        # In both cases, because a template may change it.
        self._firsts = sorted({form for token in self._control_tokens for form in (token[0].lower(), token[0].upper())})
        self._looked_for = [
            string
            for string in _strings_of(source)
            if len(string) > 1 and any(first in string for first in self._firsts)
        ]
        self._reverses = _REVERSAL.search(source) is not None
        self._prefixes = {token[:n] for token in self._control_tokens for n in range(1, len(token))}
        self._longest_prefix = max((len(prefix) for prefix in self._prefixes), default=0)
        self._variables = dict(variables or {})
        self._problem: str | None = None
        self._sandbox = TemplateSandbox(_as_jinja2_reads(source))
        if not source:
            self._problem = "the model file has no tokenizer.chat_template: use text or token_ids input"

    @property
    def problem(self) -> str:
        """Why chat is off for this model; empty where it works. Compiles the template on first use.

        Raises SandboxUnavailableError where that cannot be found out now.
        """
        if self._problem is None:
            problem = self._sandbox.problem()
            self._problem = f"the model's chat template does not compile: {problem}" if problem else ""
        return self._problem

    def close(self) -> None:
        """End the process that renders it."""
        self._sandbox.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        """Render a conversation to pieces that, joined, are the prompt.

        Args:
            messages: each with ``role`` and what the template reads: ``content`` (text, or a list of parts),
                ``tool_calls``, ...
            tools: JSON schemas of functions; an empty list is absent to the template.
            add_generation_prompt: end with the opening of an assistant turn.
            arguments: further template variables, such as ``enable_thinking``.

        Raises:
            TemplateUnusableError: the model has no usable template.
            TemplateRenderError: the template refused the messages, failed, or used up its budget.
            SandboxUnavailableError: the process that renders does not start or does not answer.
        """
        if self.problem:
            raise TemplateUnusableError(self.problem)
        for index, message in enumerate(messages):
            role = message.get("role")
            if not isinstance(role, str) or not _ROLE.fullmatch(role):
                raise TemplateRenderError(
                    f"messages[{index}].role: expected a name of letters, digits and _ . -, found {role!r}"
                )
        try:
            return self._render_safely((messages, tools, arguments or {}), add_generation_prompt)
        except RecursionError:
            raise TemplateRenderError("the messages, tools or template arguments are nested too deeply") from None
        except TemplateError as error:
            raise TemplateRenderError(str(error)) from None
        except (TypeError, ValueError) as error:
            raise TemplateRenderError(f"the template arguments are no JSON: {error}") from None

    def _render_safely(self, inputs: _Inputs, add_generation_prompt: bool) -> list[Piece]:
        mark = self._choose_mark(inputs)
        context = self._context(inputs, lambda text: self._mark_spellings(text, mark))
        strict = self._context(inputs, lambda text: self._mark_beginnings(text, mark))
        # Three times: with a mark on both sides of every character.
        size = 3 * _size(inputs)

        def render(context: dict[str, Any]) -> str:
            context = {**context, "add_generation_prompt": add_generation_prompt}
            return self._sandbox.render(context, MAX_GROWTH + size, size)

        text = render(context)
        # A template that strips, cuts, replaces, reverses or lower-cases may put a spelling together from text that
        # held none. It cannot where every character that might begin one is marked; else it writes as many.
        if strict != context and self._count_spellings(render(strict)) != self._count_spellings(text):
            raise TemplateRenderError("the model's chat template makes a control token of text in a message")
        return _split_marked(text, mark)

    def _context(self, inputs: _Inputs, guard_text: Callable[[str], str]) -> dict[str, Any]:
        messages, tools, arguments = inputs
        context: dict[str, Any] = {
            **self._variables,
            **_guard(dict(arguments), guard_text),
            "messages": [
                {key: value if key == "role" else _guard(value, guard_text) for key, value in message.items()}
                for message in messages
            ],
        }
        if tools:
            context["tools"] = _guard(list(tools), guard_text)
        return context

    def _choose_mark(self, inputs: object) -> str:
        text = json.dumps(inputs, ensure_ascii=False, default=str)
        for mark in _MARKS:
            if mark not in text:
                return mark
        raise TemplateRenderError("the messages use all Unicode noncharacters: remove one of U+FDD0 to U+FDEF")

    def _mark_spellings(self, text: str, mark: str) -> str:
        """Mark where `text` spells a control token, or ends with the beginning of one."""
        if self._spellings is None:
            return text
        starts = {match.start() for match in self._spellings.finditer(text)}
        # Tails that begin a control token: what is rendered after them could complete the spelling.
        for n in range(1, min(self._longest_prefix, len(text)) + 1):
            if text[-n:] in self._prefixes:
                starts.add(len(text) - n)
        if not starts:
            return text
        cuts = [0, *(start + 1 for start in sorted(starts)), len(text)]
        return mark.join(text[begin:end] for begin, end in itertools.pairwise(cuts))

    def _mark_beginnings(self, text: str, mark: str) -> str:
        """Mark all that _mark_spellings does, and every character that could begin a control token.

        Strings that the template looks for stay as they are, and so does what it begins with, so that the template
        takes the same way.
        """
        text = self._mark_firsts(self._mark_spellings(text, mark), mark)
        for string in self._looked_for:
            text = text.replace(self._mark_firsts(string, mark), string)
        return text if self._reverses else text.removeprefix(mark)

    def _mark_firsts(self, text: str, mark: str) -> str:
        for first in self._firsts:
            text = text.replace(first, mark + first + mark)
        return text

    def _count_spellings(self, marked: str) -> int:
        return len(self._spellings.findall(marked)) if self._spellings is not None else 0


def _guard(value: Any, guard_text: Callable[[str], str]) -> Any:
    """Apply `guard_text` to every text in `value`."""
    if isinstance(value, str):
        return guard_text(value)
    if isinstance(value, Mapping):
        return {_guard(key, guard_text): _guard(item, guard_text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_guard(item, guard_text) for item in value]
    return value


def _split_marked(text: str, mark: str) -> list[Piece]:
    if mark not in text:
        return [Piece(text, True)] if text else []
    pieces: list[Piece] = []
    runs = text.split(mark)
    for run in runs[:-1]:
        if len(run) > 1:
            pieces.append(Piece(run[:-1], True))
        if run:
            pieces.append(Piece(run[-1], False))
    if runs[-1]:
        pieces.append(Piece(runs[-1], True))
    return pieces


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(_size(item) for item in value)
    return 8
