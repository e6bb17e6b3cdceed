// What the integer matrix kernels share: the description of a product, the order of its additions,
// its slices of K, and what is done with a finished output.
//
// y[token, row] = sum over k of W[row, k] * x[token, k], with W in tiles (planes.cuh) and x
// quantised (act_quant.cuh): in a chunk of 256 columns x is dx * q with integers q, and s_b is
// their sum over block b of 32. The canonical numbers, the same in every kernel:
//
// - p, of one output and chunk. Codes c are those of the file less their offset; everything that
//   bears an integer's name is exact in int32.
//     q4_k, q5_k   I = sum over blocks of sc_b * (sum of c q), J = sum of m_b * s_b,
//                  p = fma(d, float(I), -rn(dmin * float(J)))
//     q6_k         I = sum over the 16 half blocks of sc_h * (sum of c q),
//                  p = rn(d * float(I))
//     the others   over the blocks of the chunk ascending, p beginning at 0:
//                  p = fma(d_b, float(sum of c q), p), then for q4_1 and q5_1
//                  p = fma(m_b, float(s_b), p)
//   float(integer) rounds once, to nearest. In the others |sum of c q| < 2^22; |J| < 2^24.
// - K is cut into slices of whole chunks by K alone (num_slices_of, slice_first_chunk). Within a
//   slice acc = fma(dx, p, acc) over the chunks ascending, from 0.
// - y = ((acc_0 + acc_1) + acc_2) + ... over the slices.
//
// So a row's bytes do not depend on the kernel, the batch, or the launch.
#pragma once

#include "backend/cuda/act_format.cuh"
#include "backend/cuda/planes.cuh"

namespace xllm {
namespace cuda {

constexpr int kMaxSlices = 8;

// 1.5 * 2^23: an integer below 2^22 added to these bits reads as f32 12582912 + integer.
constexpr int kMagicBits = 0x4B400000;
constexpr float kMagic = 12582912.0f;

// How many slices K is cut into: one for each chunk up to 8 chunks; else a power of two, the fewest
// that are no longer than 5 chunks, and at most 8.
XLLM_HOST_DEVICE int num_slices_of(int num_chunks) {
  if (num_chunks <= kMaxSlices) return num_chunks;
  int slices = 1;
  while (slices < kMaxSlices && slices * 5 < num_chunks) slices *= 2;
  return slices;
}

// Where slice s begins; slice s ends where s + 1 begins. Lengths differ by one chunk at most.
XLLM_HOST_DEVICE int slice_first_chunk(int slice, int num_slices, int num_chunks) {
  return slice * num_chunks / num_slices;
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

enum Epilogue : int {
  kStore,     // out[token, row] = y
  kAddTo,     // out[token, row] += y (the residual)
  kSwiGlu,    // segments gate and up, of as many rows: out[token, row] = silu(gate) * up
  kPartials,  // out[slice, token of the launch, row] = acc of the slice; no bias
};

// What every kernel of products is told; a kernel adds what it alone needs.
struct MatmulArgs {
  MatmulSegment segments[3];
  int num_segments;
  int num_units;   // of K, 64 columns each
  int num_chunks;  // of K, the last one of fewer units at a ragged end
  int num_slices;
  ActView act;  // one of the two
  ActRows rows;
  int first_token;  // of the launch, in act or rows and in out; a multiple of 8 with act
  int num_tokens;   // of the launch
  int epilogue;
  float *out;  // [token, out_stride] f32
  int64_t out_stride;
  const float *bias;  // [rows of the output], or null; never with kSwiGlu
};

// Finishes one output of kStore or kAddTo: y of row `local` of a segment, which may be a row of
// padding.
__device__ __forceinline__ void finish_output(const MatmulArgs &args, const MatmulSegment &segment,
                                              int local, int token, float y) {
  if (local >= segment.num_rows) return;
  const int column = segment.out_row + local;
  float *out = args.out + static_cast<int64_t>(args.first_token + token) * args.out_stride + column;
  if (args.bias != nullptr) y = __fadd_rn(y, args.bias[column]);
  *out = args.epilogue == kAddTo ? __fadd_rn(*out, y) : y;
}

// silu(gate) * up.
__device__ __forceinline__ float swiglu(float gate, float up) { return __fmul_rn(silu(gate), up); }

}  // namespace cuda
}  // namespace xllm
