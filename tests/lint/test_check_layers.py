from __future__ import annotations

from pathlib import Path

import pytest

from tests.lint.check_layers import check_text, check_tree


def messages(path: str, text: str) -> list[str]:
    return [message for _, message in check_text(path, text)]


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("base/error.h", '"tensor/tensor.h"'),
        ("tokenizer/bpe.cc", '"gguf/gguf.h"'),
        ("gguf/gguf.cc", '"backend/backend.h"'),
        ("backend/cpu/ffn.cc", '"backend/cuda/graph.h"'),
        ("backend/cuda/ffn.cu", '"backend/cpu/dot.h"'),
        ("backend/backend.cc", '"backend/cpu/cpu_backend.h"'),
        ("model/transformer.cc", '"backend/factory.h"'),
        ("model/transformer.cc", '"backend/cpu/cpu_backend.h"'),
        ("engine/engine.cc", '"capi/xllm.h"'),
        ("engine/engine.cc", '"xllm.h"'),
        ("engine/scheduler.h", '"model/batch.h"'),
        ("engine/scheduler.cc", '"engine/engine.h"'),
        ("engine/engine.cc", "<cuda_runtime.h>"),
        ("backend/cpu/ffn.cc", "<cublasLt.h>"),
        ("capi/xllm.cc", "<Python.h>"),
        ("novel/thing.cc", '"base/error.h"'),
    ],
)
def test_include_against_the_order_is_found(path: str, include: str) -> None:
    assert messages(path, f"#include {include}\n")


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("tensor/tensor.h", '"base/error.h"'),
        ("backend/factory.cc", '"backend/cpu/cpu_backend.h"'),
        ("backend/factory.cc", '"build_info.h"'),
        ("backend/cpu/ffn.cc", '"backend/backend.h"'),
        ("backend/cuda/ffn.cu", "<cuda_runtime.h>"),
        ("backend/cuda/ffn.cu", '"backend/cuda/row_math.cuh"'),
        ("engine/engine.cc", '"backend/factory.h"'),
        ("engine/scheduler.cc", '"engine/sequence.h"'),
        ("engine/engine.cc", '"engine/scheduler.h"'),
        ("engine/engine.cc", "<vector>"),
        ("capi/xllm.cc", '"xllm.h"'),
        ("capi/xllm.cc", '"engine/engine.h"'),
    ],
)
def test_include_along_the_order_passes(path: str, include: str) -> None:
    assert messages(path, f"#include {include}\n") == []


@pytest.mark.parametrize(
    "line",
    [
        'const char *home = std::getenv("HOME");',
        "  std::abort();",
        "  exit(1);",
        "static int counter = 0;",
        "  static std::vector<int> cache;",
        "thread_local Buffer scratch{};",
        "int g_count = 0;",
        "std::atomic<int> live{0};",
        "__device__ int d_counter;",
    ],
)
def test_what_no_core_file_may_do_is_found(line: str) -> None:
    assert messages("engine/engine.cc", line + "\n")


@pytest.mark.parametrize(
    "line",
    [
        "// static int counter = 0; and getenv(x)",
        'throw Error("set it with getenv(3)");',
        "static constexpr int kBlock = 32;",
        "static const char *const kNames[] = {",
        "static int sum(int a, int b) { return a + b; }",
        "inline float half_to_float(uint16_t bits);",
        "using Row = std::vector<float>;",
        "struct Tensor;",
        "constexpr int kThreads = 256;",
        "  int local = 0;",
        "static_assert(sizeof(int) == 4);",
        "  worker.exit();",
        "__device__ __forceinline__ float silu(float x) {",
    ],
)
def test_ordinary_code_passes(line: str) -> None:
    assert messages("engine/engine.cc", line + "\n") == []


def test_tree_walk_names_file_and_line(tmp_path: Path) -> None:
    source = tmp_path / "src" / "base" / "log.cc"
    source.parent.mkdir(parents=True)
    source.write_text('#include <string>\n#include "model/plan.h"\n')
    (found,) = check_tree(tmp_path)
    assert found.startswith(f"{source}:2: model/plan.h")
