"""Field cases of the model: rotation, head sizes, dropped tensors, large numbers, padding rows (numbers 8 to 12)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cyengine import DecodeMode, Engine, KvType, Model, Request, SamplingParams, TokenEvent, errors
from tests.cases.logits import (
    FLOAT_TOLERANCE,
    MODES,
    QUANT_TOLERANCE,
    TOKENS,
    check_against_reference,
    check_differs,
    cpu,
    engine_logits,
    relative_errors,
)
from tests.reference.forward import load
from tests.tools.make_tiny_gguf import ARCHS, make_tiny_gguf

# ---- 8: attention is noise although the file loads

SIX_HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "hidden_size": 48, "dtype": "f16"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 6), (6, 1), (4, 2)])
def test_each_architecture_rotates_its_own_pairs(tmp_path: Path, arch: str, heads: int, kv_heads: int) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, **SIX_HEADS | {"arch": arch, "num_heads": heads, "num_kv_heads": kv_heads})
    check_against_reference(path)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_other_pairs_would_fail(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, arch=arch, **SIX_HEADS)
    reference = load(path)
    rope = reference.config.rope
    reference.config = replace(reference.config, rope=replace(rope, neighbours=not rope.neighbours))
    check_differs(path, reference.logits(TOKENS))
    with Model(path) as model:
        (pairs,) = (fact for fact in model.facts() if fact.name == "rope_pairs")
        assert ("2i" in pairs.value) == (arch == "llama")


@pytest.mark.parametrize(
    "options",
    [
        {"rope_scaling": "linear", "rope_factor": 4.0},
        {"rope_scaling": "yarn", "rope_factor": 4.0},
        {"rope_freqs": True},
        {"rope_freq_base": 1e6},
        {"rope_dim": 4},
    ],
    ids=lambda options: ",".join(options),
)
def test_each_rotation_key_is_applied(tmp_path: Path, options: dict[str, Any]) -> None:
    path, plain = tmp_path / "model.gguf", tmp_path / "plain.gguf"
    base = SIX_HEADS | {"context_length": 32}
    make_tiny_gguf(path, **base | options)
    make_tiny_gguf(plain, **base)
    check_against_reference(path, TOKENS[:31])
    with_key, without = (engine_logits(p, DecodeMode.PER_SLOT, TOKENS[:31]) for p in (path, plain))
    assert np.abs(with_key - without).max() > 1e-2


# ---- 9: head size is not width / heads


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rope_dim", [0, 16, 12, 2])
def test_the_key_length_is_the_head_size(tmp_path: Path, arch: str, rope_dim: int) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, arch=arch, dtype="f16", hidden_size=40, num_heads=4, head_dim=16, rope_dim=rope_dim)
    check_against_reference(path)
    with Model(path) as model:
        assert model.info.head_dim == 16
        shapes = {tensor.name: tensor.dims for tensor in model.tensors()}
        assert shapes["blk.0.attn_q.weight"] == (40, 64)
        assert shapes["blk.0.attn_output.weight"] == (64, 40)
        # Two layers, K and V, two KV heads of 16, two bytes each.
        assert model.plan(cpu()).kv_bytes_per_token == 2 * 2 * 2 * 16 * 2


def test_without_the_key_it_is_width_over_heads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, dtype="f16", hidden_size=40, num_heads=4)
    check_against_reference(path)
    with Model(path) as model:
        assert model.info.head_dim == 10
        assert any(fact.name == "head_dim" and "key_length" in fact.source for fact in model.facts())


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"llama.attention.value_length": 8}, "attention.value_length"),
        ({"llama.rope.dimension_count": 18}, "rope.dimension_count"),
        ({"llama.attention.key_length": 24}, "attn_q.weight|value_length"),
    ],
)
def test_head_sizes_that_contradict_are_refused_by_name(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, dtype="f16", hidden_size=40, num_heads=4, head_dim=16, metadata=keys)
    with pytest.raises(errors.ModelError, match=named):
        Model(path)


# ---- 10: tensors that were dropped


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("arch", ARCHS)
def test_biases_are_applied_wherever_present(tmp_path: Path, arch: str, dtype: str) -> None:
    path, without = tmp_path / "model.gguf", tmp_path / "without.gguf"
    make_tiny_gguf(path, arch=arch, dtype=dtype, qkv_bias=True)
    make_tiny_gguf(without, arch=arch, dtype=dtype, qkv_bias=False)
    tolerance = FLOAT_TOLERANCE if dtype == "f16" else QUANT_TOLERANCE
    check_against_reference(path, tolerance=tolerance)
    check_differs(path, load(without).logits(TOKENS))
    if arch == "qwen2":  # where the architecture has biases, their absence is a broken file
        with pytest.raises(errors.ModelMalformedError, match=r"attn_q\.bias"):
            Model(without)
    else:
        check_against_reference(without, tolerance=tolerance)


@pytest.mark.parametrize("which", ["attn_q", "attn_k", "attn_v", "attn_output"])
def test_each_bias_is_applied_by_itself(tmp_path: Path, which: str) -> None:
    path = tmp_path / "model.gguf"
    rows = 32 if which in ("attn_k", "attn_v") else 64
    bias = np.random.default_rng(1).standard_normal(rows).astype(np.float32)
    make_tiny_gguf(path, dtype="f16", tensors={f"blk.{layer}.{which}.bias": bias for layer in range(2)})
    check_against_reference(path)


def test_the_head_is_the_files_own_where_it_has_one(tmp_path: Path) -> None:
    tied, untied = tmp_path / "tied.gguf", tmp_path / "untied.gguf"
    make_tiny_gguf(tied, dtype="f16")
    make_tiny_gguf(untied, dtype="f16", tied=False)
    for path in (tied, untied):
        check_against_reference(path)
        with Model(path) as model:
            facts = {fact.name: fact.source for fact in model.facts()}
            assert ("no output.weight" in facts.get("head", "")) == (path is tied)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_extra.weight", "blk.0.ffn_gate.bias", "blk.2.attn_q.weight", "output.bias", "mm.0.weight"]
)
def test_a_tensor_without_a_role_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, dtype="f16", tensors={name: np.ones(64, np.float32)})
    with pytest.raises(errors.ModelUnsupportedError, match=name.replace(".", r"\.")):
        Model(path)


@pytest.mark.parametrize(
    "key",
    ["attention.temperature_length", "expert_count", "attn_logit_softcapping", "logit_scale", "rope.scaling.apply"],
)
def test_a_key_that_changes_numbers_is_refused_by_name(tmp_path: Path, key: str) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, metadata={f"llama.{key}": 8})
    with pytest.raises(errors.ModelUnsupportedError, match=key.replace(".", r"\.")):
        Model(path)


def test_a_scalar_and_an_array_of_that_value_mean_the_same(tmp_path: Path) -> None:
    keys = {
        "llama.attention.head_count_kv": [2, 2],
        "llama.feed_forward_length": [128, 128],
        "llama.attention.head_count": [4, 4],
    }
    scalar, array = tmp_path / "scalar.gguf", tmp_path / "array.gguf"
    make_tiny_gguf(scalar)
    make_tiny_gguf(array, metadata=keys)
    left, right = (engine_logits(path, DecodeMode.BATCHED, TOKENS[:5]) for path in (scalar, array))
    assert np.array_equal(left, right)
    for key in keys:
        make_tiny_gguf(array, metadata={key: [4, 2]})
        with pytest.raises(errors.ModelUnsupportedError, match=key.replace(".", r"\.")):
            Model(array)


# ---- 11: "GGGG", "!!!!" or NaN on a healthy model


@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.INT8])
def test_scores_of_tens_of_millions_stay_finite(tmp_path: Path, kv_type: KvType) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(
        path, arch="qwen2", dtype="q8_0", hidden_size=256, num_heads=2, num_kv_heads=1, bias_values=(300.0, 900.0, 0.5)
    )
    for mode in MODES:
        if kv_type != KvType.F16 and mode != DecodeMode.BATCHED:
            continue
        assert np.isfinite(engine_logits(path, mode, kv_type=kv_type)).all()
    with Engine(path, cpu(kv_type=kv_type)) as engine:
        events = list(engine.generate(TOKENS * 6, max_tokens=40, ignore_eos=True))
        assert sum(isinstance(event, TokenEvent) for event in events) == 40


def test_equal_large_biases_leave_the_answer_right(tmp_path: Path) -> None:
    # Of unrotated heads a K bias adds the same to every score of a query: softmax takes it out again, where scores are
    # f32 and keys were not rounded away. 900 in f16 has steps of a half; weights of the K projection are large beside.
    path = tmp_path / "model.gguf"
    make_tiny_gguf(
        path, arch="qwen2", dtype="f16", hidden_size=256, num_heads=2, num_kv_heads=1, bias_values=(300.0, 900.0, 0.5)
    )
    expected = load(path).logits(TOKENS)
    found = engine_logits(path, DecodeMode.PER_SLOT)
    # f32 scores of 3e7 / sqrt(128) have steps of a quarter: the reference's own top key must lead by more.
    assert np.isfinite(found).all()
    assert np.isfinite(expected).all()
    assert np.median(relative_errors(found, expected)) < 2e-2


@pytest.mark.parametrize("dtype", ["q4_0", "q4_1", "q5_1", "q8_0", "q2_k", "q4_k", "q5_k", "q6_k"])
def test_block_sums_beyond_the_range_of_f16(tmp_path: Path, dtype: str) -> None:
    # 32 equal rows of gate and up give 32 equal activations; their size is some thousands.
    rng = np.random.default_rng(5)
    width, inner = 256, 256
    rows = {name: np.repeat(rng.standard_normal((inner // 32, width)), 32, axis=0) for name in ("ffn_gate", "ffn_up")}
    rows["ffn_gate"] *= 60 / math.sqrt(width)
    rows["ffn_up"] *= 60 / math.sqrt(width)
    tensors = {f"blk.{i}.{name}.weight": matrix.astype(np.float32) for i in range(2) for name, matrix in rows.items()}
    path = tmp_path / "model.gguf"
    down = {"ffn_down.weight": dtype}
    make_tiny_gguf(path, dtype="f16", dtypes=down, hidden_size=width, intermediate_size=inner, tensors=tensors)
    hidden = rng.standard_normal(width)  # about what a norm leaves
    assert np.max(np.abs((rows["ffn_gate"] @ hidden) * (rows["ffn_up"] @ hidden))) > 2048  # 32 of them: beyond 65,504
    check_against_reference(path, tolerance=QUANT_TOLERANCE)


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize("size", [0.5, 1.9, 2.1, 900.0])
def test_int4_keys_are_refused_where_a_bias_takes_their_range(tmp_path: Path, arch: str, size: float) -> None:
    path = tmp_path / "model.gguf"
    biases = {"qkv_bias": True, "bias_values": (0.5, size, 0.5)}
    make_tiny_gguf(path, arch=arch, dtype="f16", hidden_size=128, num_heads=4, num_kv_heads=2, **biases)
    with Model(path) as model:
        (fact,) = (fact for fact in model.facts() if fact.name == "kv_types")
        assert "attn_k.bias" in fact.source
        assert ("refused" in fact.value) == (size > 2)
    for kv_type in KvType:
        if kv_type == KvType.INT4 and size > 2:
            with pytest.raises(errors.InvalidArgumentError, match=r"kv_type int4.*attn_k\.bias.*int8"):
                Engine(path, cpu(kv_type=kv_type))
            continue
        with Engine(path, cpu(kv_type=kv_type)) as engine:
            assert engine.info.kv_type == kv_type
            assert any(isinstance(event, TokenEvent) for event in engine.generate([5], max_tokens=2, ignore_eos=True))
    # The per-slot way keeps keys in f32, whatever type was asked for.
    Engine(path, cpu(kv_type=KvType.INT4, decode_mode=DecodeMode.PER_SLOT)).close()


# ---- 12: tokens beyond the vocabulary get sampled

PADDED: dict[str, Any] = {"num_padding": 3, "dtype": "f16"}


@pytest.fixture(params=[True, False], ids=["listed", "unlisted"])
def padded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "padded.gguf"
    make_tiny_gguf(path, padding_listed=request.param, **PADDED)
    return path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=2.0, top_k=5, seed=2),
        SamplingParams(temperature=1.0, top_p=0.0, seed=3),
        SamplingParams(temperature=1.0, min_p=1.0, seed=4),
        SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0),
    ],
)
def test_padding_rows_are_never_chosen_nor_listed(padded: Path, mode: DecodeMode, sampling: SamplingParams) -> None:
    with Engine(padded, cpu(decode_mode=mode)) as engine:
        rows, real = engine.model.info.vocab_size, engine.model.info.num_real_tokens
        assert rows == real + 3
        request = Request(prompt=TOKENS, sampling=sampling, max_tokens=30, ignore_eos=True, num_logprobs=20)
        tokens = [event for event in engine.stream(request) if isinstance(event, TokenEvent)]
        assert len(tokens) == 30
        for event in tokens:
            assert event.token_id < real
            assert event.logprob is not None
            assert len(event.candidates) == 20
            assert all(candidate.token_id < real for candidate in event.candidates)


def test_padding_rows_are_left_out_of_the_softmax(padded: Path) -> None:
    row = engine_logits(padded, DecodeMode.BATCHED, TOKENS)[-1].astype(np.float64)
    assert set(np.argsort(row)[-3:]) == {len(row) - 3, len(row) - 2, len(row) - 1}
    exact = row[:-3] - np.log(np.exp(row[:-3] - row[:-3].max()).sum()) - row[:-3].max()
    with Engine(padded, cpu()) as engine:
        (event,) = (
            event
            for event in engine.generate(TOKENS, max_tokens=1, num_logprobs=20, ignore_eos=True)
            if isinstance(event, TokenEvent)
        )
    assert event.token_id == int(exact.argmax())
    assert event.logprob == pytest.approx(exact.max(), abs=1e-4)
    for candidate in event.candidates:
        assert candidate.logprob == pytest.approx(exact[candidate.token_id], abs=1e-4)


def test_no_bias_brings_a_padding_row_back(padded: Path) -> None:
    with Engine(padded, cpu()) as engine:
        last = engine.model.info.vocab_size - 1
        try:
            events = list(engine.generate(TOKENS, max_tokens=3, ignore_eos=True, logit_bias={last: 100.0}))
        except errors.InvalidArgumentError as error:
            assert "logit_bias" in str(error)  # refused by name is right as well
            return
        assert all(event.token_id != last for event in events if isinstance(event, TokenEvent))


def test_padding_ids_in_a_prompt_are_accepted_and_decode_to_nothing(padded: Path) -> None:
    check_against_reference(padded, [5, 6, *padding_ids(padded), 7])
    with Engine(padded, cpu()) as engine:
        ids = padding_ids(padded)
        assert engine.model.decode([*engine.model.encode("hello"), *ids]) == "hello"
        assert any(isinstance(event, TokenEvent) for event in engine.generate([*ids, 5], max_tokens=2, ignore_eos=True))
        with pytest.raises(errors.InvalidArgumentError):
            list(engine.generate([ids[-1] + 1], max_tokens=1))


def padding_ids(path: Path) -> list[int]:
    with Model(path) as model:
        return list(range(model.info.num_real_tokens, model.info.vocab_size))
