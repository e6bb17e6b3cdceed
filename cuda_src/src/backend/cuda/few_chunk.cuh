// The inner loop of products of 1 to 4 tokens: 16 rows by 256 columns on tensor cores.
//
// Two columns of an mma take the planes of a token's activations, so that a lane finds hi and lo of
// its own in C and 8 * hi + lo is the dot product with q, exact. Fewer than 4 tokens leave columns
// over. They hold other blocks: the 4 lanes of a row are kTokens tokens by kParts parts, and part c
// owns every block b with b % kParts = c (half blocks of 16 for q6_k). An mma has zeros in the
// columns of the parts whose block it does not multiply, so that kParts of them go into the same
// registers, and a lane scales its own blocks only. The parts of I are added up across lanes, each
// of which then goes on with one row.
//   column 2j + p of an mma: plane p of token j % kTokens for part j / kTokens
//   lane 4g + t: token t % kTokens, part t / kTokens, of rows g and g + 8; after the parts are
//   added up of row g + 8 * (part % 2) (of both, where there is one part)
// Activations lie so that a lane's words are neighbours: codes [8 blocks][kTokens][2 planes][4 t]
// {b0, b1}, four columns of the first half of the block and four of the second.
#pragma once

#include "backend/cuda/matmul_args.cuh"

namespace xllm {
namespace cuda {

XLLM_HOST_DEVICE constexpr int few_codes_bytes(int tokens) { return act_codes_bytes(tokens); }
XLLM_HOST_DEVICE constexpr int few_sums_bytes(int tokens) { return 2 * kActBlocks * tokens; }

// Where the four codes of columns 4 * k4.. of a chunk stand.
XLLM_HOST_DEVICE constexpr int few_code_offset(int tokens, int token, int k4, int plane) {
  return (((k4 >> 3) * tokens + token) * 2 + plane) * 32 + (k4 & 3) * 8 + (k4 >> 2 & 1) * 4;
}

template <int kTokens>
struct FewLane {
  static constexpr int kParts = 4 / kTokens;
  static constexpr int kRows = kParts == 1 ? 2 : 1;
  int g, t;              // of the lane
  int token, part;       // of its C
  int row;               // its row after parts are added up: g + 8 * row
  int b_part, b_offset;  // of its column of B: part, offset of the words of block 0

  __device__ __forceinline__ explicit FewLane(int lane) {
    g = lane >> 2;
    t = lane & 3;
    token = t % kTokens;
    part = t / kTokens;
    row = part & 1;
    const int j = g >> 1;
    b_part = j / kTokens;
    b_offset = few_code_offset(kTokens, j % kTokens, t, g & 1);
  }
};

// x where `part` is the part of the lane's column, 0 elsewhere.
template <int kTokens>
__device__ __forceinline__ uint32_t for_part(const FewLane<kTokens> &lane, int part, uint32_t x) {
  return FewLane<kTokens>::kParts == 1 || lane.b_part == part ? x : 0u;
}

// Byte `index` of four.
__device__ __forceinline__ int signed_byte(uint32_t bytes, int index) {
  int value;
  // Its sign in the upper three.
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(value) : "r"(bytes), "r"(index * 0x1111 + 0x8880));
  return value;
}

// I of a lane's rows from what its parts have of rows g and g + 8.
template <int kTokens>
__device__ __forceinline__ void add_parts(const int (&i)[2], const FewLane<kTokens> &lane,
                                          int (&sum)[FewLane<kTokens>::kRows]) {
  if constexpr (kTokens == 4) {
    sum[0] = i[0];
    sum[FewLane<kTokens>::kRows - 1] = i[1];
  } else {
    sum[0] = lane.row != 0 ? i[1] : i[0];
    sum[0] += __shfl_xor_sync(0xffffffffu, lane.row != 0 ? i[0] : i[1], kTokens);
    if constexpr (kTokens == 1) sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], 2);
  }
}

// c += the dot products of a block of step `step` of a unit.
template <int kType>
__device__ __forceinline__ void add_block(int (&c)[4], const uint32_t (&a)[4], int step,
                                          uint32_t b0, uint32_t b1) {
  if (WeightTile<kType>::kHighInPlace && step == 1) {
    mma_u8_k32(c, a, b0, b1);
  } else {
    mma_s8_k32(c, a, b0, b1);
  }
}

// dot of row g + 8 r with q.
__device__ __forceinline__ int dot_of(const int (&c)[4], int r) {
  return 8 * c[2 * r] + c[2 * r + 1];
}

