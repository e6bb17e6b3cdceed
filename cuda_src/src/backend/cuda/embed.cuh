// The first residual row: the embedding of a token, expanded from its tile, and its norm.
#pragma once

#include "backend/cuda/planes.cuh"
#include "backend/cuda/row_norm.cuh"

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
  const float *norm_weight;
  float eps;
  ActView act;
};

// x = E[token], act = Q(rms_norm(x) * norm_weight); grid: tokens.
template <int kPerThread>
__global__ void __launch_bounds__(kRowThreads)
    embed_kernel(const __grid_constant__ EmbedArgs args) {
  __shared__ float shared[kMaxRowBlocks];
  float w[kPerThread], v[kPerThread];
  load_row(args.norm_weight, args.num_cols, w);
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x);
  int token = args.token_ids[row];
  if (token < 0) token = args.sampled[args.sampler_rows[row]];
  if (token < 0) token = 0;  // the row that gave it was refused; nobody reads what follows
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int col = (static_cast<int>(threadIdx.x >> 5) + kRowWarps * i) * kActBlock +
                    static_cast<int>(threadIdx.x & 31);
    v[i] = 0;
    if (col >= args.num_cols) continue;
    if (args.type >= kNumTileTypes) {
      const int64_t at = static_cast<int64_t>(token) * args.num_cols + col;
      const uint16_t *half = reinterpret_cast<const uint16_t *>(args.table);
      v[i] = args.type == kWeightF32   ? reinterpret_cast<const float *>(args.table)[at]
             : args.type == kWeightF16 ? half_bits_to_float(half[at])
                                       : __uint_as_float(static_cast<uint32_t>(half[at]) << 16);
    } else {
      v[i] = tile_value(args.type, args.table + token / kTileRows * args.tile_bytes,
                        token % kTileRows, col, device_half);
    }
    args.x[static_cast<int64_t>(row) * args.num_cols + col] = v[i];
  }
  norm_and_quantize(v, w, args.num_cols, args.eps, args.act, row, shared);
}

}  // namespace cuda
}  // namespace xllm
