"""Tool calls out of the JSON that a model wrote, with the arguments' text kept as it was."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# NaN and Infinity, which Python reads, are no JSON, and the arguments' text is passed on as it is.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = re.compile(r"[ \t\r\n]*")
_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wants to be made.

    Attributes:
        name: the function.
        arguments: the JSON text of an object, as the model wrote it.
    """

    name: str
    arguments: str


def read_calls(text: str) -> list[ToolCall] | None:
    """Read one call, or a list of them. None: it is no such JSON, and the text stands for itself."""
    try:
        at = _skip(text, 0)
        calls: list[ToolCall] = []
        if text.startswith("[", at):
            at = _skip(text, at + 1)
            while not text.startswith("]", at):
                call, at = _read_call(text, at)
                calls.append(call)
                at = _skip(text, at)
                if text.startswith(",", at):
                    at = _skip(text, at + 1)
                elif not text.startswith("]", at):
                    return None
            at += 1
        else:
            call, at = _read_call(text, at)
            calls.append(call)
        return calls if calls and _skip(text, at) == len(text) else None
    except (ValueError, RecursionError):
        return None


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _read_call(text: str, at: int) -> tuple[ToolCall, int]:
    """Read an object with a name and its arguments, and where it ends. Raises ValueError."""
    if not text.startswith("{", at):
        raise ValueError("no object")
    at = _skip(text, at + 1)
    values: dict[str, tuple[object, str]] = {}
    while not text.startswith("}", at):
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or not text.startswith(":", at):
            raise ValueError("no key")
        begin = _skip(text, at + 1)
        value, at = _DECODER.raw_decode(text, begin)
        values[key] = (value, text[begin:at])
        at = _skip(text, at)
        if text.startswith(",", at):
            at = _skip(text, at + 1)
        elif not text.startswith("}", at):
            raise ValueError("no end")
    name, _ = values.get("name", (None, ""))
    arguments, written = values.get("arguments", values.get("parameters", ({}, "{}")))
    if isinstance(arguments, str):  # some models write the object's text into a string
        written, arguments = arguments, _DECODER.decode(arguments)
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or not isinstance(arguments, dict):
        raise ValueError("no call")
    return ToolCall(name, written), at + 1
