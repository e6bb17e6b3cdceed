// Products without tensor cores: dp4a, every GPU, up to 8 tokens at a time. What the other kernels'
// bytes are held to.
//
// A CTA is one tile, or one of gate and one of up; a warp is one slice of K. A lane loads the codes
// that it would feed to an mma: 8 columns of each of two rows in each of two blocks. Its partial
// dots, one per token, are summed over the four lanes of a row by exchanging integers, after which
// lane t owns tokens t and t + 4: exact in any order.
#pragma once

#include "backend/cuda/matmul_args.cuh"

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

// A chunk of activations as a lane reads it.
struct ChunkActs {
  const uint8_t *chunk;
  int t;

  // Columns 4t.. of a half block of a token, in one plane.
  __device__ __forceinline__ uint32_t codes(int block, int half, int token, int plane) const {
    return *reinterpret_cast<const uint32_t *>(
        chunk + act_code_offset(kActGroup, token, block * kActBlock + half * 16 + t * 4, plane));
  }
  __device__ __forceinline__ float scale(int token) const {
    return reinterpret_cast<const float *>(chunk + act_codes_bytes(kActGroup))[token];
  }
  __device__ __forceinline__ int sum(int block, int token) const {
    return reinterpret_cast<const int16_t *>(
        chunk + act_sums_offset(kActGroup))[token * kActBlocks + block];
  }
};

// A lane's part of the sum of c q over a block, or over one of its halves: `halves` is 1, 2 or
// both.
template <int kType, int kStep>
__device__ __forceinline__ int lane_dot(const uint32_t (&a)[4], int r, const ChunkActs &acts,
                                        int block, int token, int halves) {
  using Tile = WeightTile<kType>;
  constexpr bool kUnsigned = Tile::kHighInPlace && kStep == 1;
  int plane[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if ((halves >> h & 1) == 0) continue;
#pragma unroll
    for (int p = 0; p < 2; ++p)
      plane[p] = dot4<kUnsigned>(a[2 * h + r], acts.codes(block, h, token, p), plane[p]);
  }
  constexpr int kFactor = Tile::code_factor(kStep);
  return (8 * plane[0] + plane[1]) >> (kFactor == 16 ? 4 : kFactor == 4 ? 2 : 0);
}

__device__ __forceinline__ int signed_byte(uint32_t word, int index) {
  return static_cast<int>(word << (24 - 8 * index)) >> 24;
}

// p of one chunk for rows g, g + 8 and the tokens that the lane owns (matmul_args.cuh).
template <int kType, int kTokens>
__device__ __forceinline__ void dot_chunk(const uint8_t *chunk, int num_units, int lane,
                                          const ChunkActs &acts, float (&p)[2][(kTokens + 3) / 4]) {
  using Tile = WeightTile<kType>;
  constexpr int kOwned = (kTokens + 3) / 4;
  const int g = lane >> 2, t = lane & 3;
  const auto owned = [&](int i) { return kTokens == 1 ? 0 : t + 4 * i; };
  int whole[2][kTokens] = {};
  RowFields fields[2];
  uint4 scales16[2];
  if constexpr (kType == kWeightQ4_K || kType == kWeightQ5_K || kType == kWeightQ6_K) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales16[r] = *reinterpret_cast<const uint4 *>(chunk + row_fields_offset(kType, g, r));
      if (kType != kWeightQ6_K) fields[r] = unpack_fields(scales16[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) p[r][i] = 0;
  }
#pragma unroll
  for (int u = 0; u < kUnitsPerChunk; ++u) {
    if (!Tile::kKQuant && u >= num_units) break;
    uint32_t a[2][4];
    Tile::load_codes(chunk, u, lane, a);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int block = 2 * u + step;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto dot = [&](int token, int halves) {
          return step == 0 ? lane_dot<kType, 0>(a[0], r, acts, block, token, halves)
                           : lane_dot<kType, 1>(a[1], r, acts, block, token, halves);
        };
        if constexpr (kType == kWeightQ6_K) {
          const uint32_t words[4] = {scales16[r].x, scales16[r].y, scales16[r].z, scales16[r].w};
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int scale = signed_byte(words[u], 2 * step + h);
#pragma unroll
            for (int m = 0; m < kTokens; ++m) whole[r][m] += scale * dot(m, 1 << h);
          }
        } else if constexpr (Tile::kKQuant) {
          const int scale = fields[r].scales[block / 4] >> (block % 4 * 8) & 63;
#pragma unroll
          for (int m = 0; m < kTokens; ++m) whole[r][m] += scale * dot(m, 3);
        } else {
          const auto scales = Tile::load_scales(chunk, u, g);
          int dots[kTokens];
#pragma unroll
          for (int m = 0; m < kTokens; ++m) dots[m] = dot(m, 3);
          quad_reduce<kTokens>(dots, t);
#pragma unroll
          for (int i = 0; i < kOwned; ++i) {
            p[r][i] = __fmaf_rn(scales.d[step][r], __int2float_rn(dots[i]), p[r][i]);
            if (Tile::kHasMin) {
              p[r][i] =
                  __fmaf_rn(scales.m[step][r], __int2float_rn(acts.sum(block, owned(i))), p[r][i]);
            }
          }
        }
      }
    }
  }
  if constexpr (Tile::kKQuant) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      quad_reduce<kTokens>(whole[r], t);
      if constexpr (kType == kWeightQ6_K) {
        const float d = half_bits_to_float(
            *reinterpret_cast<const uint16_t *>(chunk + kQ6SuperScaleOffset + g * 4 + r * 2));
#pragma unroll
        for (int i = 0; i < kOwned; ++i) p[r][i] = __fmul_rn(d, __int2float_rn(whole[r][i]));
      } else {
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
          int low = 0;
#pragma unroll
          for (int b = 0; b < kActBlocks; ++b) {
            low += static_cast<int>(fields[r].minima[b / 4] >> (b % 4 * 8) & 63) *
                   acts.sum(b, owned(i));
          }
          p[r][i] = __fmaf_rn(fields[r].d, __int2float_rn(whole[r][i]),
                              -__fmul_rn(fields[r].dmin, __int2float_rn(low)));
        }
      }
    }
  }
}

