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
  // [num_slices][num_tokens][(num_heads + 2 * num_kv_heads) * head_dim]: what the product left, to
  // be added up in order, then the bias, if any.
  const float *qkv;
  int num_slices;
  int64_t slice_stride;
  const float *bias;             // [(num_heads + 2 * num_kv_heads) * head_dim], or null
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

__device__ __forceinline__ const float *head_norm(const QkvArgs &args, HeadKind kind) {
  return kind == HeadKind::kQuery ? args.q_norm : kind == HeadKind::kKey ? args.k_norm : nullptr;
}

// What a head is multiplied with: known before the head is. Lane l holds channels 4l.. + 128k. RoPE
// makes of a channel and the other one of its pair
//   channel * cos + other * sin,
// sin with the sign that belongs to this channel; cos 1 and sin 0 where nothing turns.
template <int kMaxDim>
struct HeadFactors {
  static constexpr int kQuads = (kMaxDim + 127) / 128;
  float norm[kQuads][4], other_norm[kQuads][4], cos[kQuads][4], sin[kQuads][4];
};

// The other channel of i's pair, i itself where there is none; is_second: i is the pair's second.
__device__ __forceinline__ int other_channel(const RopeView &rope, int i, bool *is_second) {
  const int pairs = rope.rotary_dim / 2;
  *is_second = rope.is_neighbor ? (i & 1) != 0 : i >= pairs;
  if (i >= 2 * pairs) return i;
  return rope.is_neighbor ? i ^ 1 : *is_second ? i - pairs : i + pairs;
}

// Whether the other channels of a lane's four are neighbours as well: what kIsVector of finish_head
// asks for.
XLLM_HOST_DEVICE bool rope_is_vector(int head_dim, int rotary_dim, bool is_neighbor) {
  return head_dim % 4 == 0 && (is_neighbor || rotary_dim % 8 == 0);
}

template <int kMaxDim>
__device__ __forceinline__ HeadFactors<kMaxDim> head_factors(const QkvArgs &args, int dim,
                                                             HeadKind kind, int position) {
  HeadFactors<kMaxDim> factors;
  const float *norm = head_norm(args, kind);
  const int pairs = kind == HeadKind::kValue ? 0 : args.rope.rotary_dim / 2;
  const int64_t coarse = static_cast<int64_t>(position >> 9) * (args.rope.rotary_dim / 2);
  const int64_t fine = static_cast<int64_t>(position & 511) * (args.rope.rotary_dim / 2);
#pragma unroll
  for (int k = 0; k < HeadFactors<kMaxDim>::kQuads; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * (static_cast<int>(threadIdx.x) & 31) + 128 * k + j;
      bool is_second;
      const int other = other_channel(args.rope, i, &is_second);
      factors.norm[k][j] = norm != nullptr && i < dim ? norm[i] : 1.0f;
      factors.other_norm[k][j] = norm != nullptr && other < dim ? norm[other] : 1.0f;
      factors.cos[k][j] = 1;
      factors.sin[k][j] = 0;
      if (i >= 2 * pairs) continue;
      const int pair = args.rope.is_neighbor ? i >> 1 : min(i, other);
      const float2 a = args.rope.coarse[coarse + pair], b = args.rope.fine[fine + pair];
      factors.cos[k][j] = __fmaf_rn(a.x, b.x, -__fmul_rn(a.y, b.y));
      const float sin = __fmaf_rn(a.y, b.x, __fmul_rn(a.x, b.y));
      factors.sin[k][j] = is_second ? sin : -sin;
    }
  }
  return factors;
}

// Where a head's product lies.
struct HeadSource {
  const float *from, *bias;  // bias: or null
  int num_slices;
  int64_t slice_stride;
};

// Heads 0.. are queries, then come the keys, then the values.
__device__ __forceinline__ HeadSource head_source(const QkvArgs &args, int row, int head, int dim) {
  const int num_all = args.num_heads + 2 * args.kv.num_kv_heads;
  return {args.qkv + (static_cast<int64_t>(row) * num_all + head) * dim,
          args.bias == nullptr ? nullptr : args.bias + head * dim, args.num_slices,
          args.slice_stride};
}

