"""Tries constraints: the program of the process that constraint_sandbox.py starts; nothing imports it.

Each frame on stdin, JSON behind a length of eight bytes, brings a grammar and limits; the answer on stdout is its
error, "" for none. A grammar is code from a stranger: whatever it does to the compiler's time, memory or stack it does
here, and the kernel ends this process for it.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

_MEMORY_BYTES = 1 << 30  # of address space; the process begins with some 60 MB
_STACK_BYTES = 1 << 20  # a fraction of what the server's own threads have, so that what passes here passes there
_TRY_S = 1.0  # processor time


class _Bytes:
    """A vocabulary of the 256 bytes and an end: what a grammar costs shows with it, and the model's is not needed."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"\xff<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _problem(tokenizer: Any, request: Any) -> str:
    """Compile and compute the first mask, all that is done before a request runs."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=LLParserLimits(**request["limits"]))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error())


def _read(pipe: BinaryIO) -> Any:
    """Return the next frame; None at the end."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    return json.loads(pipe.read(struct.unpack("<Q", head)[0]))


def _write(pipe: BinaryIO, message: Any) -> None:
    data = json.dumps(message).encode()
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


def main() -> None:
    """Serve until the pipe closes."""
    sys.path.append(sys.argv[1])
    from llguidance import LLTokenizer

    vocabulary: Any = _Bytes()
    tokenizer = LLTokenizer(vocabulary, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_id)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (request := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, _TRY_S)
        problem = _problem(tokenizer, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, problem)


if __name__ == "__main__":
    main()
