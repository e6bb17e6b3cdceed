// Activations of a product in shared memory, all of K.
#pragma once

#include "backend/cuda/matmul_args.cuh"
#include "backend/cuda/row_norm.cuh"

namespace xllm {
namespace cuda {

XLLM_HOST_DEVICE int staged_acts_bytes(int num_units, int token_pad) {
  return num_units * 2 * token_pad * (32 + 8);
}

// codes [blocks][kTokens][32], scales [blocks][kTokens] {d, s}: kTokens rows of each block, without
// the rest of its group of 8. Codes are copied without registers, all on their way at once; where a
// norm was left to do, its factor is worked out meanwhile. Waits for every cp.async that was asked
// for before, and for the whole CTA.
template <int kTokens>
__device__ __forceinline__ void stage_acts(const MatmulArgs &args, int num_blocks, uint8_t *codes,
                                           uint8_t *scales) {
  const int thread = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
  const int64_t base =
      static_cast<int64_t>(args.first_token / kActGroup) * args.act.num_blocks * kActGroup +
      args.first_token % kActGroup;
  const uint8_t *from_codes = reinterpret_cast<const uint8_t *>(args.act.codes) + base * kActBlock;
  const float2 *from_scales = args.act.scales + base;
  float2 *to_scales = reinterpret_cast<float2 *>(scales);
  // Number threads is a multiple of kTokens: a thread always has the same token.
  const int token = thread % kTokens;
  constexpr int kEach = 4;  // scales of a thread that are loaded ahead
  float2 ahead[kEach];
  const auto place = [&](int i) { return i / kTokens * kActGroup + token; };
  if (args.norm_in.squares != nullptr) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = thread + k * num_threads;
      if (i < num_blocks * kTokens) ahead[k] = from_scales[place(i)];
    }
  }
  for (int i = thread; i < num_blocks * kTokens * 2; i += num_threads) {
    const int block = i / (2 * kTokens), piece = i % (2 * kTokens);  // of 16 bytes
    copy_async_16(codes + i * 16, from_codes + block * (kActGroup * kActBlock) + piece * 16);
  }
  if (args.norm_in.squares == nullptr) {
    for (int i = thread; i < num_blocks * kTokens; i += num_threads)
      copy_async_8(to_scales + i, from_scales + place(i));
  } else {
    const int num_row_blocks = args.norm_in.num_cols / kActBlock;
    const auto inverse_of = [&](int of) {
      return row_inverse(args.norm_in.squares + (args.first_token + of) * num_row_blocks,
                         num_row_blocks, args.norm_in.num_cols, args.norm_in.eps);
    };
    float inverse;
    if constexpr (kTokens == 1) {
      inverse = inverse_of(0);
    } else {
      __shared__ float inverses[kActGroup];
      for (int of = thread >> 5; of < args.num_tokens; of += num_threads / kWarp) {
        const float value = inverse_of(of);
        if ((thread & 31) == 0) inverses[of] = value;
      }
      __syncthreads();
      inverse = token < args.num_tokens ? inverses[token] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = thread + k * num_threads;
      if (i < num_blocks * kTokens) to_scales[i] = scaled_by(ahead[k], inverse);
    }
    for (int i = thread + kEach * num_threads; i < num_blocks * kTokens; i += num_threads)
      to_scales[i] = scaled_by(from_scales[place(i)], inverse);
  }
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();
}

}  // namespace cuda
}  // namespace xllm
