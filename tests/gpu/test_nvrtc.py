"""Compile every kernel header with NVRTC 12.9 for sm_70, which the CUDA 13 compiler no longer knows. Needs no GPU.

The compiler comes from the PyPI packages nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12;
without them the tests skip.
"""

import ctypes
import importlib.util
import pathlib

import pytest

SOURCE = pathlib.Path(__file__).parents[2] / "cuda_src" / "src"
CUDA = SOURCE / "backend" / "cuda"
# Templates that a header does not instantiate by itself.
INSTANCES = {
    "gemv.cuh": ("gemv_kernel", "MatmulArgs", ["1", "4", "8"]),
    "attention.cuh": ("attention_kernel", "AttentionArgs", ["64, 1, 1, false", "96, 1, 4, true", "128, 2, 2, true"]),
    "prompt_attention.cuh": ("prompt_attention_kernel", "AttentionArgs", ["64", "128, 8"]),
    "prompt_wide.cuh": ("wide_attention_kernel", "AttentionArgs", ["64", "128"]),
    "act_rows.cuh": ("act_rows_kernel", "ActRowsArgs", ["1, false", "4, true"]),
}


def nvidia_folder(package: str) -> pathlib.Path:
    """Return the folder of an NVIDIA package, or skip the test."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        if (pathlib.Path(root) / package).is_dir():
            return pathlib.Path(root) / package
    pytest.skip(f"needs the Python packages nvidia-{package.replace('_', '-')}-cu12 (any machine)")


def compile_for(arch: str, text: str) -> str:
    """Compile `text`; returns the compiler's errors, empty when it succeeds."""
    library = next((nvidia_folder("cuda_nvrtc") / "lib").glob("libnvrtc.so.12*"))
    include = nvidia_folder("cuda_runtime") / "include"
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None) == 0
    options = [f"-arch={arch}", "-std=c++17", "--fmad=false", f"-I{SOURCE}", f"-I{include}"]
    encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    result = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return "" if result == 0 else log.value.decode()


@pytest.mark.timeout(600)  # the largest takes 20 s of a core, many times that on a busy machine
@pytest.mark.parametrize("header", sorted(path.name for path in CUDA.glob("*.cuh")))
def test_header_compiles_for_sm_70(header: str) -> None:
    """Device headers stand alone: no host header, nothing newer than Volta outside a guard."""
    lines = [f'#include "backend/cuda/{header}"']
    kernel, struct, arguments = INSTANCES.get(header, ("", "", []))
    for argument in arguments:
        parameter = f"const __grid_constant__ xllm::cuda::{struct}"
        lines.append(f"template __global__ void xllm::cuda::{kernel}<{argument}>({parameter});")
    assert compile_for("sm_70", "\n".join(lines)) == ""


def test_a_broken_kernel_is_noticed() -> None:
    """The check itself can fail."""
    assert "error" in compile_for("sm_70", "__global__ void k() { undefined_name(); }")
