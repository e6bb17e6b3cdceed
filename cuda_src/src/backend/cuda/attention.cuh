// Attention of each token row over its sequence's paged f16 cache, split over the keys
// (arXiv:2309.06180, FlashDecoding).
//
// The keys of a row are cut at multiples of 1 << split_shift(context), a function of the row's own
// context alone; at most 64 splits. A CTA takes one (split, kv head, row) and all query heads of
// that kv head (up to 16), in rounds of 256 keys:
//   scores   tile i of 16 keys belongs to warp i % 8. Keys are the rows of the product, query
//            heads its columns, so that 8 heads fill an mma
//   weights  2^(score - largest so far), f16, of all keys to shared memory
//   values  a warp owns 64 channels of all heads and a part of the tiles (kv_stream.cuh): whole
//           lines of memory; an mma with ones adds up the weights. At the end the parts of a group
//           of channels are added up through shared memory
// The splits are merged in ascending order by whichever CTA arrives last.
//
// Reads each key and value once per kv head: bound by memory at long contexts, by latency at short
// ones. So keys are asked for before anything is waited for, and where each row is the last of its
// own sequence the CTA finishes q, k and v itself (head_rows.cuh): what is in the cache is then
// older than the step.
//   shared  of each warp stream_bytes of kv_stream.cuh; then the sums of parts, and the weights of
//           splits
#pragma once

#include "backend/cuda/kv_stream.cuh"

namespace xllm {
namespace cuda {

constexpr int kAttentionThreads = kAttentionWarps * kWarp;

XLLM_HOST_DEVICE constexpr int attention_shared_bytes(int head_dim, int groups, int depth,
                                                      int bits = 16) {
  return kAttentionWarps * stream_bytes(head_dim, groups, depth, bits);
}
XLLM_HOST_DEVICE constexpr int attention_static_bytes(int head_dim, int groups) {
  return (8 * groups + 2) * ((head_dim + 31) / 32 * 32 + 8) * 2 +
         groups * (2 * 8 * kAttentionWarps * 4 + kRoundKeys * 16) + 64;
}
// CTAs that an SM has registers for. kGroups: of 8 query heads per kv head, 1 or 2.
XLLM_HOST_DEVICE constexpr int attention_ctas(int head_dim, int groups, int depth, int bits) {
  return groups == 2 || head_dim > 128 || depth == 4 || bits < 16 ? 2 : depth == 2 ? 3 : 4;
}

__device__ __forceinline__ float2 add_both(const float2 &a, const float2 &b) {
  return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y));
}
__device__ __forceinline__ uint32_t half_pair(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

constexpr int kChannelSteps = kChannels / 16;

// Of a warp, per lane heads 2t and 2t + 1 of each group: the largest score so far and the sums.
// out[..][step]: channels 16 * step + g and + 8 by the two heads; ones: the sum of weights, twice.
template <int kGroups>
struct AttentionState {
  float m[kGroups][2];
  float out[kGroups][kChannelSteps][4];
  float ones[kGroups][4];
};

// The largest score of each head over the round, and 2^(score - largest): x becomes that, what
// there was before is scaled to it. largest: [heads][warps] in shared memory; syncs the CTA.
// x[tile][group]: keys g, g, g + 8, g + 8 by heads 2t, 2t + 1.
template <int kGroups>
__device__ __forceinline__ void softmax_round(float (&x)[2][kGroups][4],
                                              float (*largest)[kAttentionWarps], int warp,
                                              bool is_first, AttentionState<kGroups> *state) {
  const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // note: fmaxf drops a NaN; it comes back through x - m below.
      float m = fmaxf(fmaxf(x[0][n][i], x[0][n][2 + i]), fmaxf(x[1][n][i], x[1][n][2 + i]));
#pragma unroll
      for (int offset = 4; offset <= 16; offset *= 2)
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));
      if (g == 0) largest[8 * n + 2 * t + i][warp] = m;
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float *of = largest[8 * n + 2 * t + i];
      float m = state->m[n][i];
#pragma unroll
      for (int w = 0; w < kAttentionWarps; w += 4) {
        const float4 v = *reinterpret_cast<const float4 *>(of + w);
        m = fmaxf(m, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
      }
      const float base = m == negative_infinity() ? 0.0f : m;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int k = 0; k < 2; ++k)
          x[c][n][2 * k + i] = exp2_f32(__fsub_rn(x[c][n][2 * k + i], base));
      }
      if (!is_first) {
        const float shrink = exp2_f32(__fsub_rn(state->m[n][i], base));
        state->ones[n][i] = __fmul_rn(state->ones[n][i], shrink);
#pragma unroll
        for (int s = 0; s < kChannelSteps; ++s) {
          state->out[n][s][i] = __fmul_rn(state->out[n][s][i], shrink);
          state->out[n][s][2 + i] = __fmul_rn(state->out[n][s][2 + i], shrink);
        }
      }
      state->m[n][i] = m;
    }
  }
}

