"""Takes a GGUF file apart and writes it again, with whatever damage a test wants.

Layout (version 3, little endian): "GGUF", version u32, number of tensors u64, of keys u64; each key: name, type u32,
value; each tensor: name, number of dimensions u32, dimensions u64 each, type u32, offset u64; then the data, aligned. A
string is its length u64 and its bytes; an array is its element type u32, its length u64 and its elements.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

U8, I8, U16, U32, I32, F32, STRING, ARRAY = 0, 1, 2, 4, 5, 6, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def u16(value: int) -> bytes:
    """Two bytes."""
    return struct.pack("<H", value)


def u32(value: int) -> bytes:
    """Four bytes; negative numbers as they are stored."""
    return struct.pack("<I", value % 2**32)


def u64(value: int) -> bytes:
    """Eight bytes; negative numbers as they are stored."""
    return struct.pack("<Q", value % 2**64)


def text(value: bytes, length: int | None = None) -> bytes:
    """A string, which may lie about its length."""
    return u64(len(value) if length is None else length) + value


def array(element_type: int, elements: list[bytes], length: int | None = None) -> bytes:
    """An array of ready-made elements, which may lie about their number."""
    return u32(element_type) + u64(len(elements) if length is None else length) + b"".join(elements)


@dataclass
class Key:
    """One entry: its value as bytes. `name_length` may lie."""

    name: bytes
    type: int
    value: bytes
    name_length: int | None = None


@dataclass
class Tensor:
    """One tensor. `num_dims` may lie."""

    name: bytes
    dims: list[int]
    type: int
    offset: int
    num_dims: int | None = None


@dataclass
class Gguf:
    """A file in pieces. The two counts may lie; None: they do not."""

    keys: list[Key]
    tensors: list[Tensor]
    data: bytes
    version: int = 3
    num_keys: int | None = None
    num_tensors: int | None = None
    alignment: int = 32
    tail: bytes = field(default=b"")

    @classmethod
    def read(cls, path: Path) -> Gguf:
        """Take a sound file apart."""
        content = path.read_bytes()
        at = 0

        def take(size: int) -> bytes:
            nonlocal at
            at += size
            return content[at - size : at]

        def number(size: int) -> int:
            return int.from_bytes(take(size), "little")

        def value(kind: int) -> bytes:
            if kind == STRING:
                return text(take(number(8)))
            if kind == ARRAY:
                element, count = number(4), number(8)
                return array(element, [value(element) for _ in range(count)])
            return take(_SIZES[kind])

        assert take(4) == b"GGUF"
        version, num_tensors, num_keys = number(4), number(8), number(8)
        keys = []
        for _ in range(num_keys):
            name, kind = take(number(8)), number(4)
            keys.append(Key(name, kind, value(kind)))
        tensors = []
        for _ in range(num_tensors):
            name, num_dims = take(number(8)), number(4)
            dims = [number(8) for _ in range(num_dims)]
            tensors.append(Tensor(name, dims, number(4), number(8)))
        at += -at % 32
        return cls(keys, tensors, content[at:], version)

    def key(self, name: bytes) -> Key:
        """The first entry whose name ends so."""
        return next(key for key in self.keys if key.name.endswith(name))

    def tensor(self, name: bytes) -> Tensor:
        """The first tensor whose name ends so."""
        return next(tensor for tensor in self.tensors if tensor.name.endswith(name))

    def set(self, name: bytes, kind: int, value: bytes) -> None:
        """Replace the value of an entry, or add one."""
        for key in self.keys:
            if key.name == name:
                key.type, key.value = kind, value
                return
        self.keys.append(Key(name, kind, value))

    def to_bytes(self) -> bytes:
        """Put it together again."""
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.keys) if self.num_keys is None else self.num_keys
        out = b"GGUF" + u32(self.version) + u64(num_tensors) + u64(num_keys)
        out += b"".join(text(key.name, key.name_length) + u32(key.type) + key.value for key in self.keys)
        for tensor in self.tensors:
            num_dims = len(tensor.dims) if tensor.num_dims is None else tensor.num_dims
            out += text(tensor.name) + u32(num_dims) + b"".join(map(u64, tensor.dims))
            out += u32(tensor.type) + u64(tensor.offset)
        return out + bytes(-len(out) % self.alignment) + self.data + self.tail
