// What attention put out over a cache of 8 or 4 bits, spread once more, which undoes that of v.
#pragma once

#include "backend/cuda/kv_codes.cuh"

namespace xllm {
namespace cuda {

constexpr int kSpreadWarps = 8;

// rows: [num_heads][dim] f32, in place. One warp per head; grid: heads of all rows / 8.
__global__ void __launch_bounds__(kSpreadWarps *kWarp)
    spread_rows_kernel(float *rows, int num_heads, int dim) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int head =
      static_cast<int>(blockIdx.x) * kSpreadWarps + (static_cast<int>(threadIdx.x) >> 5);
  if (head >= num_heads) return;
  float *row = rows + static_cast<int64_t>(head) * dim;
  float v[kMaxHeadDim / 128][4] = {};
#pragma unroll
  for (int k = 0; k < kMaxHeadDim / 128; ++k) {
    const int channel = 4 * lane + 128 * k;
    if (channel >= dim) continue;
    const float4 four = *reinterpret_cast<const float4 *>(row + channel);
    v[k][0] = four.x, v[k][1] = four.y, v[k][2] = four.z, v[k][3] = four.w;
  }
  spread_head(dim, v);
#pragma unroll
  for (int k = 0; k < kMaxHeadDim / 128; ++k) {
    const int channel = 4 * lane + 128 * k;
    if (channel >= dim) continue;
    *reinterpret_cast<float4 *>(row + channel) = make_float4(v[k][0], v[k][1], v[k][2], v[k][3]);
  }
}

}  // namespace cuda
}  // namespace xllm
