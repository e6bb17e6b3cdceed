"""Write tests/data/forward/: tiny models of every kind, and their logits in float64.

    python -m tests.reference.make_cases

The native tests hold every backend to these logits. Weights are seeded; each case turns one thing
that models differ in. NAME.gguf holds the model, NAME.logits the float32 logits [len(TOKENS), vocab].
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from .forward import load

FOLDER = Path(__file__).resolve().parents[1] / "data" / "forward"
VOCAB = 48
TOKENS = [(7 * i + i * i // 3) % VOCAB for i in range(41)]

Overrides = dict[str, Any]


def write_case(name: str, arch: str, options: Overrides) -> None:
    """Write one model and its logits.

    Options are keys of the architecture, and: `type` of the matrices, `tied`, `bias`, `norm`,
    `divisors`, `scales` (a factor per tensor suffix).
    """
    rng = np.random.default_rng(sum(name.encode()))
    o: Overrides = {
        "embedding_length": 32,
        "feed_forward_length": 64,
        "block_count": 2,
        "context_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | options
    special = {"type", "tied", "bias", "norm", "divisors", "scales"}
    kind: Type = o.get("type", Type.F16)
    scales: dict[str, float] = o.get("scales", {})
    width, inner = o["embedding_length"], o["feed_forward_length"]
    heads, kv_heads = o["attention.head_count"], o["attention.head_count_kv"]
    head_dim = o.get("attention.key_length", width // heads)

    writer = GGUFWriter(FOLDER / f"{name}.gguf", arch)
    for key, value in o.items():
        if key in special:
            continue
        full = f"{arch}.{key}"
        add: dict[type, Callable[[str, Any], None]] = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](full, value)
    writer.add_string("tokenizer.ggml.model", "no_vocab")

    def vector(tensor: str, size: int, mean: float, spread: float) -> None:
        values = rng.normal(mean, spread, size).astype(np.float32)
        writer.add_tensor(tensor, values * np.float32(scales.get(tensor.split(".", 2)[-1], 1)))

    def matrix(tensor: str, rows: int, cols: int, spread: float) -> None:
        values: NDArray[np.float32] = rng.normal(0, spread, (rows, cols)).astype(np.float32)
        writer.add_tensor(tensor, quantize(values, kind), raw_dtype=kind)

    matrix("token_embd.weight", VOCAB, width, 1.0)
    for layer in range(o["block_count"]):
        at = f"blk.{layer}."
        vector(at + "attn_norm.weight", width, 1.0, 0.1)
        vector(at + "ffn_norm.weight", width, 1.0, 0.1)
        for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(at + f"attn_{letter}.weight", count * head_dim, width, width**-0.5)
            if o.get("bias", False):
                vector(at + f"attn_{letter}.bias", count * head_dim, 0.0, 1.0)
            if o.get("norm", False) and letter != "v":
                vector(at + f"attn_{letter}_norm.weight", head_dim, 1.5, 0.2)
        matrix(at + "attn_output.weight", width, heads * head_dim, width**-0.5)
        matrix(at + "ffn_gate.weight", inner, width, width**-0.5)
        matrix(at + "ffn_up.weight", inner, width, width**-0.5)
        matrix(at + "ffn_down.weight", width, inner, inner**-0.5)
    vector("output_norm.weight", width, 1.0, 0.1)
    if not o.get("tied", True):
        matrix("output.weight", VOCAB, width, 1.0)
    if o.get("divisors", False):
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, head_dim // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    logits = load(FOLDER / f"{name}.gguf").logits(TOKENS)
    (FOLDER / f"{name}.logits").write_bytes(logits.astype("<f4").tobytes())


CASES: dict[str, tuple[str, Overrides]] = {
    "llama": ("llama", {}),
    "llama_untied": ("llama", {"tied": False, "type": Type.F32}),
    "llama_q8_0": ("llama", {"type": Type.Q8_0}),
    "llama_q4_1": ("llama", {"type": Type.Q4_1}),
    "llama_bias": ("llama", {"bias": True}),
    "llama_window": (
        "llama",
        {"rope.freq_base": 500.0, "rope.dimension_count": 8, "attention.sliding_window": 9},
    ),
    "llama_rope_freqs": ("llama", {"divisors": True}),
    "llama_linear": ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "llama_wide_head": (
        "llama",
        {
            "embedding_length": 40,
            "attention.head_count": 4,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.dimension_count": 12,
        },
    ),
    "qwen2": (
        "qwen2",
        {"bias": True, "attention.head_count": 6, "embedding_length": 48},
    ),
    "qwen2_large_bias": (
        "qwen2",
        {"bias": True, "scales": {"attn_q.bias": 300.0, "attn_k.bias": 900.0}, "tied": False},
    ),
    "qwen3": ("qwen3", {"norm": True, "attention.key_length": 16, "rope.freq_base": 1e6}),
    "qwen3_yarn": (
        "qwen3",
        {
            "norm": True,
            "attention.key_length": 32,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "attention.head_count": 2,
            "attention.head_count_kv": 1,
        },
    ),
}


def main() -> None:
    """Write every case anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (arch, options) in CASES.items():
        write_case(name, arch, options)


if __name__ == "__main__":
    main()
