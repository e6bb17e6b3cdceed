// What the attention kernels share: the description, the cut of a row's keys, and the merge of its
// splits.
#pragma once

#include "backend/cuda/attention_splits.cuh"
#include "backend/cuda/head_rows.cuh"

namespace xllm {
namespace cuda {

constexpr int kKeyTile = 16;
constexpr float kLog2E = 1.44269504f;

// 2^x for -125 <= x <= 0, or NaN, with the same bits on every GPU: a polynomial of degree 5 within
// 2e-7.
__device__ __forceinline__ float exp2_in_range(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: an integer in the low bits of the sum
  const float n = __fadd_rn(x, kRound);
  const float r = __fsub_rn(x, __fsub_rn(n, kRound));
  float p = 1.32764713e-3f;
  p = __fmaf_rn(p, r, 9.67554096e-3f);
  p = __fmaf_rn(p, r, 5.55071309e-2f);
  p = __fmaf_rn(p, r, 2.40221202e-1f);
  p = __fmaf_rn(p, r, 6.93146944e-1f);
  p = __fmaf_rn(p, r, 1.0f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(n) << 23));
}
// The same for any x <= 0; 0 below -125.
__device__ __forceinline__ float exp2_f32(float x) {
  const float y = exp2_in_range(x);
  return x < -125.0f ? 0.0f : y;
}

// 1 / x, correctly rounded, of a normal number whose inverse is one.
__device__ __forceinline__ float inverse_of(float x) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
#else
  return 1.0f / x;
#endif
}

struct AttentionArgs {
  const __half *q;  // [num_tokens, num_heads, head_dim]
  KvPages kv;
  const int32_t *positions;   // [num_tokens]; < 0: nothing to do
  const int32_t *row_tables;  // [num_tokens] where the row's block table begins in `tables`
  const int32_t *tables;      // block ids
  int first_row;              // rows first_row + blockIdx.z
  const int32_t *tiles;       // of rows of prompts (prompt_wide.cuh, prompt_attention.cuh)
  int first_tile;             // tiles first_tile + blockIdx.x; the first begins with first_row
  int splits_per_cta;         // there
  int max_splits;             // there: what gridDim.x is elsewhere, of partial results
  int num_heads, group_size, head_dim;
  float scale;            // of scores, times log2(e): weights are powers of two
  int window;             // 0: all
  float *partial_out;     // [rows of the launch, num_heads, gridDim.x, head_dim] sum of 2^(s - m) v
  float2 *partial_stats;  // [rows of the launch, num_heads, gridDim.x] m, sum of 2^(s - m)
  int *counters;          // [rows of the launch, gridDim.y], zero before and after
  QkvArgs rows;           // of attention that finishes q, k and v itself
  float *out;             // [num_tokens, num_heads * head_dim]
};

// The part of a row's keys that a CTA works on.
struct SplitRange {
  int begin, end;  // keys, begin a multiple of 16; keys below `start` are masked
  int start, context;
  int first_split, count;  // splits that have keys
};

__device__ __forceinline__ SplitRange split_range(const AttentionArgs &args, int position,
                                                  int split) {
  SplitRange r;
  r.context = position + 1;
  const int shift = split_shift(r.context);
  r.start = args.window > 0 ? max(0, r.context - args.window) : 0;
  r.first_split = r.start >> shift;
  r.count = ((r.context + (1 << shift) - 1) >> shift) - r.first_split;
  r.begin = max(split << shift, r.start / kKeyTile * kKeyTile);
  r.end = min((split + 1) << shift, r.context);
  return r;
}

// Of the splits of a head, whose partial results begin at `entry`: weights [kMaxSplits], each
// split's share of the sum. By a warp; lane l looks after splits l and l + 32.
__device__ __forceinline__ void weigh_splits(const AttentionArgs &args, int64_t entry, int count,
                                             float *weights) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float2 *stats = args.partial_stats + entry;
  float2 of[2];
  float m = negative_infinity(), weight[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    of[i] = lane + 32 * i < count ? __ldcg(stats + lane + 32 * i)
                                  : make_float2(negative_infinity(), 0.0f);
    m = fmaxf(m, of[i].x);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));
#pragma unroll
  for (int i = 0; i < 2; ++i) weight[i] = exp2_f32(__fsub_rn(of[i].x, m));
  const float total = warp_sum(__fmaf_rn(weight[1], of[1].y, __fmul_rn(weight[0], of[0].y)));
  const float inverse = inverse_of(total);
#pragma unroll
  for (int i = 0; i < 2; ++i) weights[lane + 32 * i] = __fmul_rn(weight[i], inverse);
}

// Adds up the splits of heads first_head.. of a row in ascending order and writes their outputs, by
// the whole CTA. weights: [num_heads][kMaxSplits] in shared memory.
template <int kThreads>
__device__ __forceinline__ void merge_splits(const AttentionArgs &args, int local_row,
                                             int first_head, int num_heads, const SplitRange &range,
                                             float *weights) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first = static_cast<int64_t>(local_row) * args.num_heads + first_head;
  for (int head = thread >> 5; head < num_heads; head += kThreads / kWarp) {
    weigh_splits(args, (first + head) * static_cast<int>(gridDim.x) + range.first_split,
                 range.count, weights + head * kMaxSplits);
  }
  __syncthreads();
  const int half = args.head_dim / 2;
  float *out =
      args.out + (static_cast<int64_t>(args.first_row) * args.num_heads + first) * args.head_dim;
  for (int i = thread; i < num_heads * half; i += kThreads) {
    const int head = i / half, channel = i % half * 2;
    const float *from =
        args.partial_out +
        ((first + head) * static_cast<int>(gridDim.x) + range.first_split) * args.head_dim +
        channel;
    const float *weight = weights + head * kMaxSplits;
    float2 acc = make_float2(0.0f, 0.0f);
#pragma unroll 16
    for (int s = 0; s < range.count; ++s) {
      const float2 v = __ldcg(reinterpret_cast<const float2 *>(from + s * args.head_dim));
      acc = make_float2(__fmaf_rn(weight[s], v.x, acc.x), __fmaf_rn(weight[s], v.y, acc.y));
    }
    *reinterpret_cast<float2 *>(out + head * args.head_dim + channel) = acc;
  }
}

// True in every thread of the CTA that is the last of its (row, kv head) to get here; what the
// others wrote before is visible to it.
__device__ __forceinline__ bool is_last_arriver(int *counter, int expected) {
  __shared__ int is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(counter, 1) == expected - 1 ? 1 : 0;
    if (is_last != 0) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return is_last != 0;
}

}  // namespace cuda
}  // namespace xllm
