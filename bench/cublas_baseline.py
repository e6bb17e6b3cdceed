"""The cuBLAS baseline of the decode tables: every product of a step with bf16 weights, at M = bs, in one CUDA graph.

    python -m bench.cublas_baseline [--batch N,..] [--json FILE]

Needs PyTorch with CUDA, which brings cuBLASLt; nothing else here does. Attention, norms, RoPE, SiLU and sampling are
left out, so the baseline is flattered: it is the time of the weights alone. Random weights, one set per layer, so that
each step reads all of them from memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from bench.gpu_engine import gpu
from bench.machine import describe
from bench.synthesize import SHAPES

MODELS = ("qwen3-8b", "llama-3-8b", "qwen2.5-1.5b")


def products(name: str) -> tuple[list[tuple[int, int]], tuple[int, int], int]:
    """Return (rows, columns) of a layer's four fused products, those of the head, and the number of layers."""
    s = SHAPES[name]
    words = s.tokenizer
    num_tokens = words.num_words + len(words.specials) + words.num_padding
    q_rows, kv_rows = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    layer = [
        (q_rows + 2 * kv_rows, s.hidden_size),
        (s.hidden_size, q_rows),
        (2 * s.intermediate_size, s.hidden_size),
        (s.hidden_size, s.intermediate_size),
    ]
    return layer, (num_tokens, s.hidden_size), s.num_layers


def measure(name: str, bs: int) -> dict[str, Any]:
    """Time the products of a step, replayed as a graph."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    torch.backends.cuda.preferred_blas_library("cublaslt")
    layer, head, num_layers = products(name)

    def weight(rows: int, cols: int) -> Any:
        return torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_(0, cols**-0.5)

    weights = [weight(*shape) for _ in range(num_layers) for shape in layer] + [weight(*head)]
    inputs = {w.shape[1]: torch.randn(bs, w.shape[1], dtype=torch.bfloat16, device="cuda") for w in weights}

    def step() -> None:
        for w in weights:
            torch.nn.functional.linear(inputs[w.shape[1]], w)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(24):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    size = sum(w.numel() * 2 for w in weights)
    ms = statistics.median(times[8:])
    return {"model": name, "bs": bs, "step_ms": ms, "weight_bytes": size, "tb_per_s": size / ms / 1e9}


def main() -> None:
    """Measure every model and batch size."""
    parser = argparse.ArgumentParser(description="Time a decode step's products with bf16 weights through cuBLASLt.")
    parser.add_argument("--batch", default="1,2,4,8,16,32,64")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in MODELS:
        for bs in (int(text) for text in args.batch.split(",")):
            rows.append(measure(name, bs))
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        what = "products of a decode step alone, bf16 weights through cuBLASLt in one CUDA graph"
        args.json.write_text(json.dumps({"machine": describe() | gpu(), "what": what, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
