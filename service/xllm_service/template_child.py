"""Renders one chat template: the program of the process that template_sandbox.py starts; nothing imports it.

The first message brings the template and is answered with its problem, "" for none; each further one brings a context
and is answered with a text or an error. The environment is that of `transformers` (`apply_chat_template`); see
chat_template.py.

A template is code from a stranger, and its instructions are not the only thing that costs: a few of them can double a
list or a nesting fifty times over. So the kernel ends this process when a rendering takes more processor time or memory
than it may: whoever waits for the answer finds the pipe closed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

sys.path.append(sys.argv[1])
from xllm_service.sandbox_child import limited, serve

# Instructions one rendering may take. A long conversation takes thousands; this is some tens of milliseconds.
_FUEL = 1_000_000
_MEMORY_BYTES = 1 << 30  # of address space; the process begins with some 20 MB
_COMPILE_S = 1.0  # processor time


class _Refusal(Exception):
    """What the template's `raise_exception` throws."""


def _raise_exception(message: object = "") -> str:
    raise _Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # note: minijinja's own tojson escapes for HTML, which the models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> Any:
    import minijinja

    environment = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined_behavior="lenient",
        fuel=_FUEL,
        debug=False,
        pycompat=True,
        # note: without this a name ending in .html or .json would switch escaping on.
        auto_escape_callback=lambda _name: None,
    )
    environment.add_filter("tojson", _to_json)
    environment.add_global("raise_exception", _raise_exception)
    environment.add_global("strftime_now", _strftime_now)
    return environment


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _compile(environment: Any, source: str) -> str:
    """Return why the template cannot be used; empty when it can."""
    try:
        with limited(_COMPILE_S):
            environment.add_template("chat", source)
    except Exception as error:
        return _first_line(error) or type(error).__name__
    return ""


def _render(environment: Any, request: dict[str, Any]) -> dict[str, Any]:
    import minijinja

    try:
        with limited(request["seconds"]):
            text = environment.render_template("chat", **request["context"])
    except _Refusal as refusal:
        return {"error": f"the model's chat template refused the messages: {refusal}"}
    except minijinja.TemplateError as error:
        if error.kind == "OutOfFuel":
            return {"error": "template budget used up: the chat template runs too long here"}
        return {"error": f"the model's chat template failed: {_first_line(error)}"}
    except MemoryError:
        return {"error": "template budget used up: the chat template takes too much memory here"}
    except Exception as error:
        # note: from a filter of ours that the template called with unsuitable arguments.
        return {"error": f"the model's chat template failed: {type(error).__name__}: {error}"}
    if len(text) > request["max_size"]:
        return {"error": f"template budget used up: the prompt has {len(text)} characters"}
    return {"text": text}


def _prepare() -> Callable[[Any], Any]:
    environment = _environment()
    is_open = False

    def answer(message: Any) -> Any:
        nonlocal is_open
        if is_open:
            return _render(environment, message)
        is_open = True
        return _compile(environment, message)

    return answer


if __name__ == "__main__":
    serve(_prepare, memory_bytes=_MEMORY_BYTES)
