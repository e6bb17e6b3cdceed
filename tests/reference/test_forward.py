"""The reference itself: facts about the papers' formulas, and what a real model is known to say."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from .forward import Past, causal_attention, load, rms_norm, silu
from .make_cases import CASES, FOLDER, TOKENS
from .rope import F64, Rope


def heads(seed: int, tokens: int = 5, count: int = 2, dim: int = 8) -> F64:
    return np.random.default_rng(seed).normal(size=(tokens, count, dim))


@pytest.mark.parametrize("neighbours", [True, False])
def test_scores_depend_on_the_distance_of_positions_alone(neighbours: bool) -> None:
    rope = Rope(dim=8, neighbours=neighbours)
    q, k = heads(1), heads(2)
    near = np.sum(rope.rotate(q, np.arange(5)) * rope.rotate(k, np.arange(5) + 3), axis=-1)
    far = np.sum(rope.rotate(q, np.arange(5) + 900) * rope.rotate(k, np.arange(5) + 903), axis=-1)
    np.testing.assert_allclose(near, far, rtol=1e-9)


def test_the_two_conventions_are_one_rotation_of_reordered_channels() -> None:
    x, positions = heads(3), np.arange(5)
    to_halves = [0, 2, 4, 6, 1, 3, 5, 7]
    by_neighbours = Rope(dim=8, neighbours=True).rotate(x, positions)
    by_halves = Rope(dim=8, neighbours=False).rotate(x[..., to_halves], positions)
    np.testing.assert_allclose(by_neighbours[..., to_halves], by_halves, rtol=1e-12)


def test_channels_beyond_the_rotary_dimension_pass_through() -> None:
    x = heads(4)
    rotated = Rope(dim=6, neighbours=True).rotate(x, np.arange(5))
    assert (rotated[..., 6:] == x[..., 6:]).all()
    assert (rotated[1:, :, :6] != x[1:, :, :6]).all()


def test_linear_scaling_stretches_positions() -> None:
    x = heads(5)
    scaled = Rope(dim=8, neighbours=True, scaling="linear", factor=4.0)
    plain = Rope(dim=8, neighbours=True)
    np.testing.assert_allclose(scaled.rotate(x, np.arange(5) * 4), plain.rotate(x, np.arange(5)), rtol=1e-12)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain = Rope(dim=64, neighbours=False).frequencies()
    yarn = Rope(dim=64, neighbours=False, scaling="yarn", factor=8.0, original_context=2048).frequencies()
    assert (yarn[:9] == plain[:9]).all()
    np.testing.assert_allclose(yarn[21:], plain[21:] / 8, rtol=1e-12)
    assert ((yarn[9:21] < plain[9:21]) & (yarn[9:21] > plain[9:21] / 8)).all()


def test_attention_sees_neither_the_future_nor_behind_the_window() -> None:
    q, k, v = heads(6, count=4), heads(7), heads(8)
    whole = causal_attention(q, k, v, 0.3, 0)
    for changed in range(5):
        other = v.copy()
        other[changed] += 1
        differs = (causal_attention(q, k, other, 0.3, 0) != whole).any(axis=(1, 2))
        assert differs.tolist() == [i >= changed for i in range(5)]
        windowed = causal_attention(q, k, other, 0.3, 2) != causal_attention(q, k, v, 0.3, 2)
        assert windowed.any(axis=(1, 2)).tolist() == [changed <= i < changed + 2 for i in range(5)]


def test_query_heads_share_the_key_heads_of_their_group() -> None:
    q, k, v = heads(9, count=4), heads(10), heads(11)
    whole = causal_attention(q, k, v, 1.0, 0)
    for head in range(4):
        one = causal_attention(q[:, [head]], k[:, [head // 2]], v[:, [head // 2]], 1.0, 0)
        np.testing.assert_allclose(whole[:, [head]], one, rtol=1e-12)


def test_norm_and_activation() -> None:
    x = np.array([[3.0, -4.0]])
    np.testing.assert_allclose(rms_norm(x, np.array([1.0, 2.0]), 0.0), x / np.sqrt(12.5) * [1, 2])
    values = silu(np.array([-1000.0, 0.0, 1000.0]))
    np.testing.assert_allclose(values, [0, 0, 1000], atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_recorded_logits_are_those_of_the_recorded_models(name: str) -> None:
    recorded = np.frombuffer((FOLDER / f"{name}.logits").read_bytes(), "<f4")
    logits = load(FOLDER / f"{name}.gguf").logits(TOKENS)
    np.testing.assert_allclose(recorded.reshape(logits.shape), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama_window", "llama_wide_head", "qwen2", "qwen3_yarn"])
def test_tokens_behind_a_kept_past_have_the_logits_of_the_whole(name: str) -> None:
    model, past = load(FOLDER / f"{name}.gguf"), Past()
    parts = [model.hidden(part, past) for part in (TOKENS[:3], TOKENS[3:4], TOKENS[4:])]
    np.testing.assert_allclose(np.concatenate(parts), model.hidden(TOKENS), rtol=1e-10, atol=1e-12)
    steps = list(islice(model.greedy_steps(TOKENS), 3))
    best = [int(np.argmax(logits)) for logits in steps]
    assert best == model.greedy(TOKENS, 3)
    np.testing.assert_allclose(steps[-1], model.logits([*TOKENS, *best[:2]])[-1], rtol=1e-9, atol=1e-11)


def test_the_demo_model_knows_the_capital_of_france(demo_model: Path) -> None:
    model = load(demo_model)
    tokens = model.file.values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    prompt = [tokens.index(word) for word in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]
    assert tokens[model.greedy(prompt, 1)[0]] == "ĠParis"
