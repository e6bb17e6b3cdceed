// One head of q, k or v after the product: head norm and RoPE, by one warp. Used by the kernel that
// does nothing else (qkv_rows.cuh) and by attention, which then needs no kernel before it.
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

enum class HeadKind { kQuery, kKey, kValue };

// What a head is multiplied with: known before the head is. Lane l holds channels l, l + 32, ...
// and pairs l, l + 32, ...
template <int kMaxDim>
struct HeadFactors {
  float norm[kMaxDim / 32];
  float2 turn[kMaxDim / 64];  // cos, sin
};

__device__ __forceinline__ const float *head_norm(const QkvArgs &args, HeadKind kind) {
  return kind == HeadKind::kQuery ? args.q_norm : kind == HeadKind::kKey ? args.k_norm : nullptr;
}

template <int kMaxDim>
__device__ __forceinline__ HeadFactors<kMaxDim> head_factors(const QkvArgs &args, int dim,
                                                             HeadKind kind, int position) {
  HeadFactors<kMaxDim> factors = {};
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float *norm = head_norm(args, kind);
  if (norm != nullptr) {
#pragma unroll
    for (int k = 0; k < kMaxDim / 32; ++k) {
      if (lane + 32 * k < dim) factors.norm[k] = norm[lane + 32 * k];
    }
  }
  if (kind != HeadKind::kValue) {
    const int pairs = args.rope.rotary_dim / 2;
    const float2 *coarse = args.rope.coarse + static_cast<int64_t>(position >> 9) * pairs;
    const float2 *fine = args.rope.fine + static_cast<int64_t>(position & 511) * pairs;
#pragma unroll
    for (int k = 0; k < kMaxDim / 64; ++k) {
      const int i = lane + 32 * k;
      if (i >= pairs) continue;
      const float2 a = coarse[i], b = fine[i];
      factors.turn[k] = make_float2(__fmaf_rn(a.x, b.x, -__fmul_rn(a.y, b.y)),
                                    __fmaf_rn(a.y, b.x, __fmul_rn(a.x, b.y)));
    }
  }
  return factors;
}

// x [dim] in shared memory = rope(norm(from)); of this warp's own, synced when it returns.
template <int kMaxDim>
__device__ __forceinline__ void finish_head(const QkvArgs &args, int dim, HeadKind kind,
                                            const HeadFactors<kMaxDim> &factors, const float *from,
                                            float *x) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float v[kMaxDim / 32];
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kMaxDim / 32; ++k) v[k] = lane + 32 * k < dim ? from[lane + 32 * k] : 0.0f;
#pragma unroll
  for (int k = 0; k < kMaxDim / 32; ++k) sum = __fmaf_rn(v[k], v[k], sum);
  if (head_norm(args, kind) != nullptr) {
    const float mean = __fdiv_rn(warp_sum(sum), static_cast<float>(dim));
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, args.eps)));
#pragma unroll
    for (int k = 0; k < kMaxDim / 32; ++k) {
      v[k] = __fmul_rn(__fmul_rn(v[k], inverse), factors.norm[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kMaxDim / 32; ++k) {
    if (lane + 32 * k < dim) x[lane + 32 * k] = v[k];
  }
  __syncwarp();
  if (kind == HeadKind::kValue) return;
  const int pairs = args.rope.rotary_dim / 2;
#pragma unroll
  for (int k = 0; k < kMaxDim / 64; ++k) {
    const int i = lane + 32 * k;
    if (i >= pairs) continue;
    const int first = args.rope.is_neighbor ? 2 * i : i;
    const int second = args.rope.is_neighbor ? 2 * i + 1 : i + pairs;
    const float c = factors.turn[k].x, s = factors.turn[k].y, u = x[first], w = x[second];
    x[first] = __fmaf_rn(u, c, -__fmul_rn(w, s));
    x[second] = __fmaf_rn(u, s, __fmul_rn(w, c));
  }
  __syncwarp();
}

// Where row `row` of k or v (head counts the k heads, then the v heads) lies in the cache; null:
// nowhere.
__device__ __forceinline__ __half *cache_row(const QkvArgs &args, int row, int head, int dim) {
  const int64_t index = args.kv_indices[row];
  if (index < 0) return nullptr;
  uint8_t *page = args.kv.page(index / args.kv.block_size, head);
  return reinterpret_cast<__half *>(page) + index % args.kv.block_size * dim;
}

}  // namespace cuda
}  // namespace xllm
