"""A small GGUF writer: metadata and tensor table first, then tensors of any size in order.

Layout (version 3, little-endian): magic, version, counts, keys, tensor infos, then each tensor at a multiple of 32 from
the start of the data. Strings are a u64 length and their bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from bench.synthesize.dtypes import DTYPES

Value = bool | int | float | str | Sequence[int] | Sequence[str]

_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the table: `shape` is [rows, cols] or [size]."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return DTYPES[self.dtype].size_bytes(rows, self.shape[-1])


def padding(size: int) -> int:
    """Return the bytes that follow `size` bytes up to the alignment."""
    return -size % _ALIGNMENT


def write_header(file: BinaryIO, metadata: Mapping[str, Value], tensors: Sequence[TensorEntry]) -> None:
    """Write everything before the data, padding included.

    The caller then writes each tensor's data, in order, each followed by padding(size) bytes. Numbers become u32 and
    f32, arrays i32 or strings.
    """
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset = 0
    for tensor in tensors:
        dims = tuple(reversed(tensor.shape))
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, DTYPES[tensor.dtype].number, offset))
        offset += tensor.size_bytes + padding(tensor.size_bytes)
    header = b"".join(parts)
    file.write(header + bytes(padding(len(header))))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value[0], int):
        return struct.pack("<IIQ", _ARRAY, _I32, len(value)) + np.asarray(value, "<i4").tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_string(str(text)) for text in value)
