// Activations as the integer products want them: 11-bit integers per token and chunk of 256
// columns, in two planes of int8.
//   x = d * q, q = 8 * hi + lo, |q| <= 1016, hi in -127..127, lo in -4..3; d per token and chunk.
//
// A group of 8 tokens (the N of an mma) and a chunk of columns lie together, so that one bulk copy
// brings them; columns past the end of the row are zeros:
//   codes   [8 blocks of 32][2 halves][2 planes: hi, lo][8 tokens][16 columns]: 8 rows of 16 bytes
//           are one matrix of ldmatrix, the b0 (b1 of the second half) of m16n8k32
//   scales  d f32 [8 tokens]
//   sums    of q over a block, int16 [8 tokens][8 blocks]
//   halves  of those: f16 {s >> 4, s & 15} [8 tokens][8 blocks], the b operand of an m16n8k16
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

constexpr int kActBlock = 32;
constexpr int kActGroup = 8;
constexpr int kActCols = 256;                     // of a chunk
constexpr int kActBlocks = kActCols / kActBlock;  // of a chunk
constexpr int kActTokenBytes = 2 * kActBlock;     // of a block's codes of one token
constexpr int kActMaxCode = 1016;

// Offsets in a chunk of kTokens tokens, 8 in global memory, fewer where a kernel keeps fewer.
XLLM_HOST_DEVICE constexpr int act_codes_bytes(int tokens) { return 2 * kActCols * tokens; }
XLLM_HOST_DEVICE constexpr int act_sums_offset(int tokens) {
  return act_codes_bytes(tokens) + 4 * tokens;
}
XLLM_HOST_DEVICE constexpr int act_chunk_bytes(int tokens) {
  return act_sums_offset(tokens) + 2 * kActBlocks * tokens;
}
constexpr int kActHalvesOffset = act_chunk_bytes(kActGroup);
constexpr int kActHalvesTokenBytes = 4 * kActBlocks;
constexpr int kActChunkBytes = kActHalvesOffset + kActHalvesTokenBytes * kActGroup;
static_assert(kActChunkBytes == 4512, "one bulk copy");

// Where the byte of a plane (0 hi, 1 lo) of column k of the chunk stands.
XLLM_HOST_DEVICE constexpr int act_code_offset(int tokens, int token, int k, int plane) {
  return ((k >> 4) * 2 + plane) * tokens * 16 + token * 16 + (k & 15);
}

// Not owned: [token groups][num_chunks][kActChunkBytes], aligned to 16. data null: there are none.
struct ActView {
  uint8_t *data;
  int num_chunks;

  XLLM_HOST_DEVICE uint8_t *chunk(int token, int index) const {
    return data + (static_cast<int64_t>(token / kActGroup) * num_chunks + index) * kActChunkBytes;
  }
};

// Rows of activations that are not quantised yet: [tokens][stride] f32, to be multiplied with
// norm_weight and 1 / rms first where norm_weight is not null (act_quant.cuh).
struct ActRows {
  const float *x;  // null: the product's activations are an ActView
  int64_t stride;
  int num_cols;
  const float *norm_weight;  // [num_cols]
  float eps;
};

}  // namespace cuda
}  // namespace xllm
