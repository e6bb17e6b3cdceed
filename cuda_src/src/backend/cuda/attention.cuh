// Attention of each token row over its sequence's paged f16 cache, split over the keys
// (arXiv:2309.06180, FlashDecoding).
//
// The keys of a row are cut at multiples of split_length(context), a function of the row's own
// context alone; at most 64 splits. A CTA takes one (split, kv head, row) and all query heads of
// that kv head (up to 16). Its warps take the tiles of 16 keys in turn; they are merged in the
// order of the warps, the splits in ascending order by whichever CTA arrives last. The products
// stand on their side: keys are the rows of the first one, channels those of the second, query
// heads the columns of both, so that 8 heads fill an mma. Reads each key and value once per kv
// head: bound by memory at long contexts, by latency at short ones. So the first tiles of every
// warp are asked for before anything is waited for, and where each row is the last of its own
// sequence the CTA finishes q, k and v itself (head_rows.cuh): what is in the cache is then older
// than the step.
//   shared  ring [warps][stages] of key_ring.cuh; after the loop outputs [warps][heads][dim + 4]
//   f32
#pragma once

#include "backend/cuda/key_ring.cuh"

namespace xllm {
namespace cuda {

// kGroups: of 8 query heads per kv head, 1 or 2.
XLLM_HOST_DEVICE constexpr int attention_warps(int groups) { return groups == 1 ? 8 : 4; }
XLLM_HOST_DEVICE constexpr int attention_shared_bytes(int head_dim, int groups, int num_stages) {
  const int warps = attention_warps(groups);
  const int ring = warps * num_stages * key_stage_bytes(head_dim);
  const int outputs = warps * 8 * groups * (head_dim + 4) * 4;
  return ring > outputs ? ring : outputs;
}

// The running softmax of a warp: per lane the heads 2t, 2t + 1 of each group; `sum` over the keys
// of this lane alone until the end. out[step]: channels 16 * step + g, + 8.
template <int kHeadDim, int kGroups>
struct AttentionState {
  float m[kGroups][2], sum[kGroups][2];
  float out[kGroups][kHeadDim / 16][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        m[n][i] = negative_infinity();
        sum[n][i] = 0;
      }
#pragma unroll
      for (int c = 0; c < kHeadDim / 16; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][c][i] = 0;
      }
    }
  }
};

// e^(s - m) of a tile's 16 keys as the B operand of the second product, and what was there before
// scaled to the new m. s: keys g, g + 8 by heads 2t, 2t + 1 of group n; is_seen: of those keys.
template <int kHeadDim, int kGroups>
__device__ __forceinline__ void softmax_step(const float (&s)[4], const bool (&is_seen)[2],
                                             float scale, int n,
                                             AttentionState<kHeadDim, kGroups> *state,
                                             uint32_t (&p)[2]) {
  float e[2][2];  // [key][head]
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x[2];
#pragma unroll
    for (int k = 0; k < 2; ++k)
      x[k] = is_seen[k] ? __fmul_rn(s[2 * k + i], scale) : negative_infinity();
    // note: fmaxf drops a NaN; it comes back through x - m below.
    float largest = fmaxf(x[0], x[1]);
#pragma unroll
    for (int offset = 4; offset <= 16; offset *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const float m = fmaxf(state->m[n][i], largest);
    const float base = m == negative_infinity() ? 0.0f : m;
    const float shrink = exp_f32(__fsub_rn(state->m[n][i], base));
    state->m[n][i] = m;
#pragma unroll
    for (int k = 0; k < 2; ++k) e[k][i] = exp_f32(__fsub_rn(x[k], base));
    state->sum[n][i] = __fmaf_rn(state->sum[n][i], shrink, __fadd_rn(e[0][i], e[1][i]));
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c) {
      state->out[n][c][i] = __fmul_rn(state->out[n][c][i], shrink);
      state->out[n][c][2 + i] = __fmul_rn(state->out[n][c][2 + i], shrink);
    }
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const __half2 pair = __floats2half2_rn(e[k][0], e[k][1]);
    p[k] = transpose_matrix(*reinterpret_cast<const uint32_t *>(&pair));
  }
}

