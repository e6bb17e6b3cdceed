"""Tries constraints: the program of the process that constraint_sandbox.py starts; nothing imports it.

Each message brings a grammar and limits; the answer is its error, "" for none. A grammar is code from a stranger:
whatever it does to the compiler's time, memory or stack it does here, and the kernel ends this process for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

sys.path.append(sys.argv[1])
from xllm_service.sandbox_child import limited, serve

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


def _prepare() -> Callable[[Any], str]:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    vocabulary: Any = _Bytes()
    tokenizer = LLTokenizer(vocabulary, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_id)

    def problem(request: Any) -> str:
        """Compile and compute the first mask, all that is done before a request runs."""
        with limited(_TRY_S):
            limits = LLParserLimits(**request["limits"])
            matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
            return str(matcher.get_error())

    return problem


if __name__ == "__main__":
    serve(_prepare, memory_bytes=_MEMORY_BYTES, stack_bytes=_STACK_BYTES)
