// Plain quantisation of f32 rows.
#pragma once

#include "backend/cuda/act_quant.cuh"

namespace xllm {
namespace cuda {

// Plain quantisation of f32 rows; grid: tokens.
__global__ void __launch_bounds__(256)
    quantize_rows_kernel(const float *x, int num_cols, ActView act) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float *row = x + static_cast<int64_t>(blockIdx.x) * num_cols;
  for (int block = static_cast<int>(threadIdx.x) >> 5; block * kActBlock < num_cols; block += 8) {
    const int col = block * kActBlock + lane;
    quantize_block(col < num_cols ? row[col] : 0.0f, act, static_cast<int>(blockIdx.x), block);
  }
}

}  // namespace cuda
}  // namespace xllm
