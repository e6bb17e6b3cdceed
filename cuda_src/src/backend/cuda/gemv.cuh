// Products of 1 to 8 tokens without tensor cores: dp4a, every GPU. The same tiles, slices and bytes
// as mma_few.cuh.
//
// A CTA is one group of tiles, a warp one slice of K. A lane loads the 16 bytes that it would feed
// to an mma: 8 codes of each of two rows in each of two blocks. Its partial dots, one per token,
// are summed over the four lanes of a row by exchanging integers, after which lane t owns tokens t
// and t + 4: exact in any order, so only the float chain is canonical.
#pragma once

#include "backend/cuda/finish_group.cuh"

namespace xllm {
namespace cuda {

// Sums v[0..kTokens) over the four lanes of a quad; afterwards v[i] of lane t is the sum for token
// t + 4 * i (kTokens 1: for token 0).
template <int kTokens>
__device__ __forceinline__ void quad_reduce(int (&v)[kTokens], int t) {
  constexpr uint32_t kAll = 0xffffffffu;
  if constexpr (kTokens == 1) {
    v[0] += __shfl_xor_sync(kAll, v[0], 1);
    v[0] += __shfl_xor_sync(kAll, v[0], 2);
  } else {
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      // Keep tokens (0, 1) or (2, 3) by bit 1 of t, then one of them by bit 0.
      const int *w = v + 4 * i;
      const bool upper = (t & 2) != 0, odd = (t & 1) != 0;
      const int keep0 = upper ? w[2] : w[0], keep1 = upper ? w[3] : w[1];
      const int give0 = upper ? w[0] : w[2], give1 = upper ? w[1] : w[3];
      const int sum0 = keep0 + __shfl_xor_sync(kAll, give0, 2);
      const int sum1 = keep1 + __shfl_xor_sync(kAll, give1, 2);
      const int mine = odd ? sum1 : sum0, theirs = odd ? sum0 : sum1;
      v[i] = mine + __shfl_xor_sync(kAll, theirs, 1);
    }
  }
}

template <int kType, int kStep, int kTokens>
__device__ __forceinline__ void dot_step(const typename WeightTile<kType>::Factors &factors,
                                         const uint32_t (&a)[4], const uint8_t *codes,
                                         const float2 *ds, int t,
                                         float (&acc)[2][(kTokens + 3) / 4]) {
  using Tile = WeightTile<kType>;
  constexpr int kOwned = (kTokens + 3) / 4;
  constexpr bool kUnsigned = Tile::kHighInPlace && kStep == 1;
  uint2 b[kTokens];
#pragma unroll
  for (int m = 0; m < kTokens; ++m) b[m] = *reinterpret_cast<const uint2 *>(codes + m * kActBlock);
  float2 scale[kOwned];
#pragma unroll
  for (int i = 0; i < kOwned; ++i) scale[i] = ds[kTokens == 1 ? 0 : t + 4 * i];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int h = 0; h < Tile::kNumScales; ++h) {
      int dot[kTokens];
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
        if (Tile::kHalfBlocks) {
          dot[m] = dot4<kUnsigned>(a[2 * h + r], h == 0 ? b[m].x : b[m].y, 0);
        } else {
          dot[m] = dot4<kUnsigned>(a[2 + r], b[m].y, dot4<kUnsigned>(a[r], b[m].x, 0));
        }
      }
      quad_reduce<kTokens>(dot, t);
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        acc[r][i] = __fmaf_rn(factors.dw[kStep][r][h],
                              __fmul_rn(static_cast<float>(dot[i]), scale[i].x), acc[r][i]);
      }
    }
    if (Tile::kHasMin) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i)
        acc[r][i] = __fmaf_rn(factors.shift[kStep][r], scale[i].y, acc[r][i]);
    }
  }
}

template <int kType, int kTokens>
__device__ __forceinline__ void dot_unit(const uint8_t *chunk, int unit, int lane,
                                         const uint8_t *codes, const float2 *ds,
                                         float (&acc)[2][(kTokens + 3) / 4]) {
  using Tile = WeightTile<kType>;
  typename Tile::Factors factors;
  Tile::load_factors(chunk, unit, lane >> 2, &factors);
  uint32_t a[2][4];
  Tile::load_codes(chunk, unit, lane, a);
  constexpr int kBlockBytes = kActGroup * kActBlock;
  dot_step<kType, 0, kTokens>(factors, a[0], codes + 2 * unit * kBlockBytes,
                              ds + 2 * unit * kActGroup, lane & 3, acc);
  dot_step<kType, 1, kTokens>(factors, a[1], codes + (2 * unit + 1) * kBlockBytes,
                              ds + (2 * unit + 1) * kActGroup, lane & 3, acc);
}

