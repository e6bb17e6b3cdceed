// q, k, v of one row after the product: head norms, RoPE, cache. One warp per head.
#pragma once

#include "backend/cuda/head_rows.cuh"

namespace xllm {
namespace cuda {

constexpr int kQkvWarps = 8;

// One warp per head; grid: x heads / 8, y tokens.
__global__ void __launch_bounds__(kQkvWarps *kWarp)
    qkv_rows_kernel(const __grid_constant__ QkvArgs args) {
  __shared__ float heads[kQkvWarps][kMaxHeadDim];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int head = static_cast<int>(blockIdx.x) * kQkvWarps + warp;
  const int row = static_cast<int>(blockIdx.y);
  const int num_all = args.num_heads + 2 * args.kv.num_kv_heads;
  const int position = args.positions[row];
  if (head >= num_all || position < 0) return;
  const int dim = args.head_dim;
  const float *from = args.qkv + (static_cast<int64_t>(row) * num_all + head) * dim;
  const HeadKind kind = head < args.num_heads                          ? HeadKind::kQuery
                        : head < args.num_heads + args.kv.num_kv_heads ? HeadKind::kKey
                                                                       : HeadKind::kValue;
  const auto factors = head_factors<kMaxHeadDim>(args, dim, kind, position);
  float v[kMaxHeadDim / kWarp];
  finish_head<kMaxHeadDim>(args, dim, kind, factors, from, heads[warp], v);
  __half *to = kind == HeadKind::kQuery
                   ? args.q + (static_cast<int64_t>(row) * args.num_heads + head) * dim
                   : cache_row(args, row, head - args.num_heads, dim);
  if (to == nullptr) return;
#pragma unroll
  for (int k = 0; k < kMaxHeadDim / kWarp; ++k) {
    if (lane + kWarp * k < dim) to[lane + kWarp * k] = __float2half_rn(v[k]);
  }
}

}  // namespace cuda
}  // namespace xllm
