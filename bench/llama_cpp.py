"""llama.cpp through its C API, as the peer that results are compared with.

The library is the one inside the PyPI package `xllamacpp` (pinned in requirements/peer.in), which exports it whole; any
other libllama works too: LlamaCpp(path, library="/usr/lib/libllama.so").
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_i32, _u32, _ptr = ctypes.c_int32, ctypes.c_uint32, ctypes.c_void_p


class _Params(ctypes.Structure):
    """A parameter struct by value: larger than any, since a caller may pass more than the callee reads.

    Of a context's, the words that are touched are the first three (n_ctx, n_batch, n_ubatch) and flash_attn_type, the
    last of four that begin as -1. LlamaCpp checks the defaults, so that a changed layout is noticed.
    """

    _fields_ = (("words", _u32 * 256),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", _i32),
        ("token", ctypes.POINTER(_i32)),
        ("embd", _ptr),
        ("pos", ctypes.POINTER(_i32)),
        ("n_seq_id", ctypes.POINTER(_i32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(_i32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def _functions(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the signatures that are used here."""
    signatures = {
        "llama_backend_init": (None, []),
        "llama_log_set": (None, [_ptr, _ptr]),
        "llama_model_default_params": (_Params, []),
        "llama_context_default_params": (_Params, []),
        "llama_model_load_from_file": (_ptr, [ctypes.c_char_p, _Params]),
        "llama_model_free": (None, [_ptr]),
        "llama_model_get_vocab": (_ptr, [_ptr]),
        "llama_vocab_n_tokens": (_i32, [_ptr]),
        "llama_init_from_model": (_ptr, [_ptr, _Params]),
        "llama_free": (None, [_ptr]),
        "llama_set_n_threads": (None, [_ptr, _i32, _i32]),
        "llama_get_memory": (_ptr, [_ptr]),
        "llama_memory_clear": (None, [_ptr, ctypes.c_bool]),
        "llama_memory_seq_rm": (ctypes.c_bool, [_ptr, _i32, _i32, _i32]),
        "llama_batch_init": (_Batch, [_i32, _i32, _i32]),
        "llama_batch_free": (None, [_Batch]),
        "llama_decode": (_i32, [_ptr, _Batch]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [_ptr, _i32]),
        "llama_tokenize": (
            _i32,
            [_ptr, ctypes.c_char_p, _i32, ctypes.POINTER(_i32), _i32, ctypes.c_bool, ctypes.c_bool],
        ),
        "llama_print_system_info": (ctypes.c_char_p, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _ptr)(lambda level, text, data: None)


class LlamaCpp:
    """One model and its sequences; all but `step` and `rewind` are about the first one.

    Args:
        path: The model file.
        num_threads: For prompts and single tokens alike.
        context: Tokens that fit, of all sequences together.
        flash_attention: False: the other of its two ways to compute attention; both are right.
        library: A libllama; None: the one of the installed xllamacpp.
        num_seqs: Sequences side by side.
    """

    def __init__(
        self,
        path: str | Path,
        num_threads: int,
        context: int,
        flash_attention: bool = True,
        library: str | Path | None = None,
        num_seqs: int = 1,
    ) -> None:
        self._lib = _functions(ctypes.CDLL(str(library or import_module("xllamacpp.xllamacpp").__file__)))
        self.version = f"xllamacpp {metadata.version('xllamacpp')}" if library is None else str(library)
        self._lib.llama_log_set(_silent, None)
        self._lib.llama_backend_init()
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.vocab_size = int(self._lib.llama_vocab_n_tokens(self._vocab))
        params = self._lib.llama_context_default_params()
        if list(params.words[:4]) != [512, 2048, 512, 1] or list(params.words[10:14]) != [2**32 - 1] * 4:
            raise RuntimeError(f"llama.cpp's context parameters have changed: they begin with {params.words[:16]}")
        params.words[0], params.words[1], params.words[2] = context, context, min(context, 512)
        params.words[3] = num_seqs
        params.words[13] = int(flash_attention)
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {context} tokens for {path}")
        self._lib.llama_set_n_threads(self._context, num_threads, num_threads)
        self._batch = self._lib.llama_batch_init(context, 0, 1)
        self._num_done = 0

    def __enter__(self) -> Self:
        """Return the model."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Free everything."""
        self.close()

    def close(self) -> None:
        """Free everything; harmless when repeated."""
        if self._model:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._context)
            self._lib.llama_model_free(self._model)
            self._model = None

    @property
    def system_info(self) -> str:
        """What its kernels were built for."""
        return str(self._lib.llama_print_system_info().decode())

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of a text; control tokens are recognised where `parse_special` says so."""
        data = text.encode()
        ids = (_i32 * (len(data) + 8))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), add_special, parse_special)
        if count < 0:
            raise RuntimeError(f"llama.cpp wants room for {-count} tokens")
        return list(ids[:count])

    def logits(self, ids: Sequence[int], first: int = 0) -> Floats:
        """Run `ids` from an empty cache; logits of the positions from `first` on, [len(ids) - first, vocab]."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        self._num_done = 0
        return self.extend(ids, first)

    def extend(self, ids: Sequence[int], first: int = 0) -> Floats:
        """Like logits, behind what was run since."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = self._num_done + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= first
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        self._num_done += len(ids)
        rows = [self._lib.llama_get_logits_ith(self._context, i) for i in range(first, len(ids))]
        return np.stack([np.ctypeslib.as_array(row, (self.vocab_size,)).copy() for row in rows])

    def step(self, tokens: Sequence[tuple[int, int, int]], num_logits: int) -> None:
        """Run (token, position, sequence) triples and wait for the logits of the last `num_logits`."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, seq) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = i >= len(tokens) - num_logits
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        if num_logits:
            self._lib.llama_get_logits_ith(self._context, len(tokens) - 1)

    def rewind(self, seq: int, position: int) -> None:
        """Forget what a sequence holds from a position on."""
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), seq, position, -1)

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """Return the `count` most likely tokens one after another; the lowest id on a tie."""
        out = [int(np.argmax(self.logits(ids, len(ids) - 1)[-1]))]
        while len(out) < count:
            out.append(int(np.argmax(self.extend(out[-1:])[-1])))
        return out
