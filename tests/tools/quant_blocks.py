"""Matrices in GGUF's tensor types: quantised where the gguf package can, random valid blocks where it cannot.

Random blocks have zero mean and about the standard deviation asked for, so a model made of them behaves like one made
of Gaussian weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from bench.synthesize.blocks import random_blocks as _random_blocks

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

#: Types that hold any matrix of floats (within their precision).
FLOAT_TYPES = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")

#: Types that the gguf package reads but cannot write.
RANDOM_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")


def qtype(dtype: str) -> GGMLQuantizationType:
    """Return the gguf package's number of a type named as the field does, in lower case: "q4_1"."""
    return GGMLQuantizationType[dtype.upper()]


def block_elems(dtype: str) -> int:
    """Return how many elements a block of this type holds; rows are whole numbers of blocks."""
    return int(GGML_QUANT_SIZES[qtype(dtype)][0])


def encode(values: Floats, dtype: str) -> npt.NDArray[np.generic]:
    """Return `values` [rows, cols] or [cols] as the file stores them; dtype is one of FLOAT_TYPES."""
    if dtype == "f32":
        return np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "f16":
        return np.ascontiguousarray(values, dtype=np.float16)
    encoded: npt.NDArray[np.generic] = quantize(np.ascontiguousarray(values, np.float32), qtype(dtype))
    return encoded


def random_blocks(rng: np.random.Generator, rows: int, cols: int, std: float, dtype: str) -> Bytes:
    """Return [rows, bytes per row] of random valid blocks of a type in RANDOM_TYPES."""
    num_blocks = rows * cols // block_elems(dtype)
    return _random_blocks(rng, num_blocks, std, dtype).reshape(rows, -1)
