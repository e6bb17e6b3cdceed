// Attention of each token row over its sequence's paged f16 cache, split over the keys
// (arXiv:2309.06180, FlashDecoding).
//
// The keys of a row are cut at multiples of split_length(context), a function of the row's own
// context alone; at most 64 splits. A CTA takes one (split, kv head, row) and all query heads of
// that kv head (up to 16 rows of an mma). Its warps take the tiles of 16 keys in turn; they are
// merged in the order of the warps, the splits in ascending order by whichever CTA arrives last.
// Reads each key and value once per kv head: bound by memory at long contexts, by latency at short
// ones. So the first tile of every warp is asked for before anything is waited for, and where each
// row is the last of its own sequence the CTA finishes q, k and v itself (head_rows.cuh): what is
// in the cache is then older than the step.
#pragma once

#include "backend/cuda/attention_args.cuh"

namespace xllm {
namespace cuda {

XLLM_HOST_DEVICE constexpr int attention_warps(bool is_high) { return is_high ? 4 : 8; }

// Keys and values of 16 positions in the registers of a warp. Lane 4g + t: keys g and g + 8, 8
// channels of 32c + 8t.. each; values of keys 2t, 2t + 1, 2t + 8, 2t + 9, channels 64h + 8g... The
// order of channels within a product is free, so both are read 16 bytes at a time.
template <int kHeadDim>
struct KeyTile {
  uint4 k[2][kHeadDim / 32];
  uint4 v[kHeadDim / 64][4];
};

// Where a tile lies. Keys past `last` are not written: the last one is read instead.
template <int kHeadDim>
struct TilePlace {
  const __half *k, *v;
  int last;
};

template <int kHeadDim>
__device__ __forceinline__ TilePlace<kHeadDim> place_tile(const KvPages &kv, const int32_t *table,
                                                          int key0, int end, int kv_head) {
  const int64_t block = table[key0 / kv.block_size];
  const int64_t offset = static_cast<int64_t>(key0 % kv.block_size) * kHeadDim;
  return {reinterpret_cast<const __half *>(kv.page(block, kv_head)) + offset,
          reinterpret_cast<const __half *>(kv.page(block, kv.num_kv_heads + kv_head)) + offset,
          end - 1 - key0};
}

template <int kHeadDim>
__device__ __forceinline__ void load_keys(const TilePlace<kHeadDim> &at, int g, int t,
                                          KeyTile<kHeadDim> *tile) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < kHeadDim / 32; ++c) {
      tile->k[n][c] = *reinterpret_cast<const uint4 *>(at.k + min(8 * n + g, at.last) * kHeadDim +
                                                       32 * c + 8 * t);
    }
  }
}

template <int kHeadDim>
__device__ __forceinline__ void load_values(const TilePlace<kHeadDim> &at, int g, int t,
                                            KeyTile<kHeadDim> *tile) {
#pragma unroll
  for (int h = 0; h < kHeadDim / 64; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = min(2 * t + (i & 1) + 8 * (i >> 1), at.last);
      tile->v[h][i] = *reinterpret_cast<const uint4 *>(at.v + key * kHeadDim + 64 * h + 8 * g);
    }
  }
}

// Puts the step's own key and value where the row at `position` should have been read.
template <int kHeadDim>
__device__ __forceinline__ void patch_tile(int key0, int position, const __half *new_k,
                                           const __half *new_v, int g, int t,
                                           KeyTile<kHeadDim> *tile) {
  if (key0 + kKeyTile <= position) return;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (key0 + 8 * n + g < position) continue;
#pragma unroll
    for (int c = 0; c < kHeadDim / 32; ++c)
      tile->k[n][c] = *reinterpret_cast<const uint4 *>(new_k + 32 * c + 8 * t);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (key0 + 2 * t + (i & 1) + 8 * (i >> 1) < position) continue;
#pragma unroll
    for (int h = 0; h < kHeadDim / 64; ++h)
      tile->v[h][i] = *reinterpret_cast<const uint4 *>(new_v + 64 * h + 8 * g);
  }
}

