"""The child's side of sandbox.py: frames over stdin and stdout, and the limits that the kernel holds this process to.

A frame is JSON behind a length of eight bytes. The first one that goes out says that the process is ready, or why it
never will be; then each message is answered by one. Imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

_TOO_MUCH_STATUS = 3  # as sandbox.py has it: no memory, or too deeply nested


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End this process when the body works for longer, in processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def serve(prepare: Callable[[], Callable[[Any], Any]], *, memory_bytes: int, stack_bytes: int | None = None) -> None:
    """Answer messages until the pipe closes.

    Args:
        prepare: imports what is needed and returns what answers a message.
        memory_bytes: of address space, once it is prepared.
        stack_bytes: of the stack; None leaves it.
    """
    sys.path.append(sys.argv[2])
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        answer = prepare()
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, memory_bytes)
        if stack_bytes is not None:
            _limit(resource.RLIMIT_STACK, stack_bytes)
    except Exception as error:
        # note: no text of the error but a module's name: others hold paths of this machine.
        name = f" ({error.name})" if isinstance(error, ImportError) and error.name else ""
        _write(sink, {"failure": f"{type(error).__name__}{name}"})
        return
    _write(sink, {})
    try:
        while (message := _read(source)) is not None:
            _write(sink, answer(message[0]))
    except (MemoryError, RecursionError):
        os._exit(_TOO_MUCH_STATUS)


def _limit(what: int, value: int) -> None:
    """Set a limit, or keep the one that the server itself is held to where that is lower."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _read(pipe: BinaryIO) -> tuple[Any] | None:
    """Return what the next frame holds; None at the end."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    return (json.loads(pipe.read(struct.unpack("<Q", head)[0])),)


def _write(pipe: BinaryIO, message: Any) -> None:
    data = json.dumps(message).encode()
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()
