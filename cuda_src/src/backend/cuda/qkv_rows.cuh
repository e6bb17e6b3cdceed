// q, k, v of one row after the product: head norms, RoPE, cache. One warp per head.
#pragma once

#include "backend/cuda/kv_pages.cuh"

namespace xllm {
namespace cuda {

struct RopeView {
  const float2 *coarse;  // [num_coarse, rotary_dim / 2] cos, sin
  const float2 *fine;    // [512, rotary_dim / 2]
  int rotary_dim;
  bool is_neighbor;
};

struct QkvArgs {
  const float *qkv;  // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], bias added
  const float *q_norm, *k_norm;  // [head_dim] or null
  float eps;
  int num_heads, head_dim;
  RopeView rope;
  const int32_t *positions;   // [num_tokens], < 0: no token here
  const int64_t *kv_indices;  // [num_tokens], < 0: not written
  KvPages kv;
  __half *q;  // [num_tokens, num_heads, head_dim]
};

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
  float *x = heads[warp];
  const float *from = args.qkv + (static_cast<int64_t>(row) * num_all + head) * dim;
  const bool is_q = head < args.num_heads;
  const bool is_v = head >= args.num_heads + args.kv.num_kv_heads;

  float sum = 0;
  for (int i = lane; i < dim; i += kWarp) {
    x[i] = from[i];
    sum = __fmaf_rn(x[i], x[i], sum);
  }
  const float *norm = is_q ? args.q_norm : is_v ? nullptr : args.k_norm;
  if (norm != nullptr) {
    const float mean = __fdiv_rn(warp_sum(sum), static_cast<float>(dim));
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, args.eps)));
    for (int i = lane; i < dim; i += kWarp) x[i] = __fmul_rn(__fmul_rn(x[i], inverse), norm[i]);
  }
  __syncwarp();
  if (!is_v) {
    const int pairs = args.rope.rotary_dim / 2;
    const float2 *coarse = args.rope.coarse + static_cast<int64_t>(position >> 9) * pairs;
    const float2 *fine = args.rope.fine + static_cast<int64_t>(position & 511) * pairs;
    for (int i = lane; i < pairs; i += kWarp) {
      const float2 a = coarse[i], b = fine[i];
      const float c = __fmaf_rn(a.x, b.x, -__fmul_rn(a.y, b.y));
      const float s = __fmaf_rn(a.y, b.x, __fmul_rn(a.x, b.y));
      const int first = args.rope.is_neighbor ? 2 * i : i;
      const int second = args.rope.is_neighbor ? 2 * i + 1 : i + pairs;
      const float u = x[first], v = x[second];
      x[first] = __fmaf_rn(u, c, -__fmul_rn(v, s));
      x[second] = __fmaf_rn(u, s, __fmul_rn(v, c));
    }
    __syncwarp();
  }
  __half *to = nullptr;
  if (is_q) {
    to = args.q + (static_cast<int64_t>(row) * args.num_heads + head) * dim;
  } else {
    const int64_t index = args.kv_indices[row];
    if (index < 0) return;
    // Pages of K come first, then those of V, in the order of the heads.
    uint8_t *page = args.kv.page(index / args.kv.block_size, head - args.num_heads);
    to = reinterpret_cast<__half *>(page) + index % args.kv.block_size * dim;
  }
  for (int i = lane; i < dim; i += kWarp) to[i] = __float2half_rn(x[i]);
}

}  // namespace cuda
}  // namespace xllm
