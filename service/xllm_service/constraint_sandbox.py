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
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), str(Path(spec.origin).parent.parent)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                start_new_session=True,  # an interrupt at the terminal is not for it
            )
            self._process = process
            self._stop = weakref.finalize(self, lambda: _end(process))
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], request: bytes) -> str:
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
        self._end()
        return _TOO_MUCH

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