// Grid: x splits, y kv heads x groups of 16 query heads, z rows. kHigh: more than 8 query heads per
// kv head. kFinishes: q, k and v come from the product as it left them (args.rows), one row per
// sequence.
template <int kHeadDim, bool kHigh, bool kFinishes>
__global__ void __launch_bounds__(attention_warps(kHigh) * kWarp)
    attention_kernel(const __grid_constant__ AttentionArgs args) {
  constexpr int kChunks = kHeadDim / 32;
  constexpr int kHalves = kHeadDim / 64;
  constexpr int kRows = kHigh ? 16 : 8;
  constexpr int kWarps = attention_warps(kHigh);
  constexpr int kStride = kHeadDim + 8;  // of rows in shared memory: no bank conflicts
  __shared__ float merged[kWarps][kRows][kHeadDim + 4];
  __shared__ float2 stats[kWarps][kRows];
  __shared__ __align__(16) __half queries[kFinishes ? kRows : 1][kStride];
  __shared__ __align__(16) __half fresh[kFinishes ? 2 : 1][kStride];  // this row's key and value
  let_next_kernel_start();

  // The batch was there before the step's first kernel.
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int local_row = static_cast<int>(blockIdx.z), row = args.first_row + local_row;
  const int position = args.positions[row];
  const int split = static_cast<int>(blockIdx.x);
  const SplitRange range = split_range(args, max(position, 0), split);
  if (position < 0 || split < range.first_split || split >= range.first_split + range.count) {
    wait_for_previous_kernel();
    return;
  }
  const int head_groups = (args.group_size + 15) / 16;
  const int kv_head = static_cast<int>(blockIdx.y) / head_groups;
  const int first_in_group = static_cast<int>(blockIdx.y) % head_groups * 16;
  const int heads_here = min(16, args.group_size - first_in_group);
  const int first_head = kv_head * args.group_size + first_in_group;
  const int32_t *table = args.tables + args.row_tables[row];

  int key0 = (range.begin / kKeyTile + warp) * kKeyTile;
  KeyTile<kHeadDim> tile;
  // Queries: 8 channels of 32c + 8t.. per chunk c, rows g and g + 8.
  uint4 q_low[kChunks], q_high[kHigh ? kChunks : 1];
  if (kFinishes) {
    if (key0 < range.end) {
      const auto at = place_tile<kHeadDim>(args.kv, table, key0, range.end, kv_head);
      load_keys(at, g, t, &tile);
      load_values(at, g, t, &tile);
    }
    // Heads 0.. are queries, then comes the key, then the value.
    const QkvArgs &rows = args.rows;
    const bool has_fresh = range.end == range.context;
    const int num_all = rows.num_heads + 2 * args.kv.num_kv_heads;
    const int num_heads = heads_here + (has_fresh ? 2 : 0);
    const auto kind_of = [&](int head) {
      return head < heads_here    ? HeadKind::kQuery
             : head == heads_here ? HeadKind::kKey
                                  : HeadKind::kValue;
    };
    HeadFactors<kHeadDim> factors = {};
    if (warp < num_heads) factors = head_factors<kHeadDim>(rows, kHeadDim, kind_of(warp), position);
    const auto cache_row_of = [&](int head) -> __half * {
      if (head >= num_heads || kind_of(head) == HeadKind::kQuery || first_in_group != 0)
        return nullptr;
      const int index = kind_of(head) == HeadKind::kKey ? kv_head : args.kv.num_kv_heads + kv_head;
      return cache_row(rows, row, index, kHeadDim);
    };
    __half *cached = cache_row_of(warp);
    wait_for_previous_kernel();
    float *x = merged[warp][0];
    for (int head = warp; head < num_heads; head += kWarps) {
      const HeadKind kind = kind_of(head);
      if (head != warp) factors = head_factors<kHeadDim>(rows, kHeadDim, kind, position);
      const int index = kind == HeadKind::kQuery ? first_head + head
                        : kind == HeadKind::kKey ? rows.num_heads + kv_head
                                                 : rows.num_heads + args.kv.num_kv_heads + kv_head;
      finish_head<kHeadDim>(rows, kHeadDim, kind, factors,
                            rows.qkv + (static_cast<int64_t>(row) * num_all + index) * kHeadDim, x);
      __half *to = kind == HeadKind::kQuery ? queries[head] : fresh[head - heads_here];
      if (head != warp) cached = cache_row_of(head);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const __half value = __float2half_rn(x[lane + 32 * k]);
        to[lane + 32 * k] = value;
        if (cached != nullptr) cached[lane + 32 * k] = value;
      }
      __syncwarp();
    }
    __syncthreads();
    if (has_fresh && key0 < range.end)
      patch_tile<kHeadDim>(key0, position, fresh[0], fresh[kFinishes ? 1 : 0], g, t, &tile);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      q_low[c] = g < heads_here ? *reinterpret_cast<const uint4 *>(queries[g] + 32 * c + 8 * t)
                                : make_uint4(0, 0, 0, 0);
      if (kHigh) {
        q_high[c] =
            g + 8 < heads_here
                ? *reinterpret_cast<const uint4 *>(queries[kHigh ? g + 8 : 0] + 32 * c + 8 * t)
                : make_uint4(0, 0, 0, 0);
      }
    }
  } else {
    wait_for_previous_kernel();
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
    if (key0 < range.end) {
      const auto at = place_tile<kHeadDim>(args.kv, table, key0, range.end, kv_head);
      load_keys(at, g, t, &tile);
      load_values(at, g, t, &tile);
    }
  }

  float out[kHalves * 8][4];