// Of a CTA's first head: index of its split's partial result, outputs, floats from head to head.
struct OutPlace {
  int64_t entry;
  float *out;
  int stride;
};

// Grid: x splits, y kv heads x groups of 16 query heads, z rows. kFinishes: q, k and v come from
// the product as it left them (args.rows), one row per sequence. kBits: of a value in the cache.
template <int kHeadDim, int kGroups, int kDepth, bool kFinishes, int kBits = 16>
__global__ void __launch_bounds__(kAttentionThreads,
                                  attention_ctas(kHeadDim, kGroups, kDepth, kBits))
    attention_kernel(const __grid_constant__ AttentionArgs args) {
  using Stream = KvStream<kHeadDim, kGroups, kDepth, kBits>;
  constexpr int kWarpBytes = stream_bytes(kHeadDim, kGroups, kDepth, kBits);
  static_assert(kBits == 16 || !kFinishes, "the row of the step comes from the cache");
  constexpr int kSteps = kHeadDim / 16;
  constexpr int kHeads = 8 * kGroups;
  constexpr int kMaxDim = (kHeadDim + 31) / 32 * 32;
  constexpr int kStride = kMaxDim + 8;  // of f16 rows in shared memory
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) __half queries[kHeads][kStride];
  __shared__ __align__(16) __half fresh[kFinishes ? 2 : 1][kStride];  // this row's key and value
  __shared__ __align__(16) float largest[kHeads][kAttentionWarps];
  __shared__ __align__(16) __half weights[kGroups][kRoundKeys][8];
  __shared__ __align__(16) float total[Stream::kParts][kHeads];  // sums of weights
  let_next_kernel_start();

  // The batch was there before the step's first kernel.
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
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
  const int head_groups = kGroups == 1 ? 1 : (args.group_size + 15) / 16;
  const int kv_head = kGroups == 1 ? blockIdx.y : blockIdx.y / head_groups;
  const int first_in_group = kGroups == 1 ? 0 : (blockIdx.y - kv_head * head_groups) * 16;
  const int heads_here = min(16, args.group_size - first_in_group);
  const int first_head = kv_head * args.group_size + first_in_group;
  const bool has_fresh = kFinishes && range.end == range.context;

  const bool is_single = range.count == 1;
  const auto out_place = [&]() {
    OutPlace place;
    place.entry =
        (static_cast<int64_t>(local_row) * args.num_heads + first_head) * gridDim.x + split;
    place.stride = (is_single ? 1 : static_cast<int>(gridDim.x)) * kHeadDim;
    place.out =
        is_single ? args.out + (static_cast<int64_t>(row) * args.num_heads + first_head) * kHeadDim
                  : args.partial_out + place.entry * kHeadDim;
    return place;
  };
  // Early where nothing hides it, late where registers are few.
  OutPlace place = {};
  if (kDepth == 4) place = out_place();

  Stream stream(args);
  stream.table_start = table_start;
  stream.slots = shared + warp * kWarpBytes;
  stream.kv_head = kv_head;
  stream.warp = warp;
  stream.lane = lane;
  stream.end = range.end;
  stream.cached_end = has_fresh ? position : range.end;
  if (!kFinishes) wait_for_previous_kernel();
  stream.template fetch<0>(range.begin);
  if (kDepth >= 2) stream.template fetch<1>(range.begin);
  if (kDepth >= 4) {
    stream.template fetch<2>(range.begin);
    stream.template fetch<3>(range.begin);
  }
  if (kFinishes) {
    // Heads 0.. are queries, then comes the key, then the value.
    const QkvArgs &rows = args.rows;
    const int num_heads = heads_here + (has_fresh ? 2 : 0);
    bool has_waited = false;
#pragma unroll 1
    for (int head = warp; head < num_heads || !has_waited; head += kAttentionWarps) {
      const HeadKind kind = head < heads_here    ? HeadKind::kQuery
                            : head == heads_here ? HeadKind::kKey
                                                 : HeadKind::kValue;
      const int index = kind == HeadKind::kQuery ? first_head + head
                        : kind == HeadKind::kKey ? rows.num_heads + kv_head
                                                 : rows.num_heads + args.kv.num_kv_heads + kv_head;
      const auto factors = head_factors<kMaxDim>(rows, kHeadDim, kind, position);
      __half *cached = kind == HeadKind::kQuery || head >= num_heads || first_in_group != 0
                           ? nullptr
                           : cache_row(rows, row, index - rows.num_heads, kHeadDim);
      if (!has_waited) wait_for_previous_kernel();
      has_waited = true;
      if (head >= num_heads) break;
      float v[(kMaxDim + 127) / 128][4];
      finish_head<kMaxDim, true>(rows, kHeadDim, kind, factors,
                                 head_source(rows, row, index, kHeadDim), v);
      __half *to = kind == HeadKind::kQuery ? queries[head] : fresh[head - heads_here];
#pragma unroll
      for (int k = 0; k < (kMaxDim + 127) / 128; ++k) {
        const int channel = 4 * lane + 128 * k;
        if (channel >= kHeadDim) break;
        const uint2 four = make_uint2(half_pair(v[k][0], v[k][1]), half_pair(v[k][2], v[k][3]));
        *reinterpret_cast<uint2 *>(to + channel) = four;
        if (cached != nullptr) *reinterpret_cast<uint2 *>(cached + channel) = four;
      }
    }
  } else {
    const __half *q = args.q + (static_cast<int64_t>(row) * args.num_heads + first_head) * kHeadDim;
    constexpr int kPieces = kHeadDim / 8;
    for (int i = static_cast<int>(threadIdx.x); i < heads_here * kPieces; i += kAttentionThreads) {
      *reinterpret_cast<uint4 *>(queries[i / kPieces] + i % kPieces * 8) =
          *reinterpret_cast<const uint4 *>(q + i * 8);
    }
  }
  __syncthreads();

  // note: rows of `queries` without a head hold anything; they are columns of their own, unused.
  const auto query_operand = [&](int n, int step, uint32_t (&b)[4]) {
    load_matrices(b, queries[8 * n + (lane & 7)] + 16 * step + (lane >> 3) * 8);
  };
  constexpr bool kHoldsQueries = kDepth == 4;  // where there are registers for them
  uint32_t held[kHoldsQueries ? (kSteps + 1) / 2 : 1][kGroups][4];
  if (kHoldsQueries) {
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) query_operand(n, step, held[step / 2][n]);
    }
  }
  AttentionState<kGroups> state = {};
