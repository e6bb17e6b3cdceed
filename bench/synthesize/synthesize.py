"""Writes a model file of a given shape and mix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.synthesize.blocks import random_blocks
from bench.synthesize.dtypes import DTYPES
from bench.synthesize.gguf_writer import TensorEntry, Value, padding, write_header
from bench.synthesize.mix import MIXES, Mix, matrix_dtype
from bench.synthesize.model import ModelShape
from bench.synthesize.vocab import make_vocab

Bytes = npt.NDArray[np.uint8]

#: Random blocks are made once per type and row length and then tiled. A prime, so that no row of a tensor repeats
#: another one at the same place: rows are never a multiple of it.
_POOL_BLOCKS = 99_991
_SMALL_POOL_BLOCKS = 4_999
#: A pool far larger than a tensor would only cost time.
_SMALL_TENSOR_BLOCKS = 50_000


def synthesize(path: str | Path, shape: ModelShape, mix: Mix | str, seed: int = 0) -> list[TensorEntry]:
    """Write the file and return its tensors.

    The same arguments give the same bytes. Weights have mean zero and deviation 1/sqrt(row length), those of a head of
    its own and its embedding three times that: activations keep their size through the layers, some tokens are clearly
    likelier than others, and a tied model does not merely repeat its input.

    Args:
        path: Of the file; replaced.
        shape: One of SHAPES, or what miniature() makes of it.
        mix: One of MIXES, or its name.
        seed: Of all weights.
    """
    mix = MIXES[mix] if isinstance(mix, str) else mix
    vectors = _vectors(shape, np.random.default_rng([seed, 0]))
    tensors = [TensorEntry(name, "f32", values.shape) for name, values in vectors.items()]
    for name, rows, cols in shape.matrices():
        dtype = matrix_dtype(mix, name, cols, shape.num_layers, shape.is_tied)
        tensors.append(TensorEntry(name, dtype, (rows, cols)))
    pools = _Pools(np.random.default_rng([seed, 1]), shape.is_tied)
    with open(path, "wb") as file:
        write_header(file, metadata(shape, mix), tensors)
        for tensor in tensors:
            if tensor.name in vectors:
                file.write(vectors[tensor.name].astype("<f4").tobytes())
            else:
                for piece in pools.pieces(tensor):
                    file.write(piece)
            file.write(bytes(padding(tensor.size_bytes)))
    return tensors


def metadata(shape: ModelShape, mix: Mix) -> dict[str, Value]:
    """Return the keys that a published file of this shape has, in their usual order."""
    arch, tokenizer = shape.arch, shape.tokenizer
    tokens, types, merges = make_vocab(tokenizer)
    keys: dict[str, Value] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": f"{shape.name} shape, random weights",
        f"{arch}.block_count": shape.num_layers,
        f"{arch}.context_length": shape.context_length,
        f"{arch}.embedding_length": shape.hidden_size,
        f"{arch}.feed_forward_length": shape.intermediate_size,
        f"{arch}.attention.head_count": shape.num_heads,
        f"{arch}.attention.head_count_kv": shape.num_kv_heads,
        f"{arch}.rope.freq_base": float(shape.rope_freq_base),
        f"{arch}.attention.layer_norm_rms_epsilon": float(shape.rms_eps),
    }
    if shape.has_head_dim_keys:
        keys[f"{arch}.attention.key_length"] = shape.head_dim
        keys[f"{arch}.attention.value_length"] = shape.head_dim
    if shape.rope_dim:
        keys[f"{arch}.vocab_size"] = tokenizer.vocab_size
        keys[f"{arch}.rope.dimension_count"] = shape.rope_dim
    keys |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": tokenizer.pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index(tokenizer.bos),
        "tokenizer.ggml.eos_token_id": tokens.index(tokenizer.eos),
    }
    if tokenizer.pad is not None:
        keys["tokenizer.ggml.padding_token_id"] = tokens.index(tokenizer.pad)
        keys["tokenizer.ggml.add_bos_token"] = tokenizer.adds_bos
    keys["tokenizer.chat_template"] = tokenizer.chat_template
    keys["general.quantization_version"] = 2
    keys["general.file_type"] = mix.file_type
    return keys


def _vectors(shape: ModelShape, rng: np.random.Generator) -> dict[str, npt.NDArray[np.float64]]:
    out = {}
    if shape.llama3_factor:
        out["rope_freqs.weight"] = _llama3_divisors(shape)
    for name, size in shape.vectors():
        noise = rng.standard_normal(size)
        bias = 0.02 if name.endswith("attn_v.bias") else 0.5  # a large constant in V would drown the tokens
        out[name] = bias * noise if name.endswith(".bias") else 1 + 0.1 * noise
    return out


def _llama3_divisors(shape: ModelShape) -> npt.NDArray[np.float64]:
    """Return what Llama 3.1 divides each frequency by: 1 for fast pairs, the factor for slow ones, a ramp between.

    Fast: at least 4 turns over the first context of 8192 tokens; slow: less than one.
    """
    half = shape.head_dim // 2
    frequencies = shape.rope_freq_base ** (-np.arange(half) / half)
    turns = 8192 * frequencies / (2 * np.pi)
    ramp = np.clip((turns - 1) / 3, 0, 1)
    return np.asarray(1 / ((1 - ramp) / shape.llama3_factor + ramp))


class _Pools:
    """Random blocks per (type, deviation), from which every tensor takes a run of its own."""

    def __init__(self, rng: np.random.Generator, is_tied: bool) -> None:
        self._rng = rng
        self._is_tied = is_tied
        self._pools: dict[tuple[str, float, int], Bytes] = {}

    def pieces(self, tensor: TensorEntry) -> list[memoryview]:
        """Return the tensor's data as views into a pool: from a random place on, round and round."""
        cols = tensor.shape[-1]
        is_edge = tensor.name in ("token_embd.weight", "output.weight")
        std = (3.0 if is_edge and not self._is_tied else 1.0) * cols**-0.5
        dtype = DTYPES[tensor.dtype]
        wanted = tensor.size_bytes // dtype.block_bytes
        pool = self._pool(tensor.dtype, std, _POOL_BLOCKS if wanted > _SMALL_TENSOR_BLOCKS else _SMALL_POOL_BLOCKS)
        at = int(self._rng.integers(len(pool)))
        out = []
        while wanted > 0:
            piece = pool[at : at + wanted]
            out.append(piece.data.cast("B"))
            wanted -= len(piece)
            at = 0
        return out

    def _pool(self, dtype: str, std: float, size: int) -> Bytes:
        key = (dtype, std, size)
        if key not in self._pools:
            self._pools[key] = np.ascontiguousarray(random_blocks(self._rng, size, std, dtype))
        return self._pools[key]
