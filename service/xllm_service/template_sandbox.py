"""A chat template, which comes with the model file and is code from a stranger, rendered in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xllm_service.sandbox import Sandbox, TooMuchError

# Processor time of one rendering: documented as 100 ms, and more for input whose mere size takes longer.
_RENDER_S = 0.1
_SECONDS_PER_CHARACTER = 1e-7

_PROGRAM = Path(__file__).with_name("template_child.py")
_ENVIRONMENT = ("LD_LIBRARY_PATH", "TZ")  # all that is passed on: the time zone is for strftime_now


class TemplateError(Exception):
    """A rendering failed, or was ended because of what it cost; the message is for people."""


class TemplateSandbox:
    """Renders one template in a process that starts with the first use. Safe to use from several threads.

    Args:
        source: the template.
    """

    def __init__(self, source: str) -> None:
        self.process = Sandbox(
            "renders chat templates", _PROGRAM, "minijinja", environment=_ENVIRONMENT, opening=source
        )

    def problem(self) -> str:
        """Why the template cannot be used; empty while it can. Raises SandboxUnavailableError."""
        try:
            problem = str(self.process.open())
        except TooMuchError:
            problem = "it takes too much time, memory or nesting"
        if problem:
            self.process.close()  # nothing will be asked of it
        return problem

    def render(self, context: Mapping[str, Any], max_size: int, input_size: int) -> str:
        """Return the rendered text, at most `max_size` characters.

        Args:
            context: the template's variables: strings, numbers, booleans, None, lists and mappings of these.
            max_size: more than these characters are refused.
            input_size: characters in the context.

        Raises:
            TemplateError: the template failed, refused its input, or used up its budget.
            SandboxUnavailableError: nothing is known of it; the next call starts another process.
            TypeError, ValueError, RecursionError: the context cannot be written as JSON.
        """
        seconds = _RENDER_S + input_size * _SECONDS_PER_CHARACTER
        try:
            reply = self.process.ask({"context": context, "max_size": max_size, "seconds": seconds})
        except TooMuchError:
            raise TemplateError(
                "template budget used up: the chat template takes too much time, memory or nesting here"
            ) from None
        if "error" in reply:
            raise TemplateError(reply["error"])
        return str(reply["text"])

    def close(self) -> None:
        """End the process. Harmless when there is none."""
        self.process.close()
