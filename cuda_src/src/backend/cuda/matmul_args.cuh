// What the integer matrix kernels share: the description of a product, its slices of K, and what is
// done with a finished output.
//
// y[token, row] = sum over k of W[row, k] * x[token, k], with W in tiles (planes.cuh) and x
// quantised (act_quant.cuh). The canonical order of additions, the same in every kernel: K is cut
// into slices of whole chunks of 256 columns, by K alone (slice_first_chunk). Inside a slice there
// are four chains; chain c takes unit c (64 columns: blocks 2c and 2c + 1) of every chunk of the
// slice, ascending. For each block of 32 (each of its halves for q6_k)
//     acc_c = fma(dw, rn(dot * d), acc_c), then acc_c = fma(shift, s, acc_c) where there is a
//     minimum.
// A slice's sum is p = (acc_0 + acc_1) + (acc_2 + acc_3), chains without blocks being 0, and
// y = ((p_0 + p_1) + p_2) + ... over the slices. So a row's bytes do not depend on the kernel, the
// batch, or the launch.
#pragma once

#include "backend/cuda/act_quant.cuh"
#include "backend/cuda/planes.cuh"

namespace xllm {
namespace cuda {

constexpr int kMaxSlices = 8;
constexpr int kNumChains = kUnitsPerChunk;

// 1.5 * 2^23: an accumulator that starts at these bits reads as f32 12582912 + dot, |dot| < 2^22.
constexpr int kMagicBits = 0x4B400000;
constexpr float kMagic = 12582912.0f;

// How many slices K is cut into: a power of two, the fewest that are no longer than 5 chunks, and
// at most 8.
XLLM_HOST_DEVICE int num_slices_of(int num_chunks) {
  int slices = 1;
  while (slices < kMaxSlices && slices * 5 < num_chunks) slices *= 2;
  return slices;
}

// Where slice s begins; slice s ends where s + 1 begins. Lengths differ by one chunk at most.
XLLM_HOST_DEVICE int slice_first_chunk(int slice, int num_slices, int num_chunks) {
  return slice * num_chunks / num_slices;
}

// A slice's sum from its chains.
__device__ __forceinline__ float sum_chains(float a0, float a1, float a2, float a3) {
  return __fadd_rn(__fadd_rn(a0, a1), __fadd_rn(a2, a3));
}

// The row tiles of one matrix of a fused product.
struct MatmulSegment {
  const uint8_t *tiles;
  int64_t tile_bytes;
  int type;  // WeightType, a tile one
  int num_tiles;
  int num_rows;  // <= 16 * num_tiles
  int out_row;   // where its row 0 goes in a row of the output
};

// A norm that the product before left to this one: sums of squares of the blocks of each row
// (row_norm.cuh), the scales of the activations being d and sum(q) without it. squares null:
// nothing is left to do.
struct DeferredNorm {
  float *squares;  // [8 tokens][num_cols / 32]
  int num_cols;
  float eps;
};

enum Epilogue : int {
  kStore,     // out[token, row] = y
  kAddTo,     // out[token, row] += y (the residual)
  kAddNorm,   // out += y; act_out = Q(out * norm_weight) and its squares, the norm deferred
  kSwiGlu,    // segments gate and up: act_out = Q(silu(gate) * up)
  kPartials,  // out[slice, token, row] = p
};

struct MatmulArgs {
  MatmulSegment segments[3];
  int num_segments;
  int num_units;  // of K, 64 columns each
  int num_slices;
  int num_groups;       // units of work of a CTA, of group_tiles(args) tiles
  int tiles_per_group;  // for kStore and kAddTo
  ActView act;
  DeferredNorm norm_in;  // of act
  int first_token;       // a multiple of 8; of 4, 2, 1 where fewer tokens go at once (mma_few)
  int num_tokens;        // of this launch
  int stage_bytes;       // shared memory of one ring stage of one warp (mma_few) or tile (mma_tile)
  int num_stages;
  int stage_chunks;  // of a stage (mma_few)
  int epilogue;
  float *out;  // [token, out_stride] f32
  int64_t out_stride;
  const float *bias;  // [rows of the output], or null
  ActView act_out;
  const float *norm_weight;  // of kAddNorm
  float *squares_out;        // [8 tokens][num_groups]
};

// Tiles of a group: what a CTA finishes at once. 2 of gate and 2 of up for kSwiGlu; 2, a block of
// the output, for kAddNorm.
__device__ __forceinline__ int group_tiles(const MatmulArgs &args) {
  return args.epilogue == kSwiGlu ? 4 : args.epilogue == kAddNorm ? 2 : args.tiles_per_group;
}

// One tile of the work: which segment, and which of its tiles. False past the last one.
__device__ __forceinline__ bool find_tile(const MatmulArgs &args, int group, int index,
                                          int *segment, int *tile) {
  if (args.epilogue == kSwiGlu) {
    *segment = index >> 1;
    *tile = 2 * group + (index & 1);
    return true;
  }
  if (args.epilogue == kAddNorm) {
    *segment = 0;
    *tile = 2 * group + index;
    return true;
  }
  int s = 0, t = group * args.tiles_per_group + index;
  while (s + 1 < args.num_segments && t >= args.segments[s].num_tiles)
    t -= args.segments[s++].num_tiles;
  *segment = s;
  *tile = t;
  return t < args.segments[s].num_tiles;
}

// Store or add one finished output.
__device__ __forceinline__ void finish_output(const MatmulArgs &args, const MatmulSegment &segment,
                                              int tile, int row, int token, float y) {
  const int local = tile * kTileRows + row;
  if (local >= segment.num_rows) return;
  const int column = segment.out_row + local;
  float *out = args.out + static_cast<int64_t>(args.first_token + token) * args.out_stride + column;
  if (args.bias != nullptr) y = __fadd_rn(y, args.bias[column]);
  *out = args.epilogue == kAddTo ? __fadd_rn(*out, y) : y;
}

}  // namespace cuda
}  // namespace xllm
