"""The synthesiser of model files: their types, shapes and numbers; what benchmarks rely on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from bench.synthesize import MIXES, SHAPES, miniature, synthesize
from bench.synthesize.mix import gets_more_bits, matrix_dtype
from bench.synthesize.model import ModelShape
from bench.synthesize.vocab import byte_alphabet, make_vocab
from tests.reference.gguf_file import GgufFile


def types_of(shape: ModelShape, mix: str) -> Counter[str]:
    """Count the types of a shape's tensors, vectors included."""
    counts = Counter({"f32": sum(1 for _ in shape.vectors()) + (shape.llama3_factor != 0)})
    for name, _, cols in shape.matrices():
        counts[matrix_dtype(MIXES[mix], name, cols, shape.num_layers, shape.is_tied)] += 1
    return counts


# What the loaders of published files print: tensors by type.
@pytest.mark.parametrize(
    ("shape", "mix", "expected"),
    [
        ("qwen2.5-0.5b", "q4_k_m", {"f32": 121, "q5_0": 132, "q8_0": 13, "q4_k": 12, "q6_k": 12}),
        ("qwen2.5-0.5b", "q6_k", {"f32": 121, "q8_0": 145, "q6_k": 24}),
        ("qwen2.5-0.5b", "q5_k_m", {"f32": 121, "q5_1": 132, "q8_0": 13, "q5_k": 12, "q6_k": 12}),
        ("qwen2.5-1.5b", "q4_k_m", {"f32": 141, "q4_k": 168, "q6_k": 29}),
        ("qwen2.5-1.5b", "q8_0", {"f32": 141, "q8_0": 197}),
        ("qwen3-8b", "q4_k_m", {"f32": 145, "q4_k": 217, "q6_k": 37}),
        ("llama-3-8b", "q4_k_m", {"f32": 65, "q4_k": 193, "q6_k": 33}),
        ("llama-3-8b", "q6_k", {"f32": 65, "q6_k": 226}),
        ("llama-3.1-8b", "q4_k_m", {"f32": 66, "q4_k": 193, "q6_k": 33}),
    ],
)
def test_types_are_those_of_published_files(shape: str, mix: str, expected: dict[str, int]) -> None:
    assert types_of(SHAPES[shape], mix) == expected


def test_layers_with_more_bits_are_the_ends_and_every_third_between() -> None:
    chosen = [layer for layer in range(32) if gets_more_bits(layer, 32)]
    assert chosen == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert [layer for layer in range(24) if gets_more_bits(layer, 24)] == [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]


@pytest.mark.parametrize(
    ("shape", "vocab_size", "merges", "end"),
    [
        ("qwen2.5-0.5b", 151_936, 151_387, 151_645),
        ("qwen3-8b", 151_936, 151_387, 151_645),
        ("llama-3-8b", 128_256, 280_147, 128_009),
    ],
)
def test_vocabularies_have_their_exact_sizes(shape: str, vocab_size: int, merges: int, end: int) -> None:
    tokenizer = SHAPES[shape].tokenizer
    tokens, types, pairs = make_vocab(tokenizer)
    assert (len(tokens), len(types), len(pairs)) == (vocab_size, vocab_size, merges)
    assert len(set(tokens)) == vocab_size
    assert len(set(pairs)) == merges
    assert tokens.index(tokenizer.eos) == end
    known = set(byte_alphabet())
    for pair in pairs:  # a merge joins what earlier merges made, into a token
        left, right = pair.split(" ")
        assert left in known and right in known
        known.add(left + right)
    assert known == set(tokens[: tokenizer.num_words])


@pytest.mark.parametrize("mix", ["q4_k_m", "q6_k", "q8_0"])
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-8b", "llama-3.1-8b"])
def test_a_miniature_has_the_types_of_the_whole_and_sane_weights(tmp_path: Path, name: str, mix: str) -> None:
    shape = miniature(SHAPES[name])
    path = tmp_path / "m.gguf"
    synthesize(path, shape, mix)
    assert path.stat().st_size < 8_000_000
    reader = GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert {tensor.tensor_type.name.lower() for tensor in reader.tensors} == set(types_of(SHAPES[name], mix))
    assert path.stat().st_size == max(
        int(tensor.data_offset + -(-tensor.n_bytes // 32) * 32) for tensor in reader.tensors
    )
    for matrix, rows, cols in shape.matrices():
        values = dequantize(found[matrix].data, found[matrix].tensor_type).astype(np.float64)
        assert values.shape == (rows, cols)
        std = (3 if not shape.is_tied and matrix in ("token_embd.weight", "output.weight") else 1) * cols**-0.5
        assert values.std() == pytest.approx(std, rel=0.25), matrix
        assert abs(values.mean()) < 0.1 * std, matrix
        assert len(np.unique(values, axis=0)) == rows, matrix


def test_layers_differ(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    synthesize(path, miniature(SHAPES["qwen3-8b"]), "q4_k_m")
    tensors = GGUFReader(path).tensors
    for end in ("attn_q.weight", "ffn_up.weight", "attn_norm.weight"):
        layers = [tensor.data.tobytes() for tensor in tensors if tensor.name.endswith(end)]
        assert len(set(layers)) == len(layers) == 8


def test_the_seed_alone_decides_the_bytes(tmp_path: Path) -> None:
    shape = miniature(SHAPES["qwen2.5-0.5b"])
    first, second, other = (tmp_path / name for name in ("a", "b", "c"))
    synthesize(first, shape, "q4_k_m", seed=1)
    synthesize(second, shape, "q4_k_m", seed=1)
    synthesize(other, shape, "q4_k_m", seed=2)
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


def test_keys_are_those_of_published_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    synthesize(path, miniature(SHAPES["llama-3.1-8b"]), "q4_k_m")
    file = GgufFile(path)
    assert file.values["general.file_type"] == 15
    assert file.values["llama.context_length"] == 2048
    assert file.values["llama.rope.dimension_count"] == 32
    assert file.values["tokenizer.ggml.pre"] == "llama-bpe"
    assert file.values["llama.rope.freq_base"] == 5e5
    divisors = file.tensor("rope_freqs.weight")
    assert divisors[0] == 1 and divisors[-1] == 8
    assert (np.diff(divisors) >= 0).all()
