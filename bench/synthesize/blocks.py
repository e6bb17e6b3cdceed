"""Random quant blocks of GGUF's types: valid, zero mean, and about the standard deviation asked for.

A model made of them behaves like one made of Gaussian weights, at the speed of a random number generator. Layouts are
those of cuda_src/src/tensor/quant.h.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def random_blocks(rng: np.random.Generator, num_blocks: int, std: float, dtype: str) -> Bytes:
    """Return [num_blocks, bytes per block] of a type in RANDOM_TYPES."""
    return _MAKERS[dtype](rng, num_blocks, std)


def _raw(rng: np.random.Generator, num_blocks: int, size: int) -> Bytes:
    return rng.integers(0, 256, (num_blocks, size), dtype=np.uint8)


def _half(values: npt.NDArray[np.float64]) -> Bytes:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _scale(rng: np.random.Generator, num_blocks: int, mean: float) -> npt.NDArray[np.float64]:
    return mean * rng.uniform(0.5, 1.5, num_blocks)


def _sign(rng: np.random.Generator, num_blocks: int) -> npt.NDArray[np.float64]:
    return rng.choice(np.array([-1.0, 1.0]), num_blocks)


def _q2_k(rng: np.random.Generator, n: int, std: float) -> Bytes:
    # x = d * s * q - dmin * m with m = s and dmin = 1.5 d: q - 1.5 has zero mean and deviation 1.12.
    sub_scale = rng.integers(8, 16, (n, 16), dtype=np.uint8)
    d = _scale(rng, n, std / (1.12 * 11.7))
    return np.hstack([sub_scale | sub_scale << 4, _raw(rng, n, 64), _half(d), _half(1.5 * d)])


def _q3_k(rng: np.random.Generator, n: int, std: float) -> Bytes:
    # Any bits: sub-scales of -32..31 (deviation 18.5) times -4..3 (2.35).
    return np.hstack([_raw(rng, n, 108), _half(_scale(rng, n, std / (18.5 * 2.35)))])


def _packed_scales(sub: Bytes) -> Bytes:
    """Pack 8 six-bit sub-scales per block, each used as scale and as minimum, as q4_k and q5_k do."""
    low, high = sub[:, :4], sub[:, 4:]
    first = low | (high >> 4) << 6
    return np.hstack([first, first, (high & 15) | (high & 15) << 4])


def _q4_k(rng: np.random.Generator, n: int, std: float) -> Bytes:
    # As q2_k: minimum = 7.5 times the scale; q - 7.5 has deviation 4.61, the sub-scales about 42.
    sub = rng.integers(16, 64, (n, 8), dtype=np.uint8)
    d = _scale(rng, n, std / (4.61 * 42))
    return np.hstack([_half(d), _half(7.5 * d), _packed_scales(sub), _raw(rng, n, 128)])


def _q5_k(rng: np.random.Generator, n: int, std: float) -> Bytes:
    sub = rng.integers(16, 64, (n, 8), dtype=np.uint8)
    d = _scale(rng, n, std / (9.23 * 42))
    return np.hstack([_half(d), _half(15.5 * d), _packed_scales(sub), _raw(rng, n, 32 + 128)])


def _q6_k(rng: np.random.Generator, n: int, std: float) -> Bytes:
    # Any bits: sub-scales of -128..127 (deviation 73.9) times -32..31 (18.5).
    return np.hstack([_raw(rng, n, 208), _half(_scale(rng, n, std / (73.9 * 18.5)))])


def _iq4_nl(rng: np.random.Generator, n: int, std: float) -> Bytes:
    # The code book's mean is not zero (-6), so blocks change sign.
    d = _scale(rng, n, std / 69) * _sign(rng, n)
    return np.hstack([_half(d), _raw(rng, n, 16)])


def _iq4_xs(rng: np.random.Generator, n: int, std: float) -> Bytes:
    return np.hstack([_half(_scale(rng, n, std / (69 * 18.5))), _raw(rng, n, 134)])


def _q5_0(rng: np.random.Generator, n: int, std: float) -> Bytes:
    # q - 16 has mean -0.5, so blocks change sign.
    d = _scale(rng, n, std / 9.23) * _sign(rng, n)
    return np.hstack([_half(d), _raw(rng, n, 20)])


def _q5_1(rng: np.random.Generator, n: int, std: float) -> Bytes:
    d = _scale(rng, n, std / 9.23)
    return np.hstack([_half(d), _half(-15.5 * d), _raw(rng, n, 20)])


def _q8_0(rng: np.random.Generator, n: int, std: float) -> Bytes:
    d = _scale(rng, n, std / 73.9) * _sign(rng, n)
    return np.hstack([_half(d), _raw(rng, n, 32)])


_MAKERS: dict[str, Callable[[np.random.Generator, int, float], Bytes]] = {
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
}

RANDOM_TYPES = tuple(_MAKERS)
