// silu(gate) * up of rows that the fused product did not finish.
#pragma once

#include "backend/cuda/act_quant.cuh"

namespace xllm {
namespace cuda {

// act = Q(silu(gate) * up), gate_up [num_tokens, 2 * num_cols]: gate, then up.
__global__ void __launch_bounds__(256)
    swiglu_rows_kernel(const float *gate_up, int num_cols, ActView act) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float *row = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * num_cols;
  for (int block = static_cast<int>(threadIdx.x) >> 5; block * kActBlock < num_cols; block += 8) {
    const int col = block * kActBlock + lane;
    const float h = col < num_cols ? __fmul_rn(silu(row[col]), row[num_cols + col]) : 0.0f;
    quantize_block(h, act, static_cast<int>(blockIdx.x), block);
  }
}

}  // namespace cuda
}  // namespace xllm