#pragma unroll
  for (int n = 0; n < kHalves * 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[n][i] = 0;
  }
  float m[2] = {negative_infinity(), negative_infinity()}, sum[2] = {0, 0};

  while (key0 < range.end) {
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
        mma_f16_k16(s[n], a0, tile.k[n][c].x, tile.k[n][c].y);
        mma_f16_k16(s[n], a1, tile.k[n][c].z, tile.k[n][c].w);
      }
    }
    // The next tile's keys are on their way during the softmax, its values from the end of this
    // one.
    const int next_key0 = key0 + kWarps * kKeyTile;
    TilePlace<kHeadDim> next = {};
    if (next_key0 < range.end) {
      next = place_tile<kHeadDim>(args.kv, table, next_key0, range.end, kv_head);
      load_keys(next, g, t, &tile);
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
      const uint4 *v = tile.v[h];
      const uint32_t low0[4] = {v[0].x, v[0].y, v[0].z, v[0].w};
      const uint32_t low1[4] = {v[1].x, v[1].y, v[1].z, v[1].w};
      const uint32_t high0[4] = {v[2].x, v[2].y, v[2].z, v[2].w};
      const uint32_t high1[4] = {v[3].x, v[3].y, v[3].z, v[3].w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t pick = (j & 1) == 0 ? 0x5410u : 0x7632u;
        mma_f16_k16(out[h * 8 + j], a, __byte_perm(low0[j >> 1], low1[j >> 1], pick),
                    __byte_perm(high0[j >> 1], high1[j >> 1], pick));
      }
    }
    key0 = next_key0;
    if (key0 >= range.end) break;
    load_values(next, g, t, &tile);
    if (kFinishes && range.end == range.context)
      patch_tile<kHeadDim>(key0, position, fresh[0], fresh[kFinishes ? 1 : 0], g, t, &tile);
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
  for (int task = warp; task < heads_here * kChunks; task += kWarps) {
    const int head = task / kChunks, block = task % kChunks;
    float top = negative_infinity();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, stats[w][head].x);
    float total = 0, y = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
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
  for (int task = warp; task < heads_here * kChunks; task += kWarps) {
    const int head = first_head + task / kChunks, block = task % kChunks;
    finish_attention(args, row, head, block, merge_splits(args, local_row, head, block, range));
  }
}

}  // namespace cuda
}  // namespace xllm
