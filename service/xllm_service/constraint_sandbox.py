"""A process of its own for grammars that strangers send: compiling one can take minutes, gigabytes or a whole stack.

What it costs is bounded by the kernel (constraint_child.py): a grammar that takes too much ends that process alone, and
the next one starts another.
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

_CHILD = Path(__file__).with_name("constraint_child.py")
_TOO_MUCH = "compiling it takes too much time, memory or nesting; make it smaller"
# For one answer, by the clock. The child's own bound is processor time, which one that waits does not use up; this is
# far above what that takes on a machine with other work.
_ANSWER_S = 30.0


class SandboxUnavailableError(Exception):
    """The process does not start or does not answer: nothing is known of the grammar. The message has a remedy."""


class ConstraintSandbox:
    """Tries grammars in a process that starts with the first use. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None

    def problem(self, grammar: str, limits: Mapping[str, Any]) -> str:
        """Return why a grammar cannot be used; empty when it can, at a bounded cost.

        Args:
            grammar: in llguidance's own form.
            limits: arguments of LLParserLimits.

        Raises SandboxUnavailableError; the next call starts another process.
        """
        request = json.dumps({"grammar": grammar, "limits": dict(limits)}).encode()
        with self._lock:
            return self._ask(self._start(), request)

    def close(self) -> None:
        """End the process. Harmless when there is none."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            spec = importlib.util.find_spec("llguidance")
            assert spec is not None and spec.origin is not None
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_CHILD), str(Path(spec.origin).parent.parent)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                    start_new_session=True,  # an interrupt at the terminal is not for it
                )
            except OSError as error:
                raise SandboxUnavailableError(
                    f"the process that tries constraints does not start: {error.strerror}; retry later, or give the"
                    " server more memory, processes or file descriptors"
                ) from None
            self._process = process
            self._stop = weakref.finalize(self, lambda: _end(process))
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], request: bytes) -> str:
        answer_s = _ANSWER_S
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            process.kill()  # which ends the exchange, whichever side waits

        timer = threading.Timer(answer_s, give_up)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:
            raise SandboxUnavailableError(
                "no thread can be started to try a constraint; retry later, or give the server more of them"
            ) from None
        try:
            answer = _exchange(process, request)
        finally:
            timer.cancel()
            timer.join()
        if answer is None or is_late.is_set():
            self._end()
        if answer is not None:
            return answer
        if is_late.is_set():
            raise SandboxUnavailableError(
                f"the process that tries constraints gave no answer in {answer_s:g} s; retry later"
            )
        return _TOO_MUCH

    def _end(self) -> None:
        self._process = None
        self._stop()


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> str | None:
    """Send one frame and return the answer to it; None where the process has ended instead."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(struct.pack("<Q", len(request)) + request)
        process.stdin.flush()
        head = process.stdout.read(8)
        if len(head) == 8:
            size: int = struct.unpack("<Q", head)[0]
            data = process.stdout.read(size)
            if len(data) == size:
                return str(json.loads(data))
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not written yet is for nobody
                pipe.close()
    process.wait()
