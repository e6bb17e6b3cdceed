// Products of 9 to 64 tokens: 64 rows (4 tiles, one per warp) by 8 * kGroups tokens per CTA;
// weights and activations stream through one ring in shared memory, the activations shared by the
// four warps.
//   grid    x: groups of 4 tiles (of one segment; for kSwiGlu 2 of gate and 2 of up), y: slices for
//   kPartials, else 1 shared  ring [stages] { tiles [4][stage_bytes], codes [kGroups][8
//   blocks][8][32], scales [kGroups][8 blocks][8] {d, s} };
//           after the loop of kSwiGlu: outputs [64 rows][8 * kGroups + 1] f32
#pragma once

#include "backend/cuda/mma_chunk.cuh"

namespace xllm {
namespace cuda {

constexpr int kTileWarps = 4;
constexpr int kTileStages = 3;

XLLM_HOST_DEVICE int mma_tile_stage_bytes(int stage_bytes, int groups) {
  return kTileWarps * stage_bytes + groups * 8 * 8 * (32 + 8);
}

template <int kGroups>
__global__ void __launch_bounds__(kTileWarps *kWarp)
    mma_tile_kernel(const __grid_constant__ MatmulArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int num_chunks = (args.num_units + kUnitsPerChunk - 1) / kUnitsPerChunk;
  const int full_stage = mma_tile_stage_bytes(args.stage_bytes, kGroups);

  // This warp's tile. A group of four never spans two segments.
  int s = 0, tile = 0;
  const int group = static_cast<int>(blockIdx.x);
  if (args.epilogue == kSwiGlu) {
    s = warp >> 1;
    tile = 2 * group + (warp & 1);
  } else {
    int g = group;
    while (s + 1 < args.num_segments && g >= (args.segments[s].num_tiles + 3) / 4)
      g -= (args.segments[s++].num_tiles + 3) / 4;
    tile = 4 * g + warp;
  }
  const MatmulSegment &segment = args.segments[s];
  const bool has_tile = tile < segment.num_tiles;
  const int bytes = static_cast<int>(chunk_bytes(segment.type));
  const uint8_t *tile_from = segment.tiles + tile * segment.tile_bytes;

  const bool is_partial = args.epilogue == kPartials;
  const int first_slice = is_partial ? static_cast<int>(blockIdx.y) : 0;
  const int first_chunk = slice_first_chunk(first_slice, args.num_slices, num_chunks);
  const int end_chunk =
      is_partial ? slice_first_chunk(first_slice + 1, args.num_slices, num_chunks) : num_chunks;

  const auto fetch_weights = [&](int chunk, uint8_t *stage) {
    if (chunk >= end_chunk || !has_tile) return;
    const int64_t offset = static_cast<int64_t>(chunk) * bytes;
    const int64_t left = segment.tile_bytes - offset;
    const int size = left < bytes ? static_cast<int>(left) : bytes;
    uint8_t *to = stage + warp * args.stage_bytes;
    for (int i = lane * 16; i < size; i += kWarp * 16)
      copy_async_16(to + i, tile_from + offset + i);
  };
  const int group_tokens = args.first_token / kActGroup;
  const auto fetch_acts = [&](int chunk, uint8_t *stage) {
    if (chunk >= end_chunk) return;
    uint8_t *codes = stage + kTileWarps * args.stage_bytes;
    uint8_t *scales = codes + kGroups * 8 * 256;
    const int blocks = min(8, args.num_units * 2 - chunk * 8);
    for (int i = static_cast<int>(threadIdx.x); i < kGroups * 8 * 20; i += kTileWarps * kWarp) {
      const int piece = i % 20, block = i / 20 % 8, n = i / 160;  // 16 pieces of codes, 4 of scales
      if (block >= blocks) continue;
      const int64_t entry =
          (static_cast<int64_t>(group_tokens + n) * args.act.num_blocks + chunk * 8 + block) *
          kActGroup;
      if (piece < 16) {
        copy_async_16(
            codes + (n * 8 + block) * 256 + piece * 16,
            reinterpret_cast<const uint8_t *>(args.act.codes) + entry * kActBlock + piece * 16);
      } else {
        copy_async_16(
            scales + (n * 8 + block) * 64 + (piece - 16) * 16,
            reinterpret_cast<const uint8_t *>(args.act.scales + entry) + (piece - 16) * 16);
      }
    }
  };

#pragma unroll
  for (int i = 0; i < kTileStages - 1; ++i) fetch_weights(first_chunk + i, shared + i * full_stage);
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kTileStages - 1; ++i) {
    fetch_acts(first_chunk + i, shared + i * full_stage);
    commit_copies();
  }

