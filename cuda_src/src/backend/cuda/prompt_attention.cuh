// Attention of consecutive rows of one sequence, for prompts: a tile of rows shares every key and
// value that passes through shared memory. Each row gets the bytes that attention.cuh gives it.
//
// The 32 columns of a product are rows x query heads of one kv head: 8 rows of a group of 4. A
// column is computed as a head of attention.cuh is, and what happens in one does not touch another:
// the same rounds of 256 keys from the same split boundaries (all rows of a tile cut their keys
// alike: prompt_tiles.h), the same order of products. Keys past a row's own weigh nothing, and
// adding nothing changes no sum.
//
// Each key and value is read once per tile and kv head, in place of once per row. 16 warps: two to
// every place of attention.cuh's eight, half of the columns each. A pair shares its slots: one of
// the two asks for keys, the other for values. A CTA goes through several splits, so that keys are
// on their way all the time. No windows: they begin at other keys in every row.
//   shared  stream_bytes of each pair (kv_stream.cuh), then sums of each warp: 64 channels by 16
//           columns
#pragma once

#include "backend/cuda/attention.cuh"
#include "backend/cuda/prompt_tile.cuh"

namespace xllm {
namespace cuda {

constexpr int kPromptThreads = 2 * kAttentionThreads;
constexpr int kPairGroups = kPromptGroups / 2;                    // of 8 columns, of a warp
constexpr int kPromptSumBytes = kChannels * 8 * kPairGroups * 4;  // of a warp

XLLM_HOST_DEVICE constexpr int prompt_shared_bytes(int head_dim, int bits) {
  return kAttentionWarps * (stream_bytes(head_dim, 1, kRoundItems, bits) + 2 * kPromptSumBytes);
}
XLLM_HOST_DEVICE constexpr int prompt_static_bytes(int head_dim) {
  return kPromptColumns * ((head_dim + 31) / 32 * 32 + 8) * 2 +
         kPromptColumns * (2 * kAttentionWarps + 1) * 4 + kPromptGroups * kRoundKeys * 16 + 64;
}

// Grid: x tiles from args.first_tile on, each in prompt_tile_pieces pieces, y kv heads, z
// args.splits_per_cta splits: CTAs that share keys run together. Keys and values of the rows are in
// the cache.
template <int kHeadDim, int kBits = 16>
__global__ void __launch_bounds__(kPromptThreads, 1)
    prompt_attention_kernel(const __grid_constant__ AttentionArgs args) {
  using Stream = KvStream<kHeadDim, 1, kRoundItems, kBits>;
  constexpr int kGroups = kPairGroups;
  constexpr int kSteps = kHeadDim / 16;
  constexpr int kStride = (kHeadDim + 31) / 32 * 32 + 8;  // of f16 rows in shared memory
  constexpr int kPairBytes = stream_bytes(kHeadDim, 1, kRoundItems, kBits);
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) __half queries[kPromptColumns][kStride];
  __shared__ __align__(16) float largest[kPromptColumns][kAttentionWarps];
  __shared__ __align__(16) __half weights[kPromptGroups][kRoundKeys][8];
  __shared__ __align__(16) float total[Stream::kParts][kPromptColumns];  // sums of weights
  __shared__ int ends[kPromptColumns];  // where the keys of a column's row end
  let_next_kernel_start();

  // The batch was there before the step's first kernel.
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int pair = warp % kAttentionWarps, half = warp / kAttentionWarps;
  const int g = lane >> 2, t = lane & 3;
  const int pieces = prompt_tile_pieces(args.group_size);
  const int tile_index = args.first_tile + static_cast<int>(blockIdx.x) / pieces;
  const PromptTile tile =
      piece_of(unpack_tile(args.tiles[tile_index]), static_cast<int>(blockIdx.x) % pieces,
               prompt_piece_rows(args.group_size));
  if (tile.num_rows <= 0) {
    wait_for_previous_kernel();
    return;
  }
  const int position = args.positions[tile.first_row];
  // Of the last row, the longest; all rows have its shift.
  const int contexts = position + tile.num_rows;
  const int shift = split_shift(contexts);
  const int num_splits = (contexts + (1 << shift) - 1) >> shift;
  const int begin = static_cast<int>(blockIdx.z) * args.splits_per_cta << shift;
  const int end = min(begin + (args.splits_per_cta << shift), contexts);
  if (begin >= end) {
    wait_for_previous_kernel();
    return;
  }
  const int kv_head = static_cast<int>(blockIdx.y);
  const int first_head = kv_head * args.group_size;
  const int num_columns = tile.num_rows * args.group_size;

