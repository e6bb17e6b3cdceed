"""A process of its own for a chat template, which comes with the model file: code from a stranger.

What it costs is bounded by the kernel (template_child.py), whatever the template does: a rendering that takes too much
time or memory ends that process alone, and the next rendering starts another.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Processor time of one rendering: documented as 100 ms, and more for input whose mere size takes longer.
_RENDER_S = 0.1
_SECONDS_PER_CHARACTER = 1e-7

_CHILD = Path(__file__).with_name("template_child.py")
_ENVIRONMENT = ("LD_LIBRARY_PATH", "TZ")  # all that is passed on: the time zone is for strftime_now


class SandboxError(Exception):
    """A rendering failed, or was ended because of what it cost; the message is for people."""


class TemplateSandbox:
    """Renders one template in a process that starts with the first use. Safe to use from several threads.

    Args:
        source: the template.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None

    def problem(self) -> str:
        """Why the template cannot be used; empty while it can. Raises SandboxError when no process can be started."""
        with self._lock:
            return self._start()

    def render(self, context: Mapping[str, Any], max_size: int, input_size: int) -> str:
        """Return the rendered text, at most `max_size` characters.

        Args:
            context: the template's variables: strings, numbers, booleans, None, lists and mappings of these.
            max_size: more than these characters are refused.
            input_size: characters in the context.

        Raises:
            SandboxError: the template failed, refused its input, or used up its budget.
            TypeError, ValueError, RecursionError: the context cannot be written as JSON.
        """
        seconds = _RENDER_S + input_size * _SECONDS_PER_CHARACTER
        request = json.dumps({"context": context, "max_size": max_size, "seconds": seconds}).encode()
        with self._lock:
            if problem := self._start():
                raise SandboxError(problem)
            reply = self._ask(request)
        if reply is None:
            raise SandboxError("template budget used up: the chat template takes too much time or memory here")
        if "error" in reply:
            raise SandboxError(reply["error"])
        return str(reply["text"])

    def close(self) -> None:
        """End the process. Harmless when there is none."""
        with self._lock:
            self._end()

    def _start(self) -> str:
        """Start the process unless it runs, and return what it says of the template."""
        if self._process is not None:
            return ""
        spec = importlib.util.find_spec("minijinja")
        if spec is None or spec.origin is None:
            raise SandboxError("minijinja is not installed")
        libraries = str(Path(spec.origin).parent.parent)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), libraries],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # an interrupt at the terminal is not for it
            )
        except OSError as error:
            raise SandboxError(f"the process that renders chat templates does not start: {error.strerror}") from None
        self._process = process
        self._stop = weakref.finalize(self, lambda: _end(process))
        reply = self._ask(json.dumps(self._source).encode())
        problem = "it takes too much time or memory" if reply is None else str(reply["problem"])
        if problem:
            self._end()
        return problem

    def _ask(self, request: bytes) -> Any:
        """Send one frame and return the answer to it; None where the process has ended instead."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(struct.pack("<Q", len(request)) + request)
            process.stdin.flush()
            head = process.stdout.read(8)
            if len(head) == 8:
                size: int = struct.unpack("<Q", head)[0]
                data = process.stdout.read(size)
                if len(data) == size:
                    return json.loads(data)
        except BrokenPipeError:
            pass
        self._end()
        return None

    def _end(self) -> None:
        self._process = None
        self._stop()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not written yet is for nobody
                pipe.close()
    process.wait()
