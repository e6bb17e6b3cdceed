"""The writer of small models: what other tests rely on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from tests.tools.make_tiny_gguf import ARCHS, DTYPES, make_tiny_gguf
from tests.tools.tiny_vocab import MERGES, TokenType, byte_alphabet, make_vocab


def weights(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    """Return every tensor as float64, [rows, cols] or [cols]."""
    return {t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in GGUFReader(path).tensors}


def keys(path: Path) -> dict[str, object]:
    """Return the metadata."""
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_every_type_have_the_deviation_asked_for(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "m.gguf"
    model = make_tiny_gguf(path, dtype=dtype)
    assert path.stat().st_size < 1_000_000
    up = weights(path)["blk.0.ffn_up.weight"]
    assert np.isfinite(up).all()
    assert up.shape[1] == model.width
    assert abs(up.mean()) < 0.05 * up.std()
    assert up.std() == pytest.approx(model.width**-0.5, rel=0.1)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_same_options_give_the_same_bytes(tmp_path: Path, arch: str) -> None:
    first, second, other = (tmp_path / name for name in ("a", "b", "c"))
    make_tiny_gguf(first, arch=arch, seed=1)
    make_tiny_gguf(second, arch=arch, seed=1)
    make_tiny_gguf(other, arch=arch, seed=2)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_families_differ_in_their_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    names = {}
    for arch in ARCHS:
        make_tiny_gguf(path, arch=arch, tied=arch != "qwen2")
        names[arch] = set(weights(path))
    assert "blk.0.attn_q.bias" in names["qwen2"] - names["llama"] - names["qwen3"]
    assert "blk.1.attn_k_norm.weight" in names["qwen3"] - names["llama"] - names["qwen2"]
    assert "output.weight" in names["qwen2"] - names["llama"] - names["qwen3"]


def test_shapes_and_keys_follow_the_options(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(
        path,
        dtype="f32",
        hidden_size=40,
        head_dim=16,
        rope_dim=8,
        rope_freqs=True,
        rope_scaling="yarn",
        qkv_bias=True,
        bias_values=(300.0, 900.0, 0.0),
        pre=None,
        metadata={"llama.block_count": 7, "general.name": None},
    )
    tensors, metadata = weights(path), keys(path)
    assert tensors["blk.0.attn_q.weight"].shape == (64, 40)
    assert tensors["blk.0.attn_output.weight"].shape == (40, 64)
    assert tensors["rope_freqs.weight"].shape == (4,)
    assert (tensors["blk.1.attn_k.bias"] == 900).all()
    assert metadata["llama.attention.key_length"] == 16
    assert metadata["llama.rope.scaling.type"] == "yarn"
    assert metadata["llama.block_count"] == 7
    assert "tokenizer.ggml.pre" not in metadata
    assert "general.name" not in metadata


def test_dtypes_can_be_mixed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, dtype="q4_k", embedding_dtype="q6_k", dtypes={"attn_v.weight": "q5_0"})
    types = {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}
    assert types["token_embd.weight"] == "Q6_K"
    assert types["blk.1.attn_v.weight"] == "Q5_0"
    assert types["blk.1.attn_q.weight"] == "Q4_K"


def test_the_vocabulary_holds_every_byte_and_merges_that_work() -> None:
    vocab = make_vocab(("<|eot_id|>",), num_padding=2)
    assert len(set(vocab.tokens)) == len(vocab.tokens)
    assert len(set(byte_alphabet())) == 256
    assert byte_alphabet()[ord(" ")] == "Ġ"
    known = set(byte_alphabet())
    for merge in MERGES:
        left, right = merge.split(" ")
        assert {left, right} <= known
        known.add(left + right)
    assert known <= set(vocab.tokens)
    assert vocab.types[vocab.id_of("<tool_call>")] == TokenType.USER_DEFINED
    assert vocab.types[vocab.id_of("<|eot_id|>")] == TokenType.CONTROL
    assert vocab.types[-2:] == [TokenType.UNUSED] * 2


def test_files_without_a_vocabulary_or_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, vocab="none")
    assert keys(path)["tokenizer.ggml.model"] == "no_vocab"
    make_tiny_gguf(path, vocab_only=True)
    assert not weights(path)
    assert "llama.block_count" not in keys(path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "q4_1", "q8_0", "q4_k"])
def test_padding_rows_have_the_highest_logits(tmp_path: Path, dtype: str, tied: bool) -> None:
    path = tmp_path / "m.gguf"
    model = make_tiny_gguf(path, dtype=dtype, tied=tied, num_padding=3, padding_listed=False)
    tensors = weights(path)
    head = tensors["token_embd.weight" if tied else "output.weight"]
    listed = keys(path)["tokenizer.ggml.tokens"]
    assert isinstance(listed, list)
    assert len(head) == len(listed) + 3
    for layer in range(model.num_layers):
        for name in ("attn_output", "ffn_down"):
            assert (tensors[f"blk.{layer}.{name}.weight"][0] == 0).all()
    # Whatever the layers add elsewhere: element 0 of the normed residual stream is positive.
    states = tensors["token_embd.weight"][:-3] + np.random.default_rng(0).normal(0, 2, head[:-3].shape)
    states[:, 0] = tensors["token_embd.weight"][:-3, 0]
    assert (states[:, 0] > 0).all()
    logits = states * tensors["output_norm.weight"] @ head.T
    assert (logits[:, -3:].min(axis=1) > logits[:, :-3].max(axis=1)).all()


@pytest.mark.parametrize("dtype", ["f16", "q4_1", "q8_0", "q6_k"])
def test_a_script_decides_the_next_token(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "m.gguf"
    script = {5: 9, 9: 2, 2: 77, 77: 5}
    make_tiny_gguf(path, dtype=dtype, tied=False, next_token=script, next_default=8)
    tensors = weights(path)
    assert all((tensors[f"blk.{i}.{n}.weight"] == 0).all() for i in range(2) for n in ("attn_output", "ffn_down"))
    logits = tensors["token_embd.weight"] @ tensors["output.weight"].T
    for token, row in enumerate(logits):
        assert row.argmax() == script.get(token, 8)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for options in ({"arch": "bert"}, {"dtype": "q9"}, {"next_default": 1}):
        with pytest.raises(ValueError, match=r"expected|needs"):
            make_tiny_gguf(path, **options)
    with pytest.raises(TypeError):
        make_tiny_gguf(path, colour="red")
    assert not path.exists()