// Channels 4 * lane + 128k + j and the others of their pairs, from `from`; zeros past dim.
template <int kMaxDim, bool kIsVector>
__device__ __forceinline__ void load_head(const RopeView &rope, int dim, const float *from,
                                          float (&own)[(kMaxDim + 127) / 128][4],
                                          float (&other)[(kMaxDim + 127) / 128][4]) {
  bool is_second;
#pragma unroll
  for (int k = 0; k < (kMaxDim + 127) / 128; ++k) {
    const int first = 4 * (static_cast<int>(threadIdx.x) & 31) + 128 * k;
    if (kIsVector) {
      float4 a = make_float4(0, 0, 0, 0), b = a;
      if (first < dim) {
        a = *reinterpret_cast<const float4 *>(from + first);
        b = rope.is_neighbor
                ? make_float4(a.y, a.x, a.w, a.z)
                : *reinterpret_cast<const float4 *>(from + other_channel(rope, first, &is_second));
      }
      own[k][0] = a.x, own[k][1] = a.y, own[k][2] = a.z, own[k][3] = a.w;
      other[k][0] = b.x, other[k][1] = b.y, other[k][2] = b.z, other[k][3] = b.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = other_channel(rope, first + j, &is_second);
        own[k][j] = first + j < dim ? from[first + j] : 0.0f;
        other[k][j] = at < dim ? from[at] : 0.0f;
      }
    }
  }
}

// v = rope(norm(head)), v[k][j] being channel 4 * lane + 128k + j.
template <int kMaxDim, bool kIsVector>
__device__ __forceinline__ void finish_head(const QkvArgs &args, int dim, HeadKind kind,
                                            const HeadFactors<kMaxDim> &factors,
                                            const HeadSource &source,
                                            float (&v)[(kMaxDim + 127) / 128][4]) {
  constexpr int kQuads = HeadFactors<kMaxDim>::kQuads;
  float other[kQuads][4];
  load_head<kMaxDim, kIsVector>(args.rope, dim, source.from, v, other);
  const auto add = [&](const float *from) {
    float more[kQuads][4], more_other[kQuads][4];
    load_head<kMaxDim, kIsVector>(args.rope, dim, from, more, more_other);
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[k][j] = __fadd_rn(v[k][j], more[k][j]);
        other[k][j] = __fadd_rn(other[k][j], more_other[k][j]);
      }
    }
  };
#pragma unroll 2
  for (int i = 1; i < source.num_slices; ++i) add(source.from + i * source.slice_stride);
  if (source.bias != nullptr) add(source.bias);
  float inverse = 1;
  if (head_norm(args, kind) != nullptr) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum = __fmaf_rn(v[k][j], v[k][j], sum);
    }
    const float mean = __fmul_rn(warp_sum(sum), 1.0f / static_cast<float>(dim));
    inverse = __frsqrt_rn(__fadd_rn(mean, args.eps));
  }
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float own = __fmul_rn(__fmul_rn(v[k][j], inverse), factors.norm[k][j]);
      const float across = __fmul_rn(__fmul_rn(other[k][j], inverse), factors.other_norm[k][j]);
      v[k][j] = __fmaf_rn(own, factors.cos[k][j], __fmul_rn(across, factors.sin[k][j]));
    }
  }
}

// Where row `row` of k or v (head counts the k heads, then the v heads) lies in the cache; null:
// nowhere.
__device__ __forceinline__ __half *cache_row(const QkvArgs &args, int row, int head, int dim) {
  const int64_t index = args.kv_indices[row];
  if (index < 0) return nullptr;
  return reinterpret_cast<__half *>(args.kv.page(args.kv.block_of(index), head)) +
         args.kv.row_of(index) * dim;
}

}  // namespace cuda
}  // namespace xllm
