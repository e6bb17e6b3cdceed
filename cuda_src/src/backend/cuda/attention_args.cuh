// What the attention kernels share: the description, the cut of a row's keys, and the merge of its
// splits.
#pragma once

#include "backend/cuda/attention_splits.cuh"
#include "backend/cuda/head_rows.cuh"

namespace xllm {
namespace cuda {

constexpr int kKeyTile = 16;

struct AttentionArgs {
  const __half *q;  // [num_tokens, num_heads, head_dim]
  KvPages kv;
  const int32_t *positions;   // [num_tokens]; < 0: nothing to do
  const int32_t *row_tables;  // [num_tokens] where the row's block table begins in `tables`
  const int32_t *tables;      // block ids
  int first_row;              // rows first_row + blockIdx.z
  int num_heads, group_size, head_dim;
  float scale;
  int window;             // 0: all
  int block_shift;        // log2 of the block size, or -1
  int num_stages;         // of the ring of keys, at most kMaxKeyStages; speed only
  float *partial_out;     // [rows of the launch, num_heads, gridDim.x, head_dim] sum of e^(s - m) v
  float2 *partial_stats;  // [rows of the launch, num_heads, gridDim.x] m, sum of e^(s - m)
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
  const int length = split_length(r.context);
  r.start = args.window > 0 ? max(0, r.context - args.window) : 0;
  r.first_split = r.start / length;
  r.count = (r.context + length - 1) / length - r.first_split;
  r.begin = max(split * length, r.start / kKeyTile * kKeyTile);
  r.end = min(split * length + length, r.context);
  return r;
}

// Writes the finished output of (row, head, block of 32 channels): lane is the channel.
__device__ __forceinline__ void finish_attention(const AttentionArgs &args, int row, int head,
                                                 int block, float y) {
  const int channel = block * kWarp + (static_cast<int>(threadIdx.x) & 31);
  if (channel < args.head_dim)
    args.out[(static_cast<int64_t>(row) * args.num_heads + head) * args.head_dim + channel] = y;
}

// Adds up the splits of (row of the launch, head) in ascending order; lane is the channel within
// `block`.
__device__ __forceinline__ float merge_splits(const AttentionArgs &args, int local_row, int head,
                                              int block, const SplitRange &range) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int channel = block * kWarp + lane;
  const int64_t entry =
      (static_cast<int64_t>(local_row) * args.num_heads + head) * gridDim.x + range.first_split;
  // Lane l looks after splits l and l + 32.
  float2 stats[2];
  float weight[2], m = negative_infinity();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int s = lane + 32 * i;
    stats[i] = s < range.count ? __ldcg(&args.partial_stats[entry + s])
                               : make_float2(negative_infinity(), 0.0f);
    m = fmaxf(m, stats[i].x);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));
#pragma unroll
  for (int i = 0; i < 2; ++i) weight[i] = exp_f32(__fsub_rn(stats[i].x, m));
  const float *from = args.partial_out + entry * args.head_dim + channel;
  const bool has_channel = channel < args.head_dim;
  float sum = 0, acc = 0;
#pragma unroll 4
  for (int s = 0; s < range.count; ++s) {
    const float v = has_channel ? __ldcg(from + static_cast<int64_t>(s) * args.head_dim) : 0.0f;
    const float w = __shfl_sync(0xffffffffu, s < 32 ? weight[0] : weight[1], s & 31);
    const float part = __shfl_sync(0xffffffffu, s < 32 ? stats[0].y : stats[1].y, s & 31);
    sum = __fmaf_rn(w, part, sum);
    acc = __fmaf_rn(w, v, acc);
  }
  return __fdiv_rn(acc, sum);
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
