// Attention of each token row over its sequence's paged f16 cache, split over the keys
// (arXiv:2309.06180, FlashDecoding).
//
// The keys of a row are cut at multiples of split_length(context), a function of the row's own
// context alone; at most 64 splits. A CTA takes one (split, kv head, row) and all query heads of
// that kv head (up to 16 rows of an mma). Its four warps take the tiles of 16 keys in turn; they
// are merged in the order of the warps, the splits in ascending order by whichever CTA arrives
// last. Reads each key and value once per kv head: bound by memory at long contexts, by latency at
// short ones.
#pragma once

#include "backend/cuda/act_quant.cuh"
#include "backend/cuda/attention_splits.cuh"
#include "backend/cuda/kv_pages.cuh"

namespace xllm {
namespace cuda {

constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = kAttentionWarps * kWarp;
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
  float *partial_out;     // [rows of the launch, num_heads, gridDim.x, head_dim] sum of e^(s - m) v
  float2 *partial_stats;  // [rows of the launch, num_heads, gridDim.x] m, sum of e^(s - m)
  int *counters;          // [rows of the launch, gridDim.y], zero before and after
  ActView act;            // out, quantised where out is null
  float *out;             // [num_tokens, num_heads * head_dim] f32
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
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (args.out == nullptr) {
    quantize_block(y, args.act, row, head * (args.head_dim / kActBlock) + block);
  } else if (block * kActBlock + lane < args.head_dim) {
    args.out[(static_cast<int64_t>(row) * args.num_heads + head) * args.head_dim +
             block * kActBlock + lane] = y;
  }
}

// Adds up the splits of (row of the launch, head) in ascending order; lane is the channel within
// `block`.
__device__ __forceinline__ float merge_splits(const AttentionArgs &args, int local_row, int head,
                                              int block, const SplitRange &range) {
  const int channel = block * kActBlock + (static_cast<int>(threadIdx.x) & 31);
  const int64_t entry =
      (static_cast<int64_t>(local_row) * args.num_heads + head) * gridDim.x + range.first_split;
  float m = negative_infinity();
  for (int s = 0; s < range.count; ++s) m = fmaxf(m, __ldcg(&args.partial_stats[entry + s]).x);
  float sum = 0, acc = 0;
  for (int s = 0; s < range.count; ++s) {
    const float2 stats = __ldcg(&args.partial_stats[entry + s]);
    const float weight = exp_f32(__fsub_rn(stats.x, m));
    const float v = channel < args.head_dim
                        ? __ldcg(&args.partial_out[(entry + s) * args.head_dim + channel])
                        : 0.0f;
    sum = __fmaf_rn(weight, stats.y, sum);
    acc = __fmaf_rn(weight, v, acc);
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

// Grid: x splits, y kv heads x groups of 16 query heads, z rows. kHigh: more than 8 query heads per
// kv head.
template <int kHeadDim, bool kHigh>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_kernel(const __grid_constant__ AttentionArgs args) {
  constexpr int kChunks = kHeadDim / 32;
  constexpr int kHalves = kHeadDim / 64;
  constexpr int kRows = kHigh ? 16 : 8;
  __shared__ float merged[kAttentionWarps][kRows][kHeadDim + 4];
  __shared__ float2 stats[kAttentionWarps][kRows];
  let_next_kernel_start();
  wait_for_previous_kernel();

  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int local_row = static_cast<int>(blockIdx.z), row = args.first_row + local_row;
  const int position = args.positions[row];
  if (position < 0) return;
  const int split = static_cast<int>(blockIdx.x);
  const SplitRange range = split_range(args, position, split);
  if (split < range.first_split || split >= range.first_split + range.count) return;

  const int head_groups = (args.group_size + 15) / 16;
  const int kv_head = static_cast<int>(blockIdx.y) / head_groups;
  const int first_in_group = static_cast<int>(blockIdx.y) % head_groups * 16;
  const int heads_here = min(16, args.group_size - first_in_group);
  const int first_head = kv_head * args.group_size + first_in_group;

  // Queries: 8 channels of 32c + 8t.. per chunk c, rows g and g + 8. The order of channels within a
  // product is free, so that K can be read 16 bytes at a time with the same order.
  uint4 q_low[kChunks], q_high[kHigh ? kChunks : 1];
  const __half *q =
      args.q + (static_cast<int64_t>(row) * args.num_heads + first_head) * kHeadDim + 8 * t;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    q_low[c] = g < heads_here ? *reinterpret_cast<const uint4 *>(q + g * kHeadDim + 32 * c)
                              : make_uint4(0, 0, 0, 0);
    if (kHigh) {
      q_high[c] = g + 8 < heads_here
                      ? *reinterpret_cast<const uint4 *>(q + (g + 8) * kHeadDim + 32 * c)
                      : make_uint4(0, 0, 0, 0);
    }
  }

  const int32_t *table = args.tables + args.row_tables[row];
  float out[kHalves * 8][4];
#pragma unroll
  for (int n = 0; n < kHalves * 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[n][i] = 0;
  }
  float m[2] = {negative_infinity(), negative_infinity()}, sum[2] = {0, 0};

  for (int tile = range.begin / kKeyTile + warp; tile * kKeyTile < range.end;
       tile += kAttentionWarps) {
    const int key0 = tile * kKeyTile;
    const int64_t block = table[key0 / args.kv.block_size];
    const int in_block = key0 % args.kv.block_size;
    const int last =
        range.end - 1 - key0;  // keys past it are not written: read the last one instead
    const __half *k_page = reinterpret_cast<const __half *>(args.kv.page(block, kv_head)) +
                           static_cast<int64_t>(in_block) * kHeadDim;
    const __half *v_page =
        reinterpret_cast<const __half *>(args.kv.page(block, args.kv.num_kv_heads + kv_head)) +
        static_cast<int64_t>(in_block) * kHeadDim;
    uint4 k[2][kChunks];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        k[n][c] = *reinterpret_cast<const uint4 *>(k_page + min(8 * n + g, last) * kHeadDim +
                                                   32 * c + 8 * t);
      }
    }
    // Values of keys 2t, 2t + 1, 2t + 8, 2t + 9, channels 64h + 8g.. .
    uint4 v[kHalves][4];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = min(2 * t + (i & 1) + 8 * (i >> 1), last);
        v[h][i] = *reinterpret_cast<const uint4 *>(v_page + key * kHeadDim + 64 * h + 8 * g);
      }
    }

    float s[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = 0;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t a0[4] = {q_low[c].x, kHigh ? q_high[c].x : 0u, q_low[c].y,
                                kHigh ? q_high[c].y : 0u};
        const uint32_t a1[4] = {q_low[c].z, kHigh ? q_high[c].z : 0u, q_low[c].w,
                                kHigh ? q_high[c].w : 0u};
        mma_f16_k16(s[n], a0, k[n][c].x, k[n][c].y);
        mma_f16_k16(s[n], a1, k[n][c].z, k[n][c].w);
      }
    }
    // Softmax, row g in s[.][0..1] and g + 8 in s[.][2..3].
    uint32_t p[2][2];  // [keys 0-7, 8-15][row]
