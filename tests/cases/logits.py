"""Logits of an engine, position by position, held to the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cyengine import DecodeMode, Engine, EngineConfig, KvType
from cyengine.types import Backend
from tests.reference.forward import load

#: Both ways to decode.
MODES = (DecodeMode.BATCHED, DecodeMode.PER_SLOT)
#: Relative L2 error of a row of logits that stands for right, on these models of two layers.
#:   per-slot   f32 throughout
#:   batched, weights of floats     f16 keys and values are what rounds
#:   batched, quant blocks          int8 activations: half a percent in each of the seven products of a layer
PER_SLOT_TOLERANCE = 1e-5
FLOAT_TOLERANCE = 2e-3
QUANT_TOLERANCE = 2e-2
#: Positions 0 to 40.
TOKENS = [3 + (7 * i + i * i // 3) % 250 for i in range(41)]


def cpu(**options: object) -> EngineConfig:
    """Return a small engine's options."""
    return replace(EngineConfig(backend=Backend.CPU, num_threads=1, max_slots=2), **options)  # type: ignore[arg-type]


def engine_logits(
    path: Path, mode: DecodeMode, ids: Sequence[int] = TOKENS, kv_type: KvType = KvType.F16
) -> npt.NDArray[np.float32]:
    """Return the logits after every position of `ids`, [tokens, vocab]: each from a slot of its own length."""
    rows = []
    with Engine(path, cpu(decode_mode=mode, kv_type=kv_type)) as engine:
        for length in range(1, len(ids) + 1):
            slot = engine.acquire(mode)
            engine.prefill(slot, ids[:length])
            if mode == DecodeMode.PER_SLOT:
                step = engine.decode_step_slot(slot, logits=True)
            else:
                (step,) = engine.decode_step_batch([slot], logits=True)
            assert step.logits is not None
            rows.append(np.frombuffer(step.logits, np.float32))
            engine.release(slot)
    return np.stack(rows)


def relative_errors(found: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Return the relative L2 error of each row."""
    difference = np.linalg.norm(found.astype(np.float64) - expected, axis=1)
    return np.asarray(difference / np.linalg.norm(expected, axis=1))


def check_against_reference(path: Path, ids: Sequence[int] = TOKENS, tolerance: float = FLOAT_TOLERANCE) -> None:
    """Hold both ways to decode to the reference at every position; `tolerance` is the batched way's."""
    expected = load(path).logits(ids)
    assert np.isfinite(expected).all()
    for mode, bound in ((DecodeMode.PER_SLOT, PER_SLOT_TOLERANCE), (DecodeMode.BATCHED, tolerance)):
        found = engine_logits(path, mode, ids)
        assert np.isfinite(found).all(), mode
        assert relative_errors(found, expected).max() <= bound, mode


def check_differs(path: Path, other: npt.NDArray[np.floating]) -> None:
    """Make sure that the mistake a test is about would fail it by far."""
    found = engine_logits(path, DecodeMode.BATCHED)
    assert relative_errors(found, other).max() > 2 * QUANT_TOLERANCE