// I of the lane's part for rows g and g + 8 of q4_k and q5_k. codes: of the chunk.
template <int kType, int kTokens>
__device__ __forceinline__ void sum_blocks(const uint8_t *chunk, int warp_lane,
                                           const FewLane<kTokens> &lane, const uint8_t *codes,
                                           const uint4 (&fields)[2], int (&i)[2]) {
  using Tile = WeightTile<kType>;
  constexpr int kParts = FewLane<kTokens>::kParts;
  // Set s of registers has block s * kParts + part.
  constexpr int kUnitSets = 2 / kParts == 0 ? 1 : 2 / kParts;  // of a unit
  constexpr int kShift = Tile::kHighInPlace ? 4 : 0;  // the codes of odd blocks are times 16
  uint32_t words[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    words[r][0] = fields[r].y >> (8 * lane.part);
    words[r][1] = fields[r].z >> (8 * lane.part);
  }
  int sum[2][2] = {};  // [even, odd blocks][row]; one where the parity is the lane's
  int c[kUnitSets][4];
#pragma unroll
  for (int u = 0; u < kUnitsPerChunk; ++u) {
    uint32_t a[2][4];
    Tile::load_codes(chunk, u, warp_lane, a);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int block = 2 * u + step, set = block / kParts, part = block % kParts;
      auto &to = c[set % kUnitSets];
      if (part == 0) to[0] = to[1] = to[2] = to[3] = 0;
      const uint2 b = *reinterpret_cast<const uint2 *>(codes + set * 256 + warp_lane * 8);
      add_block<kType>(to, a[step], step, for_part(lane, part, b.x), for_part(lane, part, b.y));
      if (part + 1 < kParts) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = set * kParts;  // the block of part 0
        const uint32_t scale = words[r][first / 4] >> (8 * (first % 4)) & 63u;
        sum[kParts == 1 ? set & 1 : 0][r] += static_cast<int>(scale) * dot_of(to, r);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    i[r] =
        kParts == 1 ? sum[0][r] + (sum[1][r] >> kShift) : sum[0][r] >> (kShift * (lane.part & 1));
  }
}

// The same for q6_k, whose parts are every kParts-th half block.
template <int kTokens>
__device__ __forceinline__ void sum_half_blocks(const uint8_t *chunk, int warp_lane,
                                                const FewLane<kTokens> &lane, const uint8_t *codes,
                                                int (&i)[2]) {
  using Tile = WeightTile<kWeightQ6_K>;
  constexpr int kParts = FewLane<kTokens>::kParts;
  static_assert(Tile::code_factor(0) == 4, "taken out below");
  const uint4 *fields =
      reinterpret_cast<const uint4 *>(chunk + row_fields_offset(kWeightQ6_K, lane.g, 0));
  const uint4 f[2] = {fields[0], fields[1]};
  const uint32_t words[2][4] = {{f[0].x, f[0].y, f[0].z, f[0].w}, {f[1].x, f[1].y, f[1].z, f[1].w}};
  int sum[2][2] = {};  // [of up to 8 half blocks: 4 |I| < 2^31][row]
#pragma unroll
  for (int u = 0; u < kUnitsPerChunk; ++u) {
    uint32_t a[2][4];
    Tile::load_codes(chunk, u, warp_lane, a);
    int c[4 / kParts][4] = {};
    const uint8_t *unit = codes + u * (few_codes_bytes(kTokens) / kUnitsPerChunk);
    constexpr int kBlock = few_codes_bytes(kTokens) / kActBlocks;
    const uint8_t *words_at = unit + lane.b_offset;
    if constexpr (kParts == 4) {  // a part has a half of one of the blocks
      const uint32_t b = *reinterpret_cast<const uint32_t *>(
          words_at + (lane.b_part >> 1) * kBlock + (lane.b_part & 1) * 4);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        mma_s8_k32(c[0], a[step], for_part(lane, 2 * step, b), for_part(lane, 2 * step + 1, b));
      }
    } else {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        if constexpr (kParts == 2) {  // a part has a half of each block
          const uint32_t b =
              *reinterpret_cast<const uint32_t *>(words_at + step * kBlock + lane.b_part * 4);
          mma_s8_k32(c[step % (4 / kParts)], a[step], for_part(lane, 0, b), for_part(lane, 1, b));
        } else {
          const uint2 b = *reinterpret_cast<const uint2 *>(words_at + step * kBlock);
          mma_s8_k16(c[(2 * step) % (4 / kParts)], a[step][0], a[step][1], b.x);
          mma_s8_k16(c[(2 * step + 1) % (4 / kParts)], a[step][2], a[step][3], b.y);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < 4 / kParts; ++s) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        sum[kParts == 1 ? u >> 1 : 0][r] +=
            signed_byte(words[r][u], s * kParts + lane.part) * dot_of(c[s], r);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) i[r] = (sum[0][r] >> 2) + (sum[1][r] >> 2);
}

