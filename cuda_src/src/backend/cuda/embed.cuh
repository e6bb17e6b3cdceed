// The first residual row: the embedding of a token, expanded from its tile.
#pragma once

#include "backend/cuda/planes.cuh"

namespace xllm {
namespace cuda {

__device__ __forceinline__ float device_half(uint16_t bits) { return half_bits_to_float(bits); }

struct EmbedArgs {
  const uint8_t *table;  // tiles, or rows where the type is plain
  int type;
  int64_t tile_bytes;
  int num_cols;
  const int32_t *token_ids;  // [num_tokens]; < 0: sampled[sampler_rows[row]]
  const int32_t *sampler_rows;
  const int32_t *sampled;
  float *x;  // [num_tokens, num_cols]
};

constexpr int kEmbedThreads = 256;

// x = E[token]; grid: tokens.
__global__ void __launch_bounds__(kEmbedThreads)
    embed_kernel(const __grid_constant__ EmbedArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x);
  int token = args.token_ids[row];
  if (token < 0) token = args.sampled[args.sampler_rows[row]];
  if (token < 0) token = 0;  // the row that gave it was refused; nobody reads what follows
  for (int col = static_cast<int>(threadIdx.x); col < args.num_cols; col += kEmbedThreads) {
    float v;
    if (args.type >= kNumTileTypes) {
      const int64_t at = static_cast<int64_t>(token) * args.num_cols + col;
      const uint16_t *half = reinterpret_cast<const uint16_t *>(args.table);
      v = args.type == kWeightF32   ? reinterpret_cast<const float *>(args.table)[at]
          : args.type == kWeightF16 ? half_bits_to_float(half[at])
                                    : __uint_as_float(static_cast<uint32_t>(half[at]) << 16);
    } else {
      v = tile_value(args.type, args.table + token / kTileRows * args.tile_bytes, token % kTileRows,
                     col, device_half);
    }
    args.x[static_cast<int64_t>(row) * args.num_cols + col] = v;
  }
}

}  // namespace cuda
}  // namespace xllm