template <int kType, int kTokens>
__device__ __forceinline__ void dot_slice(const MatmulArgs &args, const uint8_t *tile,
                                          int first_token, int first_chunk, int end_chunk, int lane,
                                          float (&acc)[2][(kTokens + 3) / 4]) {
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
    const ChunkActs acts = {args.act.chunk(first_token, chunk), lane & 3};
    float p[2][(kTokens + 3) / 4];
    dot_chunk<kType, kTokens>(tile + static_cast<int64_t>(chunk) * chunk_bytes(kType),
                              min(kUnitsPerChunk, args.num_units - chunk * kUnitsPerChunk), lane,
                              acts, p);
#pragma unroll
    for (int i = 0; i < (kTokens + 3) / 4; ++i) {
      const float scale = acts.scale(kTokens == 1 ? 0 : (lane & 3) + 4 * i);
      acc[0][i] = __fmaf_rn(scale, p[0][i], acc[0][i]);
      acc[1][i] = __fmaf_rn(scale, p[1][i], acc[1][i]);
    }
  }
}

template <int kTokens, int kType = 0, typename... Arguments>
__device__ __forceinline__ void dot_slice_of(int type, Arguments &&...arguments) {
  if constexpr (kType < kNumTileTypes) {
    if (type == kType) return dot_slice<kType, kTokens>(arguments...);
    dot_slice_of<kTokens, kType + 1>(type, arguments...);
  }
}

// Segment and tile of CTA `index` of a grid of all tiles; of kSwiGlu, where there are as many CTAs
// as tiles of gate, of gate.
__device__ __forceinline__ const MatmulSegment &find_tile(const MatmulArgs &args, int index,
                                                          int *tile) {
  int s = 0;
  while (s + 1 < args.num_segments && index >= args.segments[s].num_tiles)
    index -= args.segments[s++].num_tiles;
  *tile = index;
  return args.segments[s];
}

// Grid: x tiles, y groups of 8 tokens; a warp per slice. kTokens: 1, 4 or 8 tokens per CTA; tokens
// past num_tokens exist in args.act and are ignored.
template <int kTokens>
__global__ void __launch_bounds__(kMaxSlices *kWarp)
    gemv_kernel(const __grid_constant__ MatmulArgs args) {
  __shared__ float sums[2][kMaxSlices][kTileRows][kTokens];
  constexpr int kOwned = (kTokens + 3) / 4;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int first_chunk = slice_first_chunk(warp, args.num_slices, args.num_chunks);
  const int end_chunk = slice_first_chunk(warp + 1, args.num_slices, args.num_chunks);
  const int first_token = static_cast<int>(blockIdx.y) * kActGroup;
  let_next_kernel_start();
  wait_for_previous_kernel();
  int tile;
  const MatmulSegment &segment = find_tile(args, static_cast<int>(blockIdx.x), &tile);
  const bool is_swiglu = args.epilogue == kSwiGlu;
  for (int i = 0; i < (is_swiglu ? 2 : 1); ++i) {
    const MatmulSegment &of = is_swiglu ? args.segments[i] : segment;
    float acc[2][kOwned] = {};
    dot_slice_of<kTokens>(of.type, args, of.tiles + tile * of.tile_bytes,
                          args.first_token + first_token, first_chunk, end_chunk, lane, acc);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int k = 0; k < kOwned; ++k) {
        const int token = (lane & 3) + 4 * k;
        if (token < kTokens) sums[i][warp][(lane >> 2) + 8 * r][token] = acc[r][k];
      }
    }
  }
  __syncthreads();
  const int num_tokens = min(kTokens, args.num_tokens - first_token);
  for (int i = static_cast<int>(threadIdx.x); i < num_tokens * kTileRows;
       i += static_cast<int>(blockDim.x)) {
    const int token = i / kTileRows, row = i % kTileRows, local = tile * kTileRows + row;
    const auto output = [&](int which) {
      float y = sums[which][0][row][token];
      for (int s = 1; s < args.num_slices; ++s) y = __fadd_rn(y, sums[which][s][row][token]);
      return y;
    };
    if (!is_swiglu) {
      finish_output(args, segment, local, first_token + token, output(0));
    } else if (local < segment.num_rows) {
      args.out[static_cast<int64_t>(args.first_token + first_token + token) * args.out_stride +
               local] = swiglu(output(0), output(1));
    }
  }
}

}  // namespace cuda
}  // namespace xllm