template <int kType, int kTokens>
__device__ __forceinline__ void dot_slice(const MatmulArgs &args, const uint8_t *tile,
                                          int first_chunk, int end_chunk, int lane,
                                          float (&acc)[kNumChains][2][(kTokens + 3) / 4]) {
  using Tile = WeightTile<kType>;
  const int64_t group = args.first_token / kActGroup;
  const int in_group = args.first_token % kActGroup;
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
    const uint8_t *at = tile + static_cast<int64_t>(chunk) * chunk_bytes(kType);
    const int64_t entry = (group * args.act.num_blocks + chunk * 8) * kActGroup + in_group;
    const uint8_t *codes =
        reinterpret_cast<const uint8_t *>(args.act.codes) + entry * kActBlock + (lane & 3) * 8;
    const float2 *ds = args.act.scales + entry;
    const int units = min(kUnitsPerChunk, args.num_units - chunk * kUnitsPerChunk);
#pragma unroll
    for (int u = 0; u < kUnitsPerChunk; ++u) {
      if (Tile::kKQuant || u < units) dot_unit<kType, kTokens>(at, u, lane, codes, ds, acc[u]);
    }
  }
}

// kTokens: 1, 4 or 8 tokens per pass; rows of activations past num_tokens exist and are ignored.
template <int kTokens>
__global__ void __launch_bounds__(kMaxSlices *kWarp, 2)
    gemv_kernel(const __grid_constant__ MatmulArgs args) {
  extern __shared__ __align__(16) float partials[];  // [group tiles][slices][16][kTokens]
  constexpr int kOwned = (kTokens + 3) / 4;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int num_chunks = (args.num_units + kUnitsPerChunk - 1) / kUnitsPerChunk;
  const int first_chunk = slice_first_chunk(warp, args.num_slices, num_chunks);
  const int end_chunk = slice_first_chunk(warp + 1, args.num_slices, num_chunks);
  const int tiles = group_tiles(args);
  const int group = static_cast<int>(blockIdx.x);
  let_next_kernel_start();
  wait_for_previous_kernel();
  int s = 0, tile = 0;
  for (int index = 0; index < tiles; ++index) {
    if (!find_tile(args, group, index, &s, &tile)) continue;
    const MatmulSegment &segment = args.segments[s];
    const uint8_t *from = segment.tiles + tile * segment.tile_bytes;
    float acc[kNumChains][2][kOwned] = {};
    switch (segment.type) {
      case kWeightQ4_0:
        dot_slice<kWeightQ4_0, kTokens>(args, from, first_chunk, end_chunk, lane, acc);
        break;
      case kWeightQ4_1:
        dot_slice<kWeightQ4_1, kTokens>(args, from, first_chunk, end_chunk, lane, acc);
        break;
      case kWeightQ5_0:
        dot_slice<kWeightQ5_0, kTokens>(args, from, first_chunk, end_chunk, lane, acc);
        break;
      case kWeightQ5_1:
        dot_slice<kWeightQ5_1, kTokens>(args, from, first_chunk, end_chunk, lane, acc);
        break;
      case kWeightQ8_0:
        dot_slice<kWeightQ8_0, kTokens>(args, from, first_chunk, end_chunk, lane, acc);
        break;
      case kWeightQ4_K:
        dot_slice<kWeightQ4_K, kTokens>(args, from, first_chunk, end_chunk, lane, acc);
        break;
      case kWeightQ5_K:
        dot_slice<kWeightQ5_K, kTokens>(args, from, first_chunk, end_chunk, lane, acc);
        break;
      default:
        dot_slice<kWeightQ6_K, kTokens>(args, from, first_chunk, end_chunk, lane, acc);
    }
    const int g = lane >> 2, t = lane & 3;
    float *to = partials + (index * args.num_slices + warp) * kTileRows * kTokens;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        const int token = t + 4 * i;
        if (token < kTokens)
          to[(g + 8 * r) * kTokens + token] =
              sum_chains(acc[0][r][i], acc[1][r][i], acc[2][r][i], acc[3][r][i]);
      }
    }
  }
  __syncthreads();
  for (int token = warp; token < args.num_tokens; token += args.num_slices) {
    GroupOutputs before = output_place(args, group);
    load_residual(args, token, &before);
    finish_token(args, group, token, before, [&](int index, int row) {
      const float *p = partials + (index * args.num_slices * kTileRows + row) * kTokens + token;
      float v[kMaxSlices];
#pragma unroll
      for (int i = 0; i < kMaxSlices; ++i)
        v[i] = i < args.num_slices ? p[i * kTileRows * kTokens] : 0.0f;
      return sum_slices(v, args.num_slices);
    });
  }
}

}  // namespace cuda
}  // namespace xllm
