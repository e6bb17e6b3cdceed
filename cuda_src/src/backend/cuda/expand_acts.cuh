// Activations as f32 again, for tests.
#pragma once

#include "backend/cuda/act_quant.cuh"

namespace xllm {
namespace cuda {

// For tests: act as f32 [num_tokens, num_cols].
__global__ void __launch_bounds__(256) expand_acts_kernel(ActView act, int num_cols, float *out) {
  wait_for_previous_kernel();
  for (int col = static_cast<int>(threadIdx.x); col < num_cols; col += 256) {
    const int64_t entry = act.entry(static_cast<int>(blockIdx.x), col / kActBlock);
    const float q =
        static_cast<float>(act.codes[entry * kActBlock + act_position(col % kActBlock)]);
    out[static_cast<int64_t>(blockIdx.x) * num_cols + col] = __fmul_rn(q, act.scales[entry].x);
  }
}

}  // namespace cuda
}  // namespace xllm
