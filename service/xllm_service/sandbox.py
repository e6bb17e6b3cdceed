"""A process of its own for work on text from strangers, which may take years, gigabytes or a whole stack.

What a piece of work costs is bounded by the kernel (sandbox_child.py): one that takes too much ends that process alone,
and the next one starts another. Three outcomes are told apart: an answer, work that took too much (its sender's
affair), and a process that does not start, does not answer or is ended from outside (this machine's).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = Path(__file__).parent.parent
_START_S = 30.0  # by the clock, for a process to be ready; far above what its imports take on a busy machine
_HEAD = struct.Struct("<Q")
_READ_BYTES = 1 << 20

# How a process ends that the work before it has cost more than it may: the exit status of sandbox_child.py for memory
# and nesting, and the signals of a timer that ran out, of a stack that overflowed, of an allocation that failed.
TOO_MUCH_STATUS = 3
_TOO_MUCH_SIGNALS = frozenset(
    {signal.SIGPROF, signal.SIGVTALRM, signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL}
)


class SandboxUnavailableError(Exception):
    """The process does not start, does not answer or was ended from outside: nothing is known of the work.

    The message has the cause and a remedy.
    """


class TooMuchError(Exception):
    """The work took more time, memory or nesting than it may."""


class Sandbox:
    """Does one kind of work in a process that starts with the first use. Safe to use from several threads.

    Args:
        does: the kind of work, for messages: "renders chat templates".
        program: its source file, which runs `sandbox_child.serve`.
        library: name of the package that it needs besides the standard library.
        answer_s: longest time for one answer, by the clock. The program's own bounds are of processor time, which one
            that waits does not use up.
        environment: names of the environment that are passed on.
        opening: a message that each process gets before any other; its answer is what `open` returns.
    """

    def __init__(
        self,
        does: str,
        program: Path,
        library: str,
        *,
        answer_s: float = 30.0,
        environment: Sequence[str] = ("LD_LIBRARY_PATH",),
        opening: Any = None,
    ) -> None:
        self.answer_s = answer_s
        self._does = does
        self._program = program
        self._library = library
        self._environment = environment
        self._opening = opening
        self._opened: Any = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None

    @property
    def process_id(self) -> int | None:
        """Of the process; None while there is none."""
        return self._process.pid if self._process is not None else None

    def open(self) -> Any:
        """Start the process unless it runs, and return its answer to the opening message.

        Raises SandboxUnavailableError; TooMuchError where the opening message takes too much.
        """
        with self._lock:
            self._start()
            return self._opened

    def ask(self, message: Any) -> Any:
        """Return the answer to a message, both in the values of JSON.

        Raises SandboxUnavailableError, TooMuchError; the next call starts another process. TypeError, ValueError,
        RecursionError: the message cannot be written as JSON.
        """
        frame = _frame(message)
        with self._lock:
            return self._exchange(self._start(), frame, self.answer_s)

    def close(self) -> None:
        """End the process. Harmless when there is none."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # while nothing was asked of it: no fault of what is asked next
        if self._process is not None:
            return self._process
        spec = importlib.util.find_spec(self._library)
        if spec is None or spec.origin is None:
            raise self._unavailable(f"does not start: {self._library} is not installed")
        paths = [str(_PACKAGES), str(Path(spec.origin).parent.parent)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(self._program), *paths],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in self._environment if name in os.environ},
                start_new_session=True,  # an interrupt at the terminal is not for it
            )
        except OSError as error:
            raise self._unavailable(f"does not start: {error.strerror}") from None
        self._process = process
        self._stop = weakref.finalize(self, _end, process)
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        try:
            greeting = _talk(process, b"", time.monotonic() + _START_S)
        except TimeoutError:
            self._end()
            raise self._unavailable(f"was not ready in {_START_S:g} s") from None
        if greeting is None:
            raise self._unavailable(f"{self._end()} before it was ready")
        if problem := json.loads(greeting).get("failure"):
            self._end()
            raise self._unavailable(f"does not start: {problem}")
        if self._opening is not None:
            self._opened = self._exchange(process, _frame(self._opening), self.answer_s)
        return process

    def _exchange(self, process: subprocess.Popen[bytes], frame: bytes, answer_s: float) -> Any:
        try:
            answer = _talk(process, frame, time.monotonic() + answer_s)
        except TimeoutError:
            self._end()
            raise self._unavailable(f"gave no answer in {answer_s:g} s") from None
        except BaseException:
            self._end()  # what is on its way would answer the next question
            raise
        if answer is not None:
            return json.loads(answer)
        how = self._end()
        if process.returncode == TOO_MUCH_STATUS or -(process.returncode or 0) in _TOO_MUCH_SIGNALS:
            raise TooMuchError
        raise self._unavailable(how)

    def _unavailable(self, what: str) -> SandboxUnavailableError:
        return SandboxUnavailableError(
            f"the process that {self._does} {what}; retry later, or give the server more memory, processes or file"
            " descriptors"
        )

    def _end(self) -> str:
        """End the process and return how it ended, where it did so by itself."""
        process, self._process, self._opened = self._process, None, None
        if process is None:
            return ""
        # note: its pipes close a moment before it is gone, and how it went decides whose fault it is.
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.stdout is not None and _is_at_end(process.stdout.fileno()):
                process.wait(1.0)
        self._stop()
        status = process.returncode
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"


def _is_at_end(descriptor: int) -> bool:
    """Whether the other side of a pipe is closed, and nothing of it is left to read."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(events & select.POLLHUP and not events & select.POLLIN for _, events in poll.poll(0))


def _frame(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return _HEAD.pack(len(data)) + data


def _talk(process: subprocess.Popen[bytes], frame: bytes, end_at: float) -> bytes | None:
    """Send a frame and return what the next one brings; None: the process has ended instead. Raises TimeoutError."""
    assert process.stdin is not None and process.stdout is not None
    try:
        rest = memoryview(frame)
        while rest:
            _await(process.stdin.fileno(), select.POLLOUT, end_at)
            rest = rest[os.write(process.stdin.fileno(), rest) :]
    except BrokenPipeError:
        return None
    received = bytearray()
    size = _HEAD.size
    while len(received) < size:
        _await(process.stdout.fileno(), select.POLLIN, end_at)
        some = os.read(process.stdout.fileno(), _READ_BYTES)
        if not some:
            return None
        received += some
        if len(received) >= _HEAD.size:
            size = _HEAD.size + _HEAD.unpack_from(received)[0]
    return bytes(received[_HEAD.size : size])


def _await(descriptor: int, what: int, end_at: float) -> None:
    """Wait until a pipe can be written or read, or is closed. Raises TimeoutError."""
    poll = select.poll()
    poll.register(descriptor, what)
    if not poll.poll(max(0.0, end_at - time.monotonic()) * 1000):
        raise TimeoutError


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()
