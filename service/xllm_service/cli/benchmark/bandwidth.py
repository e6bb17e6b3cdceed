"""How fast this machine reads memory: the measure that a step's floor is made of.

The C library's memchr, looking for a byte that is not there, is a streaming read with the widest loads the processor
has; it is called through ctypes, which lets several threads read at once.
"""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor

#: Bytes per second that GPUs read, by the name that their driver gives them: as measured by `scripts/gpu_check.sh`, the
#: best over large reads. Others need `--read-bandwidth`.
GPU_READ_BANDWIDTH = {"NVIDIA H200": 4.66e12}

_BUFFER_BYTES = 512 * 2**20  # well beyond any last-level cache
_ROUNDS = 7


def read_bandwidth(num_threads: int) -> float:
    """Return bytes per second that `num_threads` threads read together: the best of several rounds."""
    memchr = ctypes.CDLL(None).memchr
    memchr.restype = ctypes.c_void_p
    memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    size = min(_BUFFER_BYTES, _free_bytes() // 4)
    part = size // num_threads & ~4095
    buffers = [ctypes.create_string_buffer(part) for _ in range(num_threads)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, part)  # untouched pages would all be one page of zeros

    def read(buffer: ctypes.Array[ctypes.c_char]) -> None:
        memchr(ctypes.addressof(buffer), 2, part)

    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            list(pool.map(read, buffers))
            best = max(best, part * num_threads / (time.perf_counter() - started))
    return best


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
