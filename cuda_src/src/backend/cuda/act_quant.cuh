// Activations as the integer products want them: int8 per token and 32 columns, made the same way
// wherever a row is finished.
//   x = d * q, q in -127..127. d is max|x| / 127 with the two low bits of its mantissa cleared, so
//   that d times an integer below 2^22 is one rounding away from exact wherever it is formed; s = d
//   * sum(q) serves the types that add a constant per block.
// A non-finite x makes d non-finite, so it reaches the logits and is seen there.
// Layout: groups of 8 tokens (the N of an mma); within one [block][8 tokens][32] codes and
// [block][8 tokens] {d, s}. Within its 32 a column k lies at (k % 16) / 4 * 8 + k / 16 * 4 + k % 4:
// the eight bytes a lane feeds to an mma are neighbours.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

constexpr int kActBlock = 32;
constexpr int kActGroup = 8;

// Not owned. Blocks from ceil(columns / 32) to num_blocks exist and hold zeros (a matrix's columns
// are padded to units of 64).
struct ActView {
  int8_t *codes;   // [groups][num_blocks][8][32]
  float2 *scales;  // [groups][num_blocks][8] d, s
  int num_blocks;

  __device__ __forceinline__ int64_t entry(int token, int block) const {
    return (static_cast<int64_t>(token / kActGroup) * num_blocks + block) * kActGroup +
           token % kActGroup;
  }
};

__device__ __forceinline__ int act_position(int k) {
  return (k & 15) / 4 * 8 + k / 16 * 4 + (k & 3);
}

// The scale of a block whose row is yet to be multiplied with `inverse`; raw: d and sum(q) before
// it.
__device__ __forceinline__ float2 scaled_by(const float2 &raw, float inverse) {
  const float d = __uint_as_float(__float_as_uint(__fmul_rn(raw.x, inverse)) & ~3u);
  return make_float2(d, __fmul_rn(d, raw.y));
}

// Quantises one block as quantize_block does and returns d and sum(q) instead of writing them.
__device__ __forceinline__ float2 quantize_codes(float x, const ActView &act, int token,
                                                 int block) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  // The bits of |x| order as |x| does, with infinity and NaN on top.
  const float largest = __uint_as_float(warp_max(__float_as_uint(x) & 0x7fffffffu));
  const float d = __uint_as_float(__float_as_uint(__fdiv_rn(largest, 127.0f)) & ~3u);
  const float inverse = d > 0.0f ? __fdiv_rn(1.0f, d) : 0.0f;
  const int q = max(-127, min(127, __float2int_rn(__fmul_rn(x, inverse))));
  act.codes[act.entry(token, block) * kActBlock + act_position(lane)] = static_cast<int8_t>(q);
  return make_float2(d, static_cast<float>(warp_sum(q)));
}

// Quantises one block: lane k of the warp brings x[k] of 32.
__device__ __forceinline__ void quantize_block(float x, const ActView &act, int token, int block) {
  const float2 raw = quantize_codes(x, act, token, block);
  if ((threadIdx.x & 31) == 0)
    act.scales[act.entry(token, block)] = make_float2(raw.x, __fmul_rn(raw.x, raw.y));
}

}  // namespace cuda
}  // namespace xllm