  const int g = lane >> 2, t = lane & 3;
  LaneActs acts;
  acts.codes_group = 8 * 256;
  acts.codes_block = 256;
  acts.scales_group = 8 * 64;
  acts.scales_block = 64;

  float acc[kNumChains][kGroups][4] = {}, total[kGroups][4] = {};
  int slice = first_slice;
  int stage = 0;
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
    wait_for_copies<kTileStages - 2>();
    __syncthreads();
    uint8_t *next = shared + (stage == 0 ? kTileStages - 1 : stage - 1) * full_stage;
    fetch_weights(chunk + kTileStages - 1, next);
    fetch_acts(chunk + kTileStages - 1, next);
    commit_copies();
    const uint8_t *now = shared + stage * full_stage;
    acts.codes = now + kTileWarps * args.stage_bytes + g * 32 + t * 8;
    acts.scales = now + kTileWarps * args.stage_bytes + kGroups * 8 * 256 + t * 16;
    const int units = min(kUnitsPerChunk, args.num_units - chunk * kUnitsPerChunk);
    if (has_tile) {
      mma_chunk_of<kGroups, false>(segment.type, now + warp * args.stage_bytes, units, lane, acts,
                                   acc);
    }
    if (++stage == kTileStages) stage = 0;
    if (chunk + 1 < slice_first_chunk(slice + 1, args.num_slices, num_chunks)) continue;
    // End of a slice: into the total, in order. The first one is copied, so that the sum is p0 + p1
    // + ... and not 0 + p0 + ...
    const bool is_first = slice == first_slice;
    ++slice;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float p = sum_chains(acc[0][n][i], acc[1][n][i], acc[2][n][i], acc[3][n][i]);
        total[n][i] = is_first ? p : __fadd_rn(total[n][i], p);
#pragma unroll
        for (int c = 0; c < kNumChains; ++c) acc[c][n][i] = 0;
      }
    }
  }
  let_next_kernel_start();

  if (is_partial) {
    if (!has_tile) return;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile * kTileRows + g + 8 * (i >> 1), token = n * 8 + 2 * t + (i & 1);
        if (row < segment.num_rows && token < args.num_tokens) {
          args.out[(static_cast<int64_t>(first_slice) * args.num_tokens + token) * args.out_stride +
                   segment.out_row + row] = total[n][i];
        }
      }
    }
    return;
  }
  if (args.epilogue != kSwiGlu) {
    if (!has_tile) return;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = n * 8 + 2 * t + (i & 1);
        if (token < args.num_tokens)
          finish_output(args, segment, tile, g + 8 * (i >> 1), token, total[n][i]);
      }
    }
    return;
  }
  // gate rows are 0..31, up rows 32..63 of the outputs; the ring is free once every warp is here.
  constexpr int kStride = 8 * kGroups + 1;
  float *outputs = reinterpret_cast<float *>(shared);
  wait_for_copies<0>();
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      outputs[(warp * kTileRows + g + 8 * (i >> 1)) * kStride + n * 8 + 2 * t + (i & 1)] =
          total[n][i];
    }
  }
  __syncthreads();
  for (int token = warp; token < args.num_tokens; token += kTileWarps) {
    const float gate = outputs[lane * kStride + token];
    const float up = outputs[(32 + lane) * kStride + token];
    quantize_block(__fmul_rn(silu(gate), up), args.act_out, args.first_token + token, group);
  }
}

// Adds up partials [slices, tokens, rows] in order and finishes the outputs. One output per thread.
__global__ void __launch_bounds__(256)
    combine_partials_kernel(const float *partials, int num_slices, int num_tokens, int num_rows,
                            float *out, int64_t out_stride, int first_token, const float *bias,
                            bool is_added) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x);
  const int token = static_cast<int>(blockIdx.y);
  if (row >= num_rows) return;
  const int64_t slice_stride = static_cast<int64_t>(num_tokens) * num_rows;
  const float *p = partials + static_cast<int64_t>(token) * num_rows + row;
  float y = p[0];
  for (int i = 1; i < num_slices; ++i) y = __fadd_rn(y, p[i * slice_stride]);
  if (bias != nullptr) y = __fadd_rn(y, bias[row]);
  float *to = out + static_cast<int64_t>(first_token + token) * out_stride + row;
  *to = is_added ? __fadd_rn(*to, y) : y;
}

}  // namespace cuda
}  // namespace xllm