#pragma unroll
  for (int n = 0; n < kGroups; ++n) state.m[n][0] = state.m[n][1] = negative_infinity();
#pragma unroll 1
  for (int round = range.begin; round < range.end; round += kRoundKeys) {
    float x[2][kGroups][4];
    const auto score = [&](int i, uint8_t *keys) {
      const int key = round + kKeyTile * (kAttentionWarps * i + warp);
      if (key >= range.end) {
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) x[i][n][j] = negative_infinity();
        }
        return;
      }
      const bool is_inner = key >= range.start && key + kKeyTile <= stream.cached_end;
      if (!is_inner && has_fresh && key <= position && key + kKeyTile > position)
        stream.put_key(keys, position - key, fresh[0]);
      float s[kGroups][2][4] = {};  // two chains of products, so that each waits for half as many
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t a[4];
        stream.key_operand(keys, step, a);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          auto &b = held[kHoldsQueries ? step / 2 : 0][n];
          if (!kHoldsQueries && step % 2 == 0) query_operand(n, step, b);
          mma_f16_k16(s[n][step & 1], a, b[2 * (step & 1)], b[2 * (step & 1) + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[i][n][j] = __fmul_rn(__fadd_rn(s[n][0][j], s[n][1][j]), args.scale);
          const int at = key + g + 8 * (j >> 1);
          if (!is_inner && (at < range.start || at >= range.end)) x[i][n][j] = negative_infinity();
        }
      }
      __syncwarp();
    };
    stream.wait();
    score(0, stream.template keys<0>());
    stream.template fetch<0 + kDepth>(round);
    stream.wait();
    score(1, stream.template keys<1>());
    stream.template fetch<1 + kDepth>(round);
    softmax_round<kGroups>(x, largest, warp, round == range.begin, &state);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = kKeyTile * (kAttentionWarps * (i >> 1) + warp) + 8 * (i & 1) + g;
        const float *e = &x[i >> 1][n][2 * (i & 1)];
        *reinterpret_cast<uint32_t *>(&weights[n][key][2 * t]) = half_pair(e[0], e[1]);
      }
    }
    __syncthreads();

    const auto add_values = [&](int half, uint8_t *values) {
      const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
      for (int i = 0; i < Stream::kHalfParts; ++i, values += Stream::kTileBytes) {
        const int tile = stream.value_tile(half, i), key = round + kKeyTile * tile;
        if (has_fresh && key <= position && key + kKeyTile > position)
          stream.put_value(values, position - key, fresh[kFinishes ? 1 : 0]);
        uint32_t p[kGroups][2];
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          load_two_matrices_transposed(p[n], weights[n][kKeyTile * tile + (lane & 15)]);
          mma_f16_k16(state.ones[n], ones, p[n][0], p[n][1]);
        }
#pragma unroll
        for (int step = 0; step < kChannelSteps; ++step) {
          if (kHeadDim % kChannels != 0 && stream.first_channel() + 16 * step >= kHeadDim) break;
          uint32_t a[4];
          stream.value_operand(values, step, a);
#pragma unroll
          for (int n = 0; n < kGroups; ++n) mma_f16_k16(state.out[n][step], a, p[n][0], p[n][1]);
        }
      }
      __syncwarp();
    };
    stream.wait();
    add_values(0, stream.template values<2>());
    if (round + kHalfTiles * kKeyTile >= range.end) break;
    stream.template fetch<2 + kDepth>(round);
    stream.wait();
    add_values(1, stream.template values<3>());
    stream.template fetch<3 + kDepth>(round);
  }
  wait_for_copies<0>();
  __syncwarp();

  // The parts of a group of channels together: sums [kGroups][step][half of 16 channels][lane][2
  // heads] of each warp in its own first slot.
  float *sums = reinterpret_cast<float *>(stream.slots);
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int step = 0; step < kChannelSteps; ++step) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        reinterpret_cast<float2 *>(sums)[((n * kChannelSteps + step) * 2 + k) * kWarp + lane] =
            make_float2(state.out[n][step][2 * k], state.out[n][step][2 * k + 1]);
      }
    }
    if (g == 0 && warp < Stream::kParts) {
      total[warp][8 * n + 2 * t] = state.ones[n][0];
      total[warp][8 * n + 2 * t + 1] = state.ones[n][1];
    }
  }
  __syncthreads();
  if (kDepth != 4) place = out_place();
  constexpr int kSlotFloats = kWarpBytes / 4;
  const float *group_sums = sums - stream.part() * kSlotFloats;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const int head = 8 * n + 2 * t;
    if (head >= heads_here) continue;
    const bool has_second = head + 1 < heads_here;
    float2 ones = *reinterpret_cast<const float2 *>(&total[0][head]);