// p of rows g and g + 8 and the lane's token for types with a d per block; every part has all of
// it. num_units of the chunk exist, 4 but at the ragged end.
template <int kType, int kTokens>
__device__ __forceinline__ void chain_blocks(const uint8_t *chunk, int num_units, int warp_lane,
                                             const FewLane<kTokens> &lane, const uint8_t *codes,
                                             const uint4 &sums, float (&p)[2]) {
  using Tile = WeightTile<kType>;
  const uint32_t s[4] = {sums.x, sums.y, sums.z, sums.w};
  p[0] = p[1] = 0.0f;
#pragma unroll
  for (int u = 0; u < kUnitsPerChunk; ++u) {
    const auto scales = Tile::load_scales(chunk, u, lane.g);
    uint32_t a[2][4];
    Tile::load_codes(chunk, u, warp_lane, a);
    int c[2][4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint2 b = *reinterpret_cast<const uint2 *>(
          codes + (2 * u + step) * (few_codes_bytes(kTokens) / kActBlocks) + lane.b_offset);
      add_block<kType>(c[step], a[step], step, b.x, b.y);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float v = p[r];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        constexpr float kInverse[2] = {1.0f / Tile::code_factor(0), 1.0f / Tile::code_factor(1)};
        const float d = __fmul_rn(scales.d[step][r], kInverse[step]);
        v = __fmaf_rn(d, __int2float_rn(dot_of(c[step], r)), v);
        if constexpr (Tile::kHasMin) {
          const int sum = static_cast<int16_t>(s[u] >> (16 * step) & 0xffffu);
          v = __fmaf_rn(scales.m[step][r], __int2float_rn(sum), v);
        }
      }
      if (u < num_units) p[r] = v;
    }
  }
}

// p of the lane's rows and token: of the chunk of weights at `chunk`, of which num_units exist.
// codes: of the chunk of activations; sums: of the chunk and the lane's token.
template <int kType, int kTokens>
__device__ __forceinline__ void few_chunk(const uint8_t *chunk, int num_units, int warp_lane,
                                          const FewLane<kTokens> &lane, const uint8_t *codes,
                                          const uint8_t *sums,
                                          float (&p)[FewLane<kTokens>::kRows]) {
  constexpr int kRows = FewLane<kTokens>::kRows;
  if constexpr (kType == kWeightQ4_K || kType == kWeightQ5_K) {
    const uint4 *at = reinterpret_cast<const uint4 *>(chunk + row_fields_offset(kType, lane.g, 0));
    const uint4 fields[2] = {at[0], at[1]};
    int i[2], all[kRows];
    sum_blocks<kType, kTokens>(chunk, warp_lane, lane, codes, fields, i);
    add_parts<kTokens>(i, lane, all);
    const uint4 s = *reinterpret_cast<const uint4 *>(sums);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool second = kRows == 1 ? lane.row != 0 : r != 0;
      const RowFields row = unpack_fields(
          make_uint4(second ? fields[1].x : fields[0].x, second ? fields[1].y : fields[0].y,
                     second ? fields[1].z : fields[0].z, second ? fields[1].w : fields[0].w));
      int j = __dp2a_lo(static_cast<int>(s.x), static_cast<int>(row.minima[0]), 0);
      j = __dp2a_hi(static_cast<int>(s.y), static_cast<int>(row.minima[0]), j);
      j = __dp2a_lo(static_cast<int>(s.z), static_cast<int>(row.minima[1]), j);
      j = __dp2a_hi(static_cast<int>(s.w), static_cast<int>(row.minima[1]), j);
      p[r] = __fmaf_rn(row.d, __int2float_rn(all[r]), __fmul_rn(-row.dmin, __int2float_rn(j)));
    }
  } else if constexpr (kType == kWeightQ6_K) {
    int i[2], all[kRows];
    sum_half_blocks<kTokens>(chunk, warp_lane, lane, codes, i);
    add_parts<kTokens>(i, lane, all);
    const uint32_t d =
        *reinterpret_cast<const uint32_t *>(chunk + kQ6SuperScaleOffset + lane.g * 4);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      p[r] = __fmul_rn(half_bits_to_float(d >> (16 * (kRows == 1 ? lane.row : r))),
                       __int2float_rn(all[r]));
    }
  } else {
    float both[2];
    chain_blocks<kType, kTokens>(chunk, num_units, warp_lane, lane, codes,
                                 *reinterpret_cast<const uint4 *>(sums), both);
    p[0] = kRows == 1 && lane.row != 0 ? both[1] : both[0];
    if constexpr (kRows == 2) p[kRows - 1] = both[1];
  }
}

}  // namespace cuda
}  // namespace xllm
