"""A conversation in the terminal, whoever computes the answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from xllm_service.cli.answer import Generation, show
from xllm_service.cli.failures import describe
from xllm_service.cli.terminal import say

Messages = list[dict[str, str]]

_HELP = "Ctrl-C stops an answer; /reset begins anew; Ctrl-D or /exit ends."


def converse(answer: Callable[[Messages], Generation], *, system: str | None = None, as_json: bool = False) -> None:
    """Read messages line by line and show the answer to each, until stdin ends.

    Args:
        answer: begins the generation that answers the messages so far.
        system: the system message.
        as_json: print each answer as one JSON object.

    At a terminal a turn that fails is taken back and the conversation goes on; a script's ends with the exception.
    """
    opening: Messages = [{"role": "system", "content": system}] if system is not None else []
    history = list(opening)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        say(_HELP)
    for line in _lines(is_interactive):
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            history = list(opening)
            continue
        if not line.strip():
            continue
        history.append({"role": "user", "content": line})
        try:
            figures = show(answer(history), time.monotonic(), as_json=as_json)
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            history.pop()
            say("\nxllm: stopped; the message was taken back")
        except Exception as error:
            if not is_interactive:
                raise
            history.pop()
            say(f"xllm: {describe(error).message}")
        else:
            history.append({"role": "assistant", "content": figures.text})


def _lines(is_interactive: bool) -> Iterator[str]:
    """Yield the user's lines; at a terminal with editing and history."""
    if not is_interactive:
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() its line editing)
    while True:
        try:
            yield input("> ")
        except EOFError:
            say("")
            return
