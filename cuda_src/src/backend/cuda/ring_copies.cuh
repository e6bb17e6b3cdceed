// Copies of chunks of weights into a warp's ring in shared memory.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

// Asks for `size` bytes; the lanes of the warp share the 16-byte pieces, `from` is this lane's
// first.
__device__ __forceinline__ void copy_chunk(uint8_t *stage, const uint8_t *from, int size,
                                           int lane) {
  uint8_t *to = stage + lane * 16;
  int i = lane * 16;
  if (size >= 2048) {  // every full chunk is longer
#pragma unroll
    for (int k = 0; k < 4; ++k) copy_async_16(to + 512 * k, from + 512 * k);
    i += 2048;
  }
  for (; i < size; i += 512) copy_async_16(to + (i - lane * 16), from + (i - lane * 16));
}

// Waits for the oldest of the num_stages - 1 groups on their way; num_stages is 2, 3, 4, 6 or 8.
__device__ __forceinline__ void wait_for_oldest_stage(int num_stages) {
  if (num_stages <= 3) {
    if (num_stages == 2) {
      wait_for_copies<0>();
    } else {
      wait_for_copies<1>();
    }
  } else if (num_stages == 4) {
    wait_for_copies<2>();
  } else if (num_stages == 6) {
    wait_for_copies<4>();
  } else {
    wait_for_copies<6>();
  }
}

}  // namespace cuda
}  // namespace xllm
