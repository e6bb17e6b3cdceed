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
template <int kMaxDim>
struct HeadFactors {
  float norm[kMaxDim / 32];
  float2 turn[kMaxDim / 32];  // cos, sin, of turned_pair
};

__device__ __forceinline__ const float *head_norm(const QkvArgs &args, HeadKind kind) {
  return kind == HeadKind::kQuery ? args.q_norm : kind == HeadKind::kKey ? args.k_norm : nullptr;
}

// Whether both channels of every pair are found without shared memory: side by side (lanes l, l ^
// 1), or half a head apart in one lane.
template <int kMaxDim>
__device__ __forceinline__ bool pairs_meet_in_registers(const QkvArgs &args, int dim) {
  return args.rope.is_neighbor || (args.rope.rotary_dim == kMaxDim && dim == kMaxDim);
}

// The pair of turn[k] in lane l: that of channel l + 32k where pairs are neighbours, else l + 32k.
__device__ __forceinline__ int turned_pair(const QkvArgs &args, int k) {
  const int i = (static_cast<int>(threadIdx.x) & 31) + 32 * k;
  return args.rope.is_neighbor ? i >> 1 : i;
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
    for (int k = 0; k < kMaxDim / 32; ++k) {
      const int i = turned_pair(args, k);
      if (i >= pairs) continue;
      const float2 a = coarse[i], b = fine[i];
      factors.turn[k] = make_float2(__fmaf_rn(a.x, b.x, -__fmul_rn(a.y, b.y)),
                                    __fmaf_rn(a.y, b.x, __fmul_rn(a.x, b.y)));
    }
  }
  return factors;
}

// The first and the second channel of a pair, turned.
__device__ __forceinline__ float turned_first(float u, float w, const float2 &turn) {
  return __fmaf_rn(u, turn.x, -__fmul_rn(w, turn.y));
}
__device__ __forceinline__ float turned_second(float u, float w, const float2 &turn) {
  return __fmaf_rn(u, turn.y, __fmul_rn(w, turn.x));
}

// v = rope(norm(from)), v[k] being channel lane + 32k. `scratch`: dim floats of this warp's own in
// shared memory.
template <int kMaxDim>
__device__ __forceinline__ void finish_head(const QkvArgs &args, int dim, HeadKind kind,
                                            const HeadFactors<kMaxDim> &factors, const float *from,
                                            float *scratch, float (&v)[kMaxDim / 32]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
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
  if (kind == HeadKind::kValue) return;
  const int pairs = args.rope.rotary_dim / 2;
  if (args.rope.is_neighbor) {
#pragma unroll
    for (int k = 0; k < kMaxDim / 32; ++k) {
      const float other = __shfl_xor_sync(0xffffffffu, v[k], 1);
      if (turned_pair(args, k) >= pairs) continue;
      v[k] = (lane & 1) == 0 ? turned_first(v[k], other, factors.turn[k])
                             : turned_second(other, v[k], factors.turn[k]);
    }
  } else if (pairs_meet_in_registers<kMaxDim>(args, dim)) {
#pragma unroll
    for (int k = 0; k < kMaxDim / 64; ++k) {
      const float u = v[k], w = v[k + kMaxDim / 64];
      v[k] = turned_first(u, w, factors.turn[k]);
      v[k + kMaxDim / 64] = turned_second(u, w, factors.turn[k]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kMaxDim / 32; ++k) {
      if (lane + 32 * k < dim) scratch[lane + 32 * k] = v[k];
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kMaxDim / 64; ++k) {
      const int i = lane + 32 * k;
      if (i >= pairs) continue;
      const float u = scratch[i], w = scratch[i + pairs];
      scratch[i] = turned_first(u, w, factors.turn[k]);
      scratch[i + pairs] = turned_second(u, w, factors.turn[k]);
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kMaxDim / 32; ++k) {
      if (lane + 32 * k < dim) v[k] = scratch[lane + 32 * k];
    }
  }
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