  Stream stream(args);
  stream.table_start = args.row_tables[tile.first_row];
  stream.slots = shared + pair * kPairBytes;
  stream.kv_head = kv_head;
  stream.warp = pair;
  stream.lane = lane;
  stream.end = stream.cached_end = end;
  const auto ask_keys = [&](int round) {
    if (round >= end) return;
    stream.seek(round);
    stream.template ask<0>(round);
    stream.template ask<1>(round);
    commit_copies();
  };
  const auto ask_values = [&](int round) {
    stream.seek(round);
    stream.template ask<2>(round);
    stream.template ask<3>(round);
    commit_copies();
  };
  const auto sync_pair = [&] { sync_some(1 + pair, 2 * kWarp); };
  wait_for_previous_kernel();
  if (half == 0) ask_keys(begin);
  if (threadIdx.x < kPromptColumns) {
    const int row = min(static_cast<int>(threadIdx.x) / args.group_size, tile.num_rows - 1);
    ends[threadIdx.x] = position + 1 + row;
  }
  constexpr int kPieces = kHeadDim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < num_columns * kPieces; i += kPromptThreads) {
    const int column = i / kPieces, row = column / args.group_size;
    const int64_t head = static_cast<int64_t>(tile.first_row + row) * args.num_heads + first_head +
                         column - row * args.group_size;
    *reinterpret_cast<uint4 *>(queries[column] + i % kPieces * 8) =
        *reinterpret_cast<const uint4 *>(args.q + head * kHeadDim + i % kPieces * 8);
  }
  __syncthreads();

  AttentionState<kGroups> state;
  const int first_column = 8 * kGroups * half;
  const int local_row = tile.first_row - args.first_row;
  float *sums =
      reinterpret_cast<float *>(shared + kAttentionWarps * kPairBytes + warp * kPromptSumBytes);
#pragma unroll 1
  for (int round = begin; round < end; round += kRoundKeys) {
    const bool is_first = (round & ((1 << shift) - 1)) == 0;  // of its split
    if (is_first) {
      state = {};
#pragma unroll
      for (int n = 0; n < kGroups; ++n) state.m[n][0] = state.m[n][1] = negative_infinity();
    }
    // Keys are there; values of the round before are done with.
    if (half == 0) wait_for_copies<0>();
    sync_pair();
    if (half == 1) ask_values(round);
    if (kBits != 16) {
      if (half == 0) {
        (void)stream.template keys<0>();
      } else {
        (void)stream.template keys<1>();
      }
      sync_pair();
    }
    // Two tiles at once: queries are loaded for both.
    // note: rows of `queries` without a head hold anything; they are columns of their own, unused.
    float s[2][kGroups][2][4] = {};
    {
      uint32_t b[kGroups][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t a[2][4];
        stream.key_operand(stream.template place<0>(), step, a[0]);
        stream.key_operand(stream.template place<1>(), step, a[1]);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          if (step % 2 == 0) {
            load_matrices(b[n],
                          queries[first_column + 8 * n + (lane & 7)] + 16 * step + (lane >> 3) * 8);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i)
            mma_f16_k16(s[i][n][step & 1], a[i], b[n][2 * (step & 1)], b[n][2 * (step & 1) + 1]);
        }
      }
    }
    float x[2][kGroups][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = round + kKeyTile * (kAttentionWarps * i + pair);
      const bool is_inner = key + kKeyTile <= position + 1;  // keys that all rows attend to
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[i][n][j] = __fmul_rn(__fadd_rn(s[i][n][0][j], s[i][n][1][j]), args.scale);
          if (!is_inner && key + g + 8 * (j >> 1) >= ends[first_column + 8 * n + 2 * t + (j & 1)]) {
            x[i][n][j] = negative_infinity();
          }
        }
      }
    }
    // note: behind its barrier nobody needs the round's keys any more.
    softmax_round<kGroups>(x, largest + first_column, pair, is_first, &state);
    if (half == 0) ask_keys(round + kRoundKeys);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = kKeyTile * (kAttentionWarps * (i >> 1) + pair) + 8 * (i & 1) + g;
        const float *e = &x[i >> 1][n][2 * (i & 1)];
        *reinterpret_cast<uint32_t *>(&weights[kGroups * half + n][key][2 * t]) =
            half_pair(e[0], e[1]);
      }
    }
    if (half == 1) wait_for_copies<0>();
    if (kBits != 16) {
      sync_pair();
      if (half == 0) {
        (void)stream.template values<2>();
      } else {
        (void)stream.template values<3>();
      }
    }
    __syncthreads();

    const auto add_values = [&](int part, const uint8_t *values) {
      const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
      for (int i = 0; i < Stream::kHalfParts; ++i, values += Stream::kTileBytes) {
        const int key = kKeyTile * stream.value_tile(part, i);
        uint32_t p[kGroups][2];
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          load_two_matrices_transposed(p[n], weights[kGroups * half + n][key + (lane & 15)]);
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
    };
    add_values(0, stream.template place<2>());
    if (round + kHalfTiles * kKeyTile < end) add_values(1, stream.template place<3>());
    const int next = round + kRoundKeys;
    if (next < end && (next & ((1 << shift) - 1)) != 0) continue;

    // The split is done: the parts of a group of channels together, as in attention.cuh.
    const int split = round >> shift;
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
      if (g == 0 && pair < Stream::kParts) {
        total[pair][first_column + 8 * n + 2 * t] = state.ones[n][0];
        total[pair][first_column + 8 * n + 2 * t + 1] = state.ones[n][1];
      }
    }
    __syncthreads();
    // note: they are read before anybody comes to the barriers of the next round, and written
    // after.
    const float *group_sums = sums - stream.part() * (kPromptSumBytes / 4);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = first_column + 8 * n + 2 * t + i, row = column / args.group_size;
        const int context = position + 1 + row;
        if (column >= num_columns || split << shift >= context) continue;
        const int head = first_head + column - row * args.group_size;
        const int64_t entry =
            (static_cast<int64_t>(local_row + row) * args.num_heads + head) * args.max_splits +
            split;
        float sum = total[0][column];
