"""The GGUF tensor types that are written here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """A tensor type: `number` in the file, and the elements and bytes of a quant block."""

    name: str
    number: int
    block_elems: int
    block_bytes: int

    def size_bytes(self, rows: int, cols: int) -> int:
        """Return the bytes of a matrix whose rows are whole numbers of blocks."""
        if cols % self.block_elems:
            raise ValueError(f"{self.name}: rows of {cols} are not whole blocks of {self.block_elems}")
        return rows * (cols // self.block_elems) * self.block_bytes


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("f32", 0, 1, 4),
        Dtype("f16", 1, 1, 2),
        Dtype("q5_0", 6, 32, 22),
        Dtype("q5_1", 7, 32, 24),
        Dtype("q8_0", 8, 32, 34),
        Dtype("q4_k", 12, 256, 144),
        Dtype("q5_k", 13, 256, 176),
        Dtype("q6_k", 14, 256, 210),
    )
}
