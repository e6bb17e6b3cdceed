"""The oracle: a float64 forward pass over dequantised weights, written from the papers.

    model = load("model.gguf")
    logits = model.logits([504, 3575, 282])     # [tokens, vocab], one row per position

RMSNorm arXiv:1910.07467, RoPE arXiv:2104.09864, GQA arXiv:2305.13245, SwiGLU arXiv:2002.05202, sliding
window arXiv:2310.06825, per-head QK norm as in Qwen3 (arXiv:2505.09388). It shares no code with the
engine and rounds nothing: what differs from it is the engine's error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .gguf_file import GgufFile, Value
from .rope import F64, Rope

NEIGHBOURS = {"llama": True, "qwen2": False, "qwen3": False}


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    """Divide each row by its root mean square, then weigh its channels."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def silu(x: F64) -> F64:
    """Compute x * sigmoid(x) without overflow."""
    return np.asarray(x * 0.5 * (1 + np.tanh(0.5 * x)))


def causal_attention(q: F64, k: F64, v: F64, scale: float, window: int) -> F64:
    """Attend from each token to itself and those before it.

    Args:
        q: [tokens, heads, head_dim], of the last tokens.
        k: [all tokens, kv_heads, head_dim]; heads is a multiple of kv_heads.
        v: Like k.
        scale: Multiplies the scores.
        window: Keys a token sees, itself included; 0 for all.

    Returns:
        [tokens, heads, head_dim].
    """
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k, optimize=True) * scale
    distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))[None, :]
    hidden = (distance < 0) | ((distance >= window) if window else False)
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, v, optimize=True))


@dataclass(frozen=True)
class Config:
    """A model's shape, in the words of the papers."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    attention_scale: float
    window: int
    rope: Rope


@dataclass
class Past:
    """Keys and values of tokens that were run, one [tokens, kv_heads, head_dim] of each per layer."""

    keys: dict[int, F64] = field(default_factory=dict)
    values: dict[int, F64] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """How many tokens were run."""
        return len(self.keys[0]) if self.keys else 0

    def extend(self, layer: int, k: F64, v: F64) -> tuple[F64, F64]:
        """Add a layer's newest keys and values; returns all of them."""
        for kept, new in ((self.keys, k), (self.values, v)):
            kept[layer] = np.concatenate([kept[layer], new]) if layer in kept else new
        return self.keys[layer], self.values[layer]


class ReferenceModel:
    """A model in float64.

    Args:
        file: The open file. Weights are dequantised when first used and kept in float32, which holds
            them exactly; products and sums are float64.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.config = read_config(file)
        self._weights: dict[str, NDArray[np.float32]] = {}

    def weight(self, name: str) -> F64:
        """A tensor by name, [rows, cols] or [size]."""
        if name not in self._weights:
            self._weights[name] = self.file.tensor(name)
        return self._weights[name].astype(np.float64)

    def linear(self, x: F64, name: str) -> F64:
        """Multiply rows by `name`.weight and add `name`.bias where the file has one."""
        y = x @ self.weight(f"{name}.weight").T
        if f"{name}.bias" in self.file.names:
            y = y + self.weight(f"{name}.bias")
        return np.asarray(y)

    def hidden(self, token_ids: Sequence[int], past: Past | None = None) -> F64:
        """The residual after the last layer and the output norm, [tokens, hidden]; `past` is in front and grows."""
        c = self.config
        past = past or Past()
        positions = np.arange(past.num_tokens, past.num_tokens + len(token_ids), dtype=np.int64)
        x = self.weight("token_embd.weight")[np.asarray(token_ids)]
        for layer in range(c.num_layers):
            name = f"blk.{layer}."
            h = rms_norm(x, self.weight(name + "attn_norm.weight"), c.eps)
            q = self._heads(self.linear(h, name + "attn_q"), name + "attn_q_norm.weight")
            k = self._heads(self.linear(h, name + "attn_k"), name + "attn_k_norm.weight")
            v = self.linear(h, name + "attn_v").reshape(len(h), c.num_kv_heads, c.head_dim)
            q, k = c.rope.rotate(q, positions), c.rope.rotate(k, positions)
            k, v = past.extend(layer, k, v)
            a = causal_attention(q, k, v, c.attention_scale, c.window)
            x = x + self.linear(a.reshape(len(h), -1), name + "attn_output")
            h = rms_norm(x, self.weight(name + "ffn_norm.weight"), c.eps)
            gated = silu(self.linear(h, name + "ffn_gate")) * self.linear(h, name + "ffn_up")
            x = x + self.linear(gated, name + "ffn_down")
        return rms_norm(x, self.weight("output_norm.weight"), c.eps)

    def logits(self, token_ids: Sequence[int]) -> F64:
        """Logits of the token after each position, [tokens, vocab]."""
        return self._head(self.hidden(token_ids))

    def greedy_steps(self, token_ids: Sequence[int]) -> Iterator[F64]:
        """Yield the logits [vocab] behind the prompt and behind each likeliest token; lowest id on a tie."""
        past, ids = Past(), list(token_ids)
        while True:
            logits = self._head(self.hidden(ids, past)[-1:])[0]
            yield logits
            ids = [int(np.argmax(logits))]

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` most likely tokens one after another; lowest id on a tie."""
        return [int(np.argmax(logits)) for logits in islice(self.greedy_steps(token_ids), count)]

    def _head(self, x: F64) -> F64:
        return self.linear(x, "output" if "output.weight" in self.file.names else "token_embd")

    def _heads(self, x: F64, norm: str) -> F64:
        x = x.reshape(len(x), -1, self.config.head_dim)
        if norm in self.file.names:
            x = rms_norm(x, self.weight(norm), self.config.eps)
        return x


def read_config(file: GgufFile) -> Config:
    """The shape that a file's keys describe."""
    arch = str(file.values["general.architecture"])

    def get(key: str, default: float | None = None) -> float:
        value: Value | None = file.values.get(f"{arch}.{key}", default)
        if isinstance(value, list):  # one per layer; only equal ones mean a single shape
            (value,) = set(value)
        if value is None or isinstance(value, str | bytes | list):
            raise ValueError(f"{arch}.{key}: expected a number, found {value!r}")
        return value

    num_heads = int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", get("embedding_length") // num_heads))
    scaled = f"{arch}.rope.scaling.factor" in file.values
    rope = Rope(
        dim=int(get("rope.dimension_count", head_dim)),
        neighbours=NEIGHBOURS[arch],
        base=get("rope.freq_base", 10000.0),
        scaling=str(file.values.get(f"{arch}.rope.scaling.type", "linear" if scaled else "none")),
        factor=get("rope.scaling.factor", 1.0),
        original_context=get("rope.scaling.original_context_length", get("context_length")),
        extrapolation=get("rope.scaling.yarn_ext_factor", 1.0),
        attention_factor=get("rope.scaling.attn_factor", 1.0) * get("rope.scaling.yarn_attn_factor", 1.0),
        beta_fast=get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=get("rope.scaling.yarn_beta_slow", 1.0),
        divisors=(
            file.tensor("rope_freqs.weight").astype(np.float64) if "rope_freqs.weight" in file.names else np.ones(1)
        ),
    )
    return Config(
        num_layers=int(get("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        eps=get("attention.layer_norm_rms_epsilon"),
        attention_scale=get("attention.scale", 0.0) or head_dim**-0.5,
        window=int(get("attention.sliding_window", 0)),
        rope=rope,
    )


def load(path: str | Path) -> ReferenceModel:
    """Open a llama, qwen2 or qwen3 model file."""
    return ReferenceModel(GgufFile(path))
