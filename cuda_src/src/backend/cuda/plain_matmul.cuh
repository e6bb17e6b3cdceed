// Products with f32, f16 and bf16 matrices, for the few of them that quantised files hold:
// activations are the same integers, expanded again. One warp per row, up to 8 tokens per pass;
// lane k of a warp takes element k of each block of 32, ascending.
#pragma once

#include "backend/cuda/matmul_args.cuh"

namespace xllm {
namespace cuda {

struct PlainArgs {
  const void *weights;  // [num_rows, num_cols]
  int type;             // kWeightF32, kWeightF16, kWeightBF16
  int64_t num_rows, num_cols;
  ActView act;
  int first_token, num_tokens;  // at most 8, of one group
  float *out;                   // [token, out_stride], at out_row
  int64_t out_stride;
  int out_row;
  const float *bias;  // as out, or null
  bool is_added;
};

__device__ __forceinline__ float plain_value(const void *data, int type, int64_t i) {
  if (type == kWeightF32) return static_cast<const float *>(data)[i];
  const uint16_t bits = static_cast<const uint16_t *>(data)[i];
  return type == kWeightF16 ? half_bits_to_float(bits)
                            : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__global__ void __launch_bounds__(256) plain_matmul_kernel(const __grid_constant__ PlainArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (row >= args.num_rows) return;
  float acc[kActGroup] = {};
  const int num_blocks = static_cast<int>((args.num_cols + kActBlock - 1) / kActBlock);
  for (int block = 0; block < num_blocks; ++block) {
    const int64_t col = static_cast<int64_t>(block) * kActBlock + lane;
    const float w = col < args.num_cols
                        ? plain_value(args.weights, args.type, row * args.num_cols + col)
                        : 0.0f;
#pragma unroll
    for (int m = 0; m < kActGroup; ++m) {
      if (m < args.num_tokens) {
        const uint8_t *chunk = args.act.chunk(args.first_token + m, block / kActBlocks);
        const uint8_t *code =
            chunk + act_code_offset(kActGroup, m, block % kActBlocks * kActBlock + lane, 0);
        const int q = 8 * static_cast<int8_t>(code[0]) +
                      static_cast<int8_t>(code[act_code_offset(kActGroup, 0, 0, 1)]);
        const float scale = reinterpret_cast<const float *>(chunk + act_codes_bytes(kActGroup))[m];
        acc[m] = __fmaf_rn(w, __fmul_rn(static_cast<float>(q), scale), acc[m]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kActGroup; ++m) {
    if (m >= args.num_tokens) break;
    float y = warp_sum(acc[m]);
    if (lane == 0) {
      const int64_t column = args.out_row + row;
      if (args.bias != nullptr) y = __fadd_rn(y, args.bias[column]);
      float *to = args.out + (args.first_token + m) * args.out_stride + column;
      *to = args.is_added ? __fadd_rn(*to, y) : y;
    }
  }
}

}  // namespace cuda
}  // namespace xllm