#pragma unroll
    for (int p = 1; p < Stream::kParts; ++p)
      ones = add_both(ones, *reinterpret_cast<const float2 *>(&total[p][head]));
    const float2 factor =
        is_single ? make_float2(inverse_of(ones.x), inverse_of(ones.y)) : make_float2(1.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < 2 * kChannelSteps / Stream::kParts; ++i) {
      const int eighth = stream.part() + Stream::kParts * i;  // of the 64 channels
      const int channel = stream.first_channel() + 8 * eighth + g;
      if (kHeadDim % kChannels != 0 && channel >= kHeadDim) break;
      const float *from = group_sums + ((n * 2 * kChannelSteps + eighth) * kWarp + lane) * 2;
      float2 y = *reinterpret_cast<const float2 *>(from);
#pragma unroll
      for (int p = 1; p < Stream::kParts; ++p)
        y = add_both(y, *reinterpret_cast<const float2 *>(from + p * kSlotFloats));
      float *to = place.out + head * place.stride + channel;
      to[0] = __fmul_rn(y.x, factor.x);
      if (has_second) to[place.stride] = __fmul_rn(y.y, factor.y);
    }
    if (!is_single && warp == 0 && g == 0) {
      float2 *stats = args.partial_stats + place.entry + head * static_cast<int>(gridDim.x);
      stats[0] = make_float2(state.m[n][0], ones.x);
      if (has_second) stats[gridDim.x] = make_float2(state.m[n][1], ones.y);
    }
  }
  if (is_single) return;
  if (!is_last_arriver(args.counters + static_cast<int64_t>(local_row) * gridDim.y + blockIdx.y,
                       range.count))
    return;
  merge_splits<kAttentionThreads>(args, local_row, first_head, heads_here, range,
                                  reinterpret_cast<float *>(shared));
}

}  // namespace cuda
}  // namespace xllm