#pragma unroll
        for (int p = 1; p < Stream::kParts; ++p) sum = __fadd_rn(sum, total[p][column]);
        float *to = args.partial_out + entry * kHeadDim, factor = 1.0f;
        if (context <= 1 << shift) {
          to = args.out +
               (static_cast<int64_t>(tile.first_row + row) * args.num_heads + head) * kHeadDim;
          factor = inverse_of(sum);
        } else if (pair == 0 && g == 0) {
          args.partial_stats[entry] = make_float2(state.m[n][i], sum);
        }
#pragma unroll
        for (int k = 0; k < 2 * kChannelSteps / Stream::kParts; ++k) {
          const int eighth = stream.part() + Stream::kParts * k;  // of the 64 channels
          const int channel = stream.first_channel() + 8 * eighth + g;
          if (kHeadDim % kChannels != 0 && channel >= kHeadDim) break;
          const float *from =
              group_sums + ((n * 2 * kChannelSteps + eighth) * kWarp + lane) * 2 + i;
          float y = from[0];
#pragma unroll
          for (int p = 1; p < Stream::kParts; ++p)
            y = __fadd_rn(y, from[p * (kPromptSumBytes / 4)]);
          to[channel] = __fmul_rn(y, factor);
        }
      }
    }
  }
  if (num_splits == 1) return;
  const int num_ctas = (num_splits + args.splits_per_cta - 1) / args.splits_per_cta;
  if (!is_last_arriver(args.counters + static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y,
                       num_ctas))
    return;
  // As merge_splits does for a row, all columns at once.
  float *split_weights = reinterpret_cast<float *>(shared);  // [columns][kMaxSplits]
  const auto entry_of = [&](int column) {
    const int row = column / args.group_size;
    return (static_cast<int64_t>(local_row + row) * args.num_heads + first_head + column -
            row * args.group_size) *
           args.max_splits;
  };
  const auto count_of = [&](int column) {
    return (position + 1 + column / args.group_size + (1 << shift) - 1) >> shift;
  };
  for (int column = warp; column < num_columns; column += 2 * kAttentionWarps)
    weigh_splits(args, entry_of(column), count_of(column), split_weights + column * kMaxSplits);
  __syncthreads();
  constexpr int kQuads = kHeadDim / 4;
  for (int i = static_cast<int>(threadIdx.x); i < num_columns * kQuads; i += kPromptThreads) {
    const int column = i / kQuads, channel = i % kQuads * 4, count = count_of(column);
    if (count == 1) continue;
    const int64_t entry = entry_of(column);
    const float *from = args.partial_out + entry * kHeadDim + channel;
    const float *weight = split_weights + column * kMaxSplits;
    float acc[4] = {};
#pragma unroll 8
    for (int s = 0; s < count; ++s) {
      const float4 v = __ldcg(reinterpret_cast<const float4 *>(from + s * kHeadDim));
      acc[0] = __fmaf_rn(weight[s], v.x, acc[0]);
      acc[1] = __fmaf_rn(weight[s], v.y, acc[1]);
      acc[2] = __fmaf_rn(weight[s], v.z, acc[2]);
      acc[3] = __fmaf_rn(weight[s], v.w, acc[3]);
    }
    const int64_t head =
        static_cast<int64_t>(args.first_row) * args.num_heads + entry / args.max_splits;
    *reinterpret_cast<float4 *>(args.out + head * kHeadDim + channel) =
        make_float4(acc[0], acc[1], acc[2], acc[3]);
  }
}

}  // namespace cuda
}  // namespace xllm
