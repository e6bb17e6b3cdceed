"""Rotary position embedding in float64, from the papers (arXiv:2104.09864, arXiv:2309.00071)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    """Every number that shapes the rotation.

    Attributes:
        dim: Leading channels of a head that rotate; the rest pass through.
        neighbours: Pairs are (2i, 2i + 1); otherwise (i, i + dim / 2).
        base: Base of the frequencies.
        scaling: "none", "linear" or "yarn".
        factor: By how much the context was stretched.
        original_context: Tokens the model was first trained with (yarn).
        extrapolation: Share of the unscaled frequencies where they are kept (yarn).
        attention_factor: Multiplies cos and sin.
        beta_fast: Pairs that turn more often over the original context are kept (yarn).
        beta_slow: Pairs that turn less often are interpolated (yarn).
        divisors: What each frequency is divided by (Llama-3), [dim / 2].
    """

    dim: int
    neighbours: bool
    base: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    original_context: float = 0.0
    extrapolation: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    divisors: F64 = field(default_factory=lambda: np.ones(1))

    def frequencies(self) -> F64:
        """Radians per position of each pair, [dim / 2]."""
        theta = self.base ** (-2.0 * np.arange(self.dim // 2) / self.dim) / self.divisors
        if self.scaling == "linear":
            return np.asarray(theta / self.factor)
        if self.scaling == "yarn":
            # The pair whose wavelength fits `turns` times into the original context.
            low, high = (
                self.dim * np.log(self.original_context / (turns * 2 * np.pi)) / (2 * np.log(self.base))
                for turns in (self.beta_fast, self.beta_slow)
            )
            low, high = max(np.floor(low), 0), min(np.ceil(high), self.dim - 1)
            ramp = np.clip((np.arange(self.dim // 2) - low) / max(high - low, 1e-3), 0, 1)
            kept = (1 - ramp) * self.extrapolation
            return np.asarray((1 - kept) * theta / self.factor + kept * theta)
        return np.asarray(theta)

    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.scaling == "yarn" and self.extrapolation != 0:
            return float(self.attention_factor * (0.1 * np.log(self.factor) + 1))
        return self.attention_factor

    def rotate(self, x: F64, positions: NDArray[np.int64]) -> F64:
        """Rotate the heads x [tokens, heads, head_dim] of tokens at `positions` [tokens]."""
        angle = positions[:, None, None] * self.frequencies()
        cos, sin = np.cos(angle) * self.magnitude(), np.sin(angle) * self.magnitude()
        half = self.dim // 2
        if self.neighbours:
            first, second = slice(0, self.dim, 2), slice(1, self.dim, 2)
        else:
            first, second = slice(0, half), slice(half, self.dim)
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out