#pragma unroll
    for (int r = 0; r < (kHigh ? 2 : 1); ++r) {
      float x[4];
      float largest = negative_infinity();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = key0 + 8 * (i >> 1) + 2 * t + (i & 1);
        const bool is_seen = key >= range.start && key < range.end;
        x[i] = is_seen ? __fmul_rn(s[i >> 1][2 * r + (i & 1)], args.scale) : negative_infinity();
        // note: not fmaxf alone, which would drop a NaN; it comes back through x - m below.
        largest = fmaxf(largest, x[i]);
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float new_m = fmaxf(m[r], largest);
      const float base = new_m == negative_infinity() ? 0.0f : new_m;
      const float shrink = exp_f32(__fsub_rn(m[r], base));
      m[r] = new_m;
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) e[i] = exp_f32(__fsub_rn(x[i], base));
      float part = __fadd_rn(__fadd_rn(e[0], e[1]), __fadd_rn(e[2], e[3]));
      part = __fadd_rn(part, __shfl_xor_sync(0xffffffffu, part, 1));
      part = __fadd_rn(part, __shfl_xor_sync(0xffffffffu, part, 2));
      sum[r] = __fmaf_rn(sum[r], shrink, part);
      const __half2 low = __floats2half2_rn(e[0], e[1]), high = __floats2half2_rn(e[2], e[3]);
      p[0][r] = *reinterpret_cast<const uint32_t *>(&low);
      p[1][r] = *reinterpret_cast<const uint32_t *>(&high);
