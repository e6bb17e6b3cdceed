// The quantiser of activations, a warp per chunk of 256 columns: the same numbers wherever a row is
// made ready, be it by a kernel of its own (act_rows.cuh) or by the product that reads it.
//
// With amax the largest |x| of the chunk: d = amax / 1016, q = clamp(rn(x * (1 / d)), +-1016).
// Under a norm x stands for v * norm_weight, and d is multiplied with 1 / rms afterwards, so that
// codes do not wait for it. A non-finite x makes d non-finite: it reaches the logits and is seen
// there.
#pragma once

#include "backend/cuda/act_format.cuh"

namespace xllm {
namespace cuda {

constexpr int kActLaneCols = 8;  // of a chunk, per lane

// Loads the columns 8 * lane.. of the chunk that begins at column `first`; zeros past the row's
// end. `first` and the row's length are multiples of 8, row aligned to 16.
__device__ __forceinline__ void load_act_cols(const float *row, int first, int num_cols, int lane,
                                              float (&v)[kActLaneCols]) {
  const int col = first + lane * kActLaneCols;
  float4 x[2] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
  if (col < num_cols) {
    x[0] = *reinterpret_cast<const float4 *>(row + col);
    x[1] = *reinterpret_cast<const float4 *>(row + col + 4);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    v[4 * i] = x[i].x;
    v[4 * i + 1] = x[i].y;
    v[4 * i + 2] = x[i].z;
    v[4 * i + 3] = x[i].w;
  }
}

// A lane's share of a quantised chunk.
struct ActLane {
  uint2 hi, lo;
  float d;  // of the chunk, the same in all lanes
  int sum;  // of q over the lane's block, the same in its four lanes
};

__device__ __forceinline__ uint32_t pack_bytes(int a, int b, int c, int d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// By a whole warp, lane l holding columns 8 l.. of the chunk.
__device__ __forceinline__ ActLane quantize_chunk(const float (&x)[kActLaneCols]) {
  constexpr uint32_t kAll = 0xffffffffu;
  // The bits of |x| order as |x| does, with infinity and NaN on top.
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kActLaneCols; ++i)
    largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
  ActLane lane;
  lane.d = __fdiv_rn(__uint_as_float(warp_max(largest)), static_cast<float>(kActMaxCode));
  const float inverse = lane.d > 0.0f ? __fdiv_rn(1.0f, lane.d) : 0.0f;
  int hi[kActLaneCols], lo[kActLaneCols];
  lane.sum = 0;
#pragma unroll
  for (int i = 0; i < kActLaneCols; ++i) {
    const int q = max(-kActMaxCode, min(kActMaxCode, __float2int_rn(__fmul_rn(x[i], inverse))));
    lane.sum += q;
    hi[i] = (q + 4) >> 3;
    lo[i] = q - 8 * hi[i];
  }
  lane.hi =
      make_uint2(pack_bytes(hi[0], hi[1], hi[2], hi[3]), pack_bytes(hi[4], hi[5], hi[6], hi[7]));
  lane.lo =
      make_uint2(pack_bytes(lo[0], lo[1], lo[2], lo[3]), pack_bytes(lo[4], lo[5], lo[6], lo[7]));
  lane.sum += __shfl_xor_sync(kAll, lane.sum, 1);
  lane.sum += __shfl_xor_sync(kAll, lane.sum, 2);
  return lane;
}

// Writes codes and sums of a chunk of kTokens tokens (act_format.cuh); `token` < kTokens.
template <int kTokens>
__device__ __forceinline__ void store_act_codes(const ActLane &q, int token, int lane,
                                                uint8_t *chunk) {
  uint8_t *at = chunk + act_code_offset(kTokens, token, lane * kActLaneCols, 0);
  *reinterpret_cast<uint2 *>(at) = q.hi;
  *reinterpret_cast<uint2 *>(at + act_code_offset(kTokens, 0, 0, 1)) = q.lo;
  if ((lane & 3) == 0) {
    reinterpret_cast<int16_t *>(chunk + act_sums_offset(kTokens))[token * kActBlocks + lane / 4] =
        static_cast<int16_t>(q.sum);
    if constexpr (kTokens == kActGroup) {
      reinterpret_cast<__half2 *>(chunk + kActHalvesOffset)[token * kActBlocks + lane / 4] =
          __halves2half2(__int2half_rn(q.sum >> 4), __int2half_rn(q.sum & 15));
    }
  }
}

// Writes the scale: d, or d * (1 / rms) under a norm. One lane calls it.
template <int kTokens>
__device__ __forceinline__ void store_act_scale(float scale, int token, uint8_t *chunk) {
  reinterpret_cast<float *>(chunk + act_codes_bytes(kTokens))[token] = scale;
}

// ---- the norm: 1 / rms of a row from the sums of squares of its chunks ----

// Of one chunk, by a whole warp: each lane its columns in order, then over the lanes.
__device__ __forceinline__ float chunk_squares(const float (&v)[kActLaneCols]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kActLaneCols; ++i) sum = __fmaf_rn(v[i], v[i], sum);
  return warp_sum(sum);
}

// The sum over the chunks ascending, from squares[0].
__device__ __forceinline__ float row_inverse(const float *squares, int num_chunks, int num_cols,
                                             float eps) {
  float sum = squares[0];
  for (int i = 1; i < num_chunks; ++i) sum = __fadd_rn(sum, squares[i]);
  const float mean = __fdiv_rn(sum, static_cast<float>(num_cols));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

}  // namespace cuda
}  // namespace xllm