// Grid: x splits, y kv heads x groups of 16 query heads, z rows. kFinishes: q, k and v come from
// the product as it left them (args.rows), one row per sequence.
template <int kHeadDim, int kGroups, bool kFinishes>
__global__ void __launch_bounds__(attention_warps(kGroups) * kWarp, kGroups == 1 ? 3 : 2)
    attention_kernel(const __grid_constant__ AttentionArgs args) {
  constexpr int kSteps = kHeadDim / 16;
  constexpr int kBlocks = kHeadDim / kWarp;
  constexpr int kHeads = 8 * kGroups;
  constexpr int kWarps = attention_warps(kGroups);
  constexpr int kStride = kHeadDim + 8;  // of f16 rows in shared memory: no bank conflicts
  constexpr int kOutStride = kHeadDim + 4;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float2 stats[kWarps][kHeads];
  __shared__ __align__(16) __half queries[kHeads][kStride];
  __shared__ __align__(16) __half fresh[kFinishes ? 2 : 1][kStride];  // this row's key and value
  __shared__ float scratch[kFinishes ? kWarps : 1][kHeadDim];
  let_next_kernel_start();

  // The batch was there before the step's first kernel.
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int local_row = static_cast<int>(blockIdx.z), row = args.first_row + local_row;
  const int position = args.positions[row];
  const int table_start = args.row_tables[row];
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
  const bool has_fresh = kFinishes && range.end == range.context;
  const int cached_end = has_fresh ? position : range.end;  // what the cache is read up to

  KeyRing<kHeadDim> ring;
  ring.num_stages = args.num_stages;
  ring.lane = lane;
  ring.base = shared + warp * args.num_stages * key_stage_bytes(kHeadDim);
  const int32_t *table = args.tables + table_start;
  // Where the tile of `key` lies, for its keys and then for its values.
  const uint8_t *page = nullptr;
  const auto fetch_keys = [&](int key, int stage) {
    if (key < range.end) {
      const int index = args.block_shift >= 0 ? key >> args.block_shift : key / args.kv.block_size;
      page = args.kv.page(table[index], kv_head) +
             (key - index * args.kv.block_size) * KeyRing<kHeadDim>::kRowBytes;
      ring.fetch(ring.keys(stage), page, cached_end - key);
    }
    commit_copies();
  };
  const auto fetch_values = [&](int key, int stage) {
    if (key < range.end) {
      ring.fetch(ring.values(stage), page + args.kv.num_kv_heads * args.kv.page_bytes,
                 cached_end - key);
    }
    commit_copies();
  };
  int key0 = (range.begin / kKeyTile + warp) * kKeyTile;
  if (kFinishes) {
    for (int i = 0; i < args.num_stages; ++i) {
      fetch_keys(key0 + i * kWarps * kKeyTile, i);
      fetch_values(key0 + i * kWarps * kKeyTile, i);
    }
    // Heads 0.. are queries, then comes the key, then the value.
    const QkvArgs &rows = args.rows;
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
    for (int head = warp; head < num_heads; head += kWarps) {
      const HeadKind kind = kind_of(head);
      if (head != warp) factors = head_factors<kHeadDim>(rows, kHeadDim, kind, position);
      const int index = kind == HeadKind::kQuery ? first_head + head
                        : kind == HeadKind::kKey ? rows.num_heads + kv_head
                                                 : rows.num_heads + args.kv.num_kv_heads + kv_head;
      float v[kHeadDim / kWarp];
      finish_head<kHeadDim>(rows, kHeadDim, kind, factors,
                            rows.qkv + (static_cast<int64_t>(row) * num_all + index) * kHeadDim,
                            scratch[kFinishes ? warp : 0], v);
      __half *to = kind == HeadKind::kQuery ? queries[head] : fresh[head - heads_here];
      if (head != warp) cached = cache_row_of(head);
#pragma unroll
      for (int k = 0; k < kHeadDim / kWarp; ++k) {
        const __half value = __float2half_rn(v[k]);
        to[lane + 32 * k] = value;
        if (cached != nullptr) cached[lane + 32 * k] = value;
      }
    }
  } else {
    wait_for_previous_kernel();
    for (int i = 0; i < args.num_stages; ++i) {
      fetch_keys(key0 + i * kWarps * kKeyTile, i);
      fetch_values(key0 + i * kWarps * kKeyTile, i);
    }
    const __half *q = args.q + (static_cast<int64_t>(row) * args.num_heads + first_head) * kHeadDim;
    constexpr int kPieces = kHeadDim / 8;
    for (int i = static_cast<int>(threadIdx.x); i < heads_here * kPieces; i += kWarps * kWarp) {
      *reinterpret_cast<uint4 *>(queries[i / kPieces] + i % kPieces * 8) =
          *reinterpret_cast<const uint4 *>(q + i * 8);
    }
  }
  __syncthreads();

  AttentionState<kHeadDim, kGroups> state;
  state.clear();
  int stage = 0;
  for (; key0 < range.end; key0 += kWarps * kKeyTile) {
    const int next = key0 + args.num_stages * kWarps * kKeyTile;
    const bool has_fresh_row = has_fresh && key0 + kKeyTile > position;
    ring.wait_for_oldest();
    if (has_fresh_row) ring.put_row(ring.keys(stage), position - key0, fresh[0]);
    // Two chains of products, so that each waits for half as many.
    float s[kGroups][2][4];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][0][i] = s[n][1][i] = 0;
    }
    // note: rows of `queries` without a head hold anything; they are columns of their own, unused.
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t a[2][4], q[4];
      ring.key_operand(ring.keys(stage), step, a[0]);
      ring.key_operand(ring.keys(stage), step + 1, a[1]);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        load_matrices(q, queries[8 * n + (lane & 7)] + 16 * step + (lane >> 3) * 8);
        mma_f16_k16(s[n][0], a[0], q[0], q[1]);
        mma_f16_k16(s[n][1], a[1], q[2], q[3]);
      }
    }
    __syncwarp();
    fetch_keys(next, stage);
    const bool is_seen[2] = {key0 + g >= range.start && key0 + g < range.end,
                             key0 + g + 8 >= range.start && key0 + g + 8 < range.end};
    uint32_t p[kGroups][2];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      float sums[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = __fadd_rn(s[n][0][i], s[n][1][i]);
      softmax_step<kHeadDim, kGroups>(sums, is_seen, args.scale, n, &state, p[n]);
    }
    ring.wait_for_oldest();
    if (has_fresh_row) ring.put_row(ring.values(stage), position - key0, fresh[kFinishes ? 1 : 0]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      ring.value_operand(ring.values(stage), step, a);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) mma_f16_k16(state.out[n][step], a, p[n][0], p[n][1]);
    }
    __syncwarp();
    fetch_values(next, stage);
    if (++stage == args.num_stages) stage = 0;
  }
  wait_for_copies<0>();

  // Merge the warps, in the memory of the rings.
  __syncthreads();
  float *merged = reinterpret_cast<float *>(shared);  // [warps][kHeads][kOutStride]
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = state.sum[n][i];
#pragma unroll
      for (int offset = 4; offset <= 16; offset *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
      const int head = 8 * n + 2 * t + i;
      if (g == 0) stats[warp][head] = make_float2(state.m[n][i], sum);
      if (head >= heads_here) continue;
      float *to = merged + (warp * kHeads + head) * kOutStride + g;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        to[16 * step] = state.out[n][step][i];
        to[16 * step + 8] = state.out[n][step][2 + i];
      }
    }
  }
  __syncthreads();
  const bool is_single = range.count == 1;
  for (int task = warp; task < heads_here * kBlocks; task += kWarps) {
    const int head = task / kBlocks, block = task % kBlocks;
    float top = negative_infinity();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, stats[w][head].x);
    float total = 0, y = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 ms = stats[w][head];
      const float weight = exp_f32(__fsub_rn(ms.x, top));
      total = __fmaf_rn(weight, ms.y, total);
      y = __fmaf_rn(weight, merged[(w * kHeads + head) * kOutStride + block * kWarp + lane], y);
    }
    if (is_single) {
      finish_attention(args, row, first_head + head, block, __fdiv_rn(y, total));
    } else {
      const int64_t entry =
          (static_cast<int64_t>(local_row) * args.num_heads + first_head + head) * gridDim.x +
          split;
      args.partial_out[entry * kHeadDim + block * kWarp + lane] = y;
      if (block == 0 && lane == 0) args.partial_stats[entry] = make_float2(top, total);
    }
  }
  if (is_single) return;
  if (!is_last_arriver(args.counters + static_cast<int64_t>(local_row) * gridDim.y + blockIdx.y,
                       range.count))
    return;
  for (int task = warp; task < heads_here * kBlocks; task += kWarps) {
    const int head = first_head + task / kBlocks, block = task % kBlocks;
    finish_attention(args, row, head, block, merge_splits(args, local_row, head, block, range));
  }
}

}  // namespace cuda
}  // namespace xllm
