// The inner loop on tensor cores: one tile times the activations of 8 * kGroups tokens over one
// chunk of K.
//
// Lane 4g + t holds rows g, g + 8 and, in token group n, tokens 2t, 2t + 1: acc[n] = {(g, 2t), (g,
// 2t + 1), (g + 8, 2t), ...}. No int -> float conversion: the accumulator of a block starts at the
// bits of 12582912.0f, so that after the mma its bits read as 12582912 + dot (|dot| < 2^22), and
// fma(x, d, -12582912 * d) is dot * d rounded once, because 12582912 * d is exact (act_quant.cuh).
#pragma once

#include "backend/cuda/matmul_args.cuh"

namespace xllm {
namespace cuda {

// Where a lane finds its activations: address of (group 0, block 0), and the strides in bytes.
struct LaneActs {
  const uint8_t *codes;   // 8 bytes of token g (or a token that stands for it)
  const uint8_t *scales;  // {d, s} of token 2t, then of 2t + 1
  int codes_group, codes_block, scales_group, scales_block;
};

// kOne: a single token; only lanes with t = 0 hold results, in acc[0][0] and acc[0][2].
template <int kType, int kStep, int kGroups, bool kOne>
__device__ __forceinline__ void mma_step(const typename WeightTile<kType>::Factors &factors,
                                         const uint32_t (&a)[4], const LaneActs &acts, int block,
                                         float (&acc)[kGroups][4]) {
  using Tile = WeightTile<kType>;
  const auto &dw = factors.dw[kStep];
  const auto &shift = factors.shift[kStep];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const uint2 b = *reinterpret_cast<const uint2 *>(acts.codes + n * acts.codes_group +
                                                     block * acts.codes_block);
    float4 ds;  // d, s of token 2t; d, s of token 2t + 1
    if (kOne) {
      const float2 one = *reinterpret_cast<const float2 *>(acts.scales + n * acts.scales_group +
                                                           block * acts.scales_block);
      ds = make_float4(one.x, one.y, one.x, one.y);
    } else {
      ds = *reinterpret_cast<const float4 *>(acts.scales + n * acts.scales_group +
                                             block * acts.scales_block);
    }
    const float base0 = __fmul_rn(-kMagic, ds.x);
    const float base1 = __fmul_rn(-kMagic, ds.z);
#pragma unroll
    for (int h = 0; h < Tile::kNumScales; ++h) {
      int c[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
      if (Tile::kHalfBlocks) {
        mma_s8_k16(c, a[2 * h], a[2 * h + 1], h == 0 ? b.x : b.y);
      } else if (Tile::kHighInPlace && kStep == 1) {
        mma_u8_k32(c, a, b.x, b.y);
      } else {
        mma_s8_k32(c, a, b.x, b.y);
      }
      acc[n][0] = __fmaf_rn(dw[0][h], __fmaf_rn(__int_as_float(c[0]), ds.x, base0), acc[n][0]);
      acc[n][2] = __fmaf_rn(dw[1][h], __fmaf_rn(__int_as_float(c[2]), ds.x, base0), acc[n][2]);
      if (!kOne) {
        acc[n][1] = __fmaf_rn(dw[0][h], __fmaf_rn(__int_as_float(c[1]), ds.z, base1), acc[n][1]);
        acc[n][3] = __fmaf_rn(dw[1][h], __fmaf_rn(__int_as_float(c[3]), ds.z, base1), acc[n][3]);
      }
    }
    if (Tile::kHasMin) {
      acc[n][0] = __fmaf_rn(shift[0], ds.y, acc[n][0]);
      acc[n][2] = __fmaf_rn(shift[1], ds.y, acc[n][2]);
      if (!kOne) {
        acc[n][1] = __fmaf_rn(shift[0], ds.w, acc[n][1]);
        acc[n][3] = __fmaf_rn(shift[1], ds.w, acc[n][3]);
      }
    }
  }
}

// `chunk`: the tile's bytes of this chunk; num_units of it exist (4 but at the ragged end); acts
// point at its first block.
template <int kType, int kGroups, bool kOne>
__device__ __forceinline__ void mma_chunk(const uint8_t *chunk, int num_units, int lane,
                                          const LaneActs &acts,
                                          float (&acc)[kNumChains][kGroups][4]) {
  using Tile = WeightTile<kType>;
#pragma unroll
  for (int u = 0; u < kUnitsPerChunk; ++u) {
    if (!Tile::kKQuant && u >= num_units) break;
    typename Tile::Factors factors;
    Tile::load_factors(chunk, u, lane >> 2, &factors);
    uint32_t a[2][4];
    Tile::load_codes(chunk, u, lane, a);
    mma_step<kType, 0, kGroups, kOne>(factors, a[0], acts, 2 * u, acc[u]);
    mma_step<kType, 1, kGroups, kOne>(factors, a[1], acts, 2 * u + 1, acc[u]);
  }
}

// The same for a type known at run time only, uniform over the warp.
template <int kGroups, bool kOne>
__device__ __forceinline__ void mma_chunk_of(int type, const uint8_t *chunk, int num_units,
                                             int lane, const LaneActs &acts,
                                             float (&acc)[kNumChains][kGroups][4]) {
  switch (type) {
    case kWeightQ4_0:
      return mma_chunk<kWeightQ4_0, kGroups, kOne>(chunk, num_units, lane, acts, acc);
    case kWeightQ4_1:
      return mma_chunk<kWeightQ4_1, kGroups, kOne>(chunk, num_units, lane, acts, acc);
    case kWeightQ5_0:
      return mma_chunk<kWeightQ5_0, kGroups, kOne>(chunk, num_units, lane, acts, acc);
    case kWeightQ5_1:
      return mma_chunk<kWeightQ5_1, kGroups, kOne>(chunk, num_units, lane, acts, acc);
    case kWeightQ8_0:
      return mma_chunk<kWeightQ8_0, kGroups, kOne>(chunk, num_units, lane, acts, acc);
    case kWeightQ4_K:
      return mma_chunk<kWeightQ4_K, kGroups, kOne>(chunk, num_units, lane, acts, acc);
    case kWeightQ5_K:
      return mma_chunk<kWeightQ5_K, kGroups, kOne>(chunk, num_units, lane, acts, acc);
    default:
      return mma_chunk<kWeightQ6_K, kGroups, kOne>(chunk, num_units, lane, acts, acc);
  }
}

}  // namespace cuda
}  // namespace xllm