#pragma unroll
      for (int n = 0; n < kHalves * 8; ++n) {
        out[n][2 * r] = __fmul_rn(out[n][2 * r], shrink);
        out[n][2 * r + 1] = __fmul_rn(out[n][2 * r + 1], shrink);
      }
    }
    const uint32_t a[4] = {p[0][0], kHigh ? p[0][1] : 0u, p[1][0], kHigh ? p[1][1] : 0u};
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const uint32_t low0[4] = {v[h][0].x, v[h][0].y, v[h][0].z, v[h][0].w};
      const uint32_t low1[4] = {v[h][1].x, v[h][1].y, v[h][1].z, v[h][1].w};
      const uint32_t high0[4] = {v[h][2].x, v[h][2].y, v[h][2].z, v[h][2].w};
      const uint32_t high1[4] = {v[h][3].x, v[h][3].y, v[h][3].z, v[h][3].w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t pick = (j & 1) == 0 ? 0x5410u : 0x7632u;
        mma_f16_k16(out[h * 8 + j], a, __byte_perm(low0[j >> 1], low1[j >> 1], pick),
                    __byte_perm(high0[j >> 1], high1[j >> 1], pick));
      }
    }
  }

  // Merge the warps. Column 2t + i of product j of half h is channel 64h + 8 (2t + i) + j.
#pragma unroll
  for (int r = 0; r < (kHigh ? 2 : 1); ++r) {
#pragma unroll
    for (int n = 0; n < kHalves * 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        merged[warp][g + 8 * r][64 * (n >> 3) + 8 * (2 * t + i) + (n & 7)] = out[n][2 * r + i];
      }
    }
    if (t == 0) stats[warp][g + 8 * r] = make_float2(m[r], sum[r]);
  }
  __syncthreads();
  const bool is_single = range.count == 1;
  for (int task = warp; task < heads_here * kChunks; task += kAttentionWarps) {
    const int head = task / kChunks, block = task % kChunks;
    float top = negative_infinity();
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) top = fmaxf(top, stats[w][head].x);
    float total = 0, y = 0;
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) {
      const float2 ms = stats[w][head];
      const float weight = exp_f32(__fsub_rn(ms.x, top));
      total = __fmaf_rn(weight, ms.y, total);
      y = __fmaf_rn(weight, merged[w][head][block * 32 + lane], y);
    }
    if (is_single) {
      finish_attention(args, row, first_head + head, block, __fdiv_rn(y, total));
    } else {
      const int64_t entry =
          (static_cast<int64_t>(local_row) * args.num_heads + first_head + head) * gridDim.x +
          split;
      args.partial_out[entry * kHeadDim + block * 32 + lane] = y;
      if (block == 0 && lane == 0) args.partial_stats[entry] = make_float2(top, total);
    }
  }
  if (is_single) return;
  if (!is_last_arriver(args.counters + static_cast<int64_t>(local_row) * gridDim.y + blockIdx.y,
                       range.count))
    return;
  for (int task = warp; task < heads_here * kChunks; task += kAttentionWarps) {
    const int head = first_head + task / kChunks, block = task % kChunks;
    finish_attention(args, row, head, block, merge_splits(args, local_row, head, block, range));
  }
}

