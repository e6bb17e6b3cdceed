"""Grammars that strangers send, tried in a process of their own before the server compiles them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xllm_service.sandbox import Sandbox, TooMuchError

_PROGRAM = Path(__file__).with_name("constraint_child.py")
_TOO_MUCH = "compiling it takes too much time, memory or nesting; make it smaller"


class ConstraintSandbox:
    """Tries grammars in a process that starts with the first use. Safe to use from several threads."""

    def __init__(self) -> None:
        self.process = Sandbox("tries constraints", _PROGRAM, "llguidance")

    def problem(self, grammar: str, limits: Mapping[str, Any]) -> str:
        """Return why a grammar cannot be used; empty when it can, at a bounded cost.

        Args:
            grammar: in llguidance's own form.
            limits: arguments of LLParserLimits.

        Raises SandboxUnavailableError; the next call starts another process.
        """
        try:
            return str(self.process.ask({"grammar": grammar, "limits": dict(limits)}))
        except TooMuchError:
            return _TOO_MUCH

    def close(self) -> None:
        """End the process. Harmless when there is none."""
        self.process.close()
