// Activations of a product in shared memory, all of K.
#pragma once

#include "backend/cuda/matmul_args.cuh"
#include "backend/cuda/row_norm.cuh"

namespace xllm {
namespace cuda {

XLLM_HOST_DEVICE int staged_acts_bytes(int num_units, int token_pad) {
  return num_units * 2 * token_pad * (32 + 8);
}

// codes [blocks][pad][32], scales [blocks][pad] {d, s}: pad rows of each block, without the rest of
// its group of 8. Copies without registers, so that all of them are on their way at once; waits for
// them, and for every copy that was asked for before.
__device__ __forceinline__ void stage_acts(const MatmulArgs &args, int num_blocks, int pad,
                                           uint8_t *codes, uint8_t *scales) {
  const int num_threads = static_cast<int>(blockDim.x);
  const int64_t base =
      static_cast<int64_t>(args.first_token / kActGroup) * args.act.num_blocks * kActGroup;
  const uint8_t *from_codes = reinterpret_cast<const uint8_t *>(args.act.codes) + base * kActBlock;
  const uint8_t *from_scales = reinterpret_cast<const uint8_t *>(args.act.scales + base);
  const int shift = 31 - __clz(pad);  // pad is a power of two
  for (int i = static_cast<int>(threadIdx.x); i < num_blocks * pad * 2; i += num_threads) {
    const int block = i >> (shift + 1), piece = i & (2 * pad - 1);  // of 16 bytes
    copy_async_16(codes + i * 16, from_codes + block * (kActGroup * kActBlock) + piece * 16);
  }
  for (int i = static_cast<int>(threadIdx.x); i < num_blocks * pad; i += num_threads) {
    const int block = i >> shift, token = i & (pad - 1);
    copy_async_8(scales + i * 8, from_scales + (block * kActGroup + token) * 8);
  }
  commit_copies();
  if (args.norm_in.squares == nullptr) {
    wait_for_copies<0>();
    __syncthreads();
    return;
  }
  // The norm that was left to do, while the copies are on their way.
  __shared__ float inverse[kActGroup];
  const int num_row_blocks = args.norm_in.num_cols / kActBlock;
  for (int token = static_cast<int>(threadIdx.x) >> 5; token < args.num_tokens;
       token += num_threads / kWarp) {
    const float value =
        row_inverse(args.norm_in.squares + (args.first_token + token) * num_row_blocks,
                    num_row_blocks, args.norm_in.num_cols, args.norm_in.eps);
    if ((threadIdx.x & 31) == 0) inverse[token] = value;
  }
  wait_for_copies<0>();
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num_blocks * pad; i += num_threads) {
    const int token = i & (pad - 1);
    float2 *scale = reinterpret_cast<float2 *>(scales) + i;
    if (token < args.num_tokens) *scale = scaled_by(*scale, inverse[token]);
  }
  __syncthreads();
}

}  // namespace cuda
}  // namespace xllm
