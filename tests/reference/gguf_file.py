"""A small GGUF reader for tests: metadata and dequantised tensors.

The `gguf` package's own reader takes seconds on a real vocabulary, because it keeps every field's
bytes; this one keeps values only. Dequantisation is the package's. Trusts the file: never for input
from outside.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

Value = bool | int | float | str | bytes | list["Value"]

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads one value after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> int | float | bool:
        """One little-endian number."""
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value  # type: ignore[no-any-return]

    def integer(self, code: str) -> int:
        """One integer."""
        return int(self.scalar(code))

    def text(self) -> str | bytes:
        """A string; bytes where it is not UTF-8, as some vocabularies hold."""
        size = self.integer("Q")
        raw = bytes(self.data[self.at : self.at + size])
        self.at += size
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def value(self, kind: int) -> Value:
        """A value of GGUF type `kind`."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            element, count = self.integer("I"), self.integer("Q")
            if element in _SCALARS:
                items = struct.unpack_from(f"<{count}{_SCALARS[element]}", self.data, self.at)
                self.at += struct.calcsize(f"<{count}{_SCALARS[element]}")
                return list(items)
            return [self.value(element) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


class GgufFile:
    """Metadata in `values`, tensor names in `names`, tensors dequantised on demand.

    Args:
        path: A single-file GGUF of version 2 or 3.
    """

    def __init__(self, path: str | Path) -> None:
        with open(path, "rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data)
        if cursor.integer("I") != 0x46554747 or cursor.integer("I") not in (2, 3):
            raise ValueError(f"{path}: not a GGUF file of version 2 or 3")
        num_tensors, num_keys = cursor.integer("Q"), cursor.integer("Q")
        self.values: dict[str, Value] = {}
        for _ in range(num_keys):
            key = str(cursor.text())
            self.values[key] = cursor.value(cursor.integer("I"))
        self._tensors: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        for _ in range(num_tensors):
            name = str(cursor.text())
            dims = [cursor.integer("Q") for _ in range(cursor.integer("I"))]
            kind = GGMLQuantizationType(cursor.integer("I"))
            self._tensors[name] = (tuple(reversed(dims)), kind, cursor.integer("Q"))
        alignment = self.values.get("general.alignment", 32)
        assert isinstance(alignment, int)
        self._start = -(-cursor.at // alignment) * alignment

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._tensors)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The tensor's values, [rows, cols] or [size]; dequantisation is exact in float32."""
        shape, kind, offset = self._tensors[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = shape[-1] // block_elements * block_bytes
        num_rows = int(np.prod(shape[:-1], dtype=np.int64))
        raw = np.frombuffer(self._data, np.uint8, num_rows * row_bytes, self._start + offset)
        values = dequantize(raw.reshape(num_rows, row_bytes), kind)
        return values.astype(np.float32, copy=False).reshape(shape)
