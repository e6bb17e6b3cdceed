// q, k, v of one row after the product: head norms, RoPE, cache. One warp per head.
#pragma once

#include "backend/cuda/head_rows.cuh"
#include "backend/cuda/kv_codes.cuh"

namespace xllm {
namespace cuda {

constexpr int kQkvWarps = 8;

// One warp per head; grid: x heads / 8, y tokens.
__global__ void __launch_bounds__(kQkvWarps *kWarp)
    qkv_rows_kernel(const __grid_constant__ QkvArgs args) {
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
  const HeadKind kind = head < args.num_heads                          ? HeadKind::kQuery
                        : head < args.num_heads + args.kv.num_kv_heads ? HeadKind::kKey
                                                                       : HeadKind::kValue;
  const auto factors = head_factors<kMaxHeadDim>(args, dim, kind, position);
  float v[kMaxHeadDim / 128][4];
  finish_head<kMaxHeadDim, false>(args, dim, kind, factors, head_source(args, row, head, dim), v);
  if (args.kv.bits != 16) {
    spread_head(dim, v);
    if (kind != HeadKind::kQuery) {
      const int64_t index = args.kv_indices[row];
      if (index < 0) return;
      store_codes(args.kv, args.kv.page(args.kv.block_of(index), head - args.num_heads),
                  args.kv.row_of(index), dim, v);
      return;
    }
  }
  __half *to = kind == HeadKind::kQuery
                   ? args.q + (static_cast<int64_t>(row) * args.num_heads + head) * dim
                   : cache_row(args, row, head - args.num_heads, dim);
  if (to == nullptr) return;
#pragma unroll
  for (int k = 0; k < kMaxHeadDim / 128; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * lane + 128 * k + j;
      if (i < dim) to[i] = __float2half_rn(v[k][j]);
    }
  }
}

}  // namespace cuda
}  // namespace xllm
