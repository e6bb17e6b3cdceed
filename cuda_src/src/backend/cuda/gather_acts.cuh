// Rows of activations brought together: those that want logits.
#pragma once

#include "backend/cuda/act_quant.cuh"

namespace xllm {
namespace cuda {

// Copies the rows `source[i]` of one activation buffer to row i of another; grid: rows.
__global__ void __launch_bounds__(256)
    gather_acts_kernel(ActView from, const int32_t *source, int num_blocks, ActView to) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int token = source[blockIdx.x];
  for (int i = static_cast<int>(threadIdx.x); i < num_blocks * 2; i += 256) {
    const int block = i >> 1, half = i & 1;
    const int64_t a = from.entry(token, block), b = to.entry(static_cast<int>(blockIdx.x), block);
    reinterpret_cast<uint4 *>(to.codes + b * kActBlock)[half] =
        reinterpret_cast<const uint4 *>(from.codes + a * kActBlock)[half];
    if (half == 0) to.scales[b] = from.scales[a];
  }
}

}  // namespace cuda
}  // namespace xllm