// Any head_dim up to 256, without tensor cores: slow, for small and unusual models. Grid: x splits,
// y heads, z rows.
__global__ void __launch_bounds__(kAttentionThreads)
    attention_any_kernel(const __grid_constant__ AttentionArgs args) {
  __shared__ float query[kMaxHeadDim];
  __shared__ float weights[kAttentionThreads];
  __shared__ float reduced[kAttentionWarps];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int local_row = static_cast<int>(blockIdx.z), row = args.first_row + local_row;
  const int position = args.positions[row];
  if (position < 0) return;
  const int split = static_cast<int>(blockIdx.x);
  const SplitRange range = split_range(args, position, split);
  if (split < range.first_split || split >= range.first_split + range.count) return;
  const int head = static_cast<int>(blockIdx.y), kv_head = head / args.group_size;
  const int dim = args.head_dim;
  const int32_t *table = args.tables + args.row_tables[row];
  for (int i = thread; i < dim; i += kAttentionThreads) {
    query[i] = __half2float(args.q[(static_cast<int64_t>(row) * args.num_heads + head) * dim + i]);
  }
  __syncthreads();
  float m = negative_infinity(), sum = 0, out[2] = {0, 0};
  for (int key0 = range.begin; key0 < range.end; key0 += kAttentionThreads) {
    const int key = key0 + thread;
    float x = negative_infinity();
    if (key >= range.start && key < range.end) {
      const __half *k =
          reinterpret_cast<const __half *>(args.kv.page(table[key / args.kv.block_size], kv_head)) +
          static_cast<int64_t>(key % args.kv.block_size) * dim;
      float dot = 0;
      for (int i = 0; i < dim; ++i) dot = __fmaf_rn(query[i], __half2float(k[i]), dot);
      x = __fmul_rn(dot, args.scale);
    }
    float largest = x;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    if (lane == 0) reduced[warp] = largest;
    __syncthreads();
    float new_m = m;
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) new_m = fmaxf(new_m, reduced[w]);
    __syncthreads();
    const float base = new_m == negative_infinity() ? 0.0f : new_m;
    const float shrink = exp_f32(__fsub_rn(m, base));
    m = new_m;
    const float e = exp_f32(__fsub_rn(x, base));
    weights[thread] = e;
    sum = __fmaf_rn(sum, shrink, block_sum<kAttentionThreads>(e, reduced));
    const int count = min(kAttentionThreads, range.end - key0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = thread + i * kAttentionThreads;
      if (channel >= dim) break;
      float acc = __fmul_rn(out[i], shrink);
      for (int n = 0; n < count; ++n) {
        if (key0 + n < range.start) continue;
        const __half *v =
            reinterpret_cast<const __half *>(args.kv.page(table[(key0 + n) / args.kv.block_size],
                                                          args.kv.num_kv_heads + kv_head)) +
            static_cast<int64_t>((key0 + n) % args.kv.block_size) * dim;
        acc = __fmaf_rn(weights[n], __half2float(v[channel]), acc);
      }
      out[i] = acc;
    }
    __syncthreads();
  }
  const int64_t entry =
      (static_cast<int64_t>(local_row) * args.num_heads + head) * gridDim.x + split;
  const bool is_single = range.count == 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int channel = thread + i * kAttentionThreads;
    if (channel >= dim) break;
    if (is_single) {
      args.out[(static_cast<int64_t>(row) * args.num_heads + head) * dim + channel] =
          __fdiv_rn(out[i], sum);
    } else {
      args.partial_out[entry * dim + channel] = out[i];
    }
  }
  if (is_single) return;
  if (thread == 0) args.partial_stats[entry] = make_float2(m, sum);
  if (!is_last_arriver(args.counters + static_cast<int64_t>(local_row) * gridDim.y + blockIdx.y,
                       range.count))
    return;
  for (int block = warp; block * kActBlock < dim; block += kAttentionWarps) {
    finish_attention(args, row, head, block, merge_splits(args, local_row, head, block, range));
  }
}

}  // namespace cuda
}  // namespace xllm
