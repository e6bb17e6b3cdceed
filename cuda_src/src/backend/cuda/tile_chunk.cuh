// One chunk of 256 columns of 16-row tiles times 8 tokens and more: the arithmetic of mma_tile.cuh.
//
// q = 8 hi + lo, so with the codes c of a block as one operand and 8 c as another two mmas into the
// same registers give sum(c q). K-quants then need one integer multiply-add per block and output;
// the float steps come once per chunk. What fits int8 decides how the operands look:
//   q4_k   low nibbles c and 8 c; high nibbles where they stand, 16 c and 2 c, which makes it twice
//          the sum: the even blocks' scales are doubled, d is halved
//   q6_k   4 c twice and c; each half block by itself. Up to 16 tokens: 4 c, the planes apart
//   q8_0   two sets of registers, 8 of one and one of the other
// The sums with the minima of q4_k and q5_k, J, are an f16 mma: 16 m times s >> 4 and m times s &
// 15, integers of fewer than 24 bits in every partial sum, so that the f32 it gives is J.
#pragma once

#include "backend/cuda/act_format.cuh"
#include "backend/cuda/planes.cuh"

namespace xllm {
namespace cuda {

// word << 3, out of sight of the compiler: it would shift first and mask again.
__device__ __forceinline__ uint32_t times_eight(uint32_t word) {
  uint32_t v;
  asm("shl.b32 %0, %1, 3;" : "=r"(v) : "r"(word));
  return v;
}

// How the operands of the two planes are made.
template <int kType>
struct TileCodes {
  using Tile = WeightTile<kType>;
  static constexpr bool kIsUnsigned = Tile::kHasMin;
  static constexpr bool kHasFifth =
      kType == kWeightQ5_0 || kType == kWeightQ5_1 || kType == kWeightQ5_K;
  static constexpr bool kTwoSets = kType == kWeightQ8_0;
  static constexpr int kOffset = Tile::kOffset;

  // What a lane reads of unit u.
  struct Raw {
    uint4 low;
    uint4 more;  // q8_0: of the second block; q6_k: two words; q5: one
  };
  static __device__ __forceinline__ Raw load_raw(const uint8_t *chunk, int u, int lane) {
    const uint8_t *base = Tile::kKQuant ? chunk : chunk + u * Tile::kUnitBytes;
    const int within = Tile::kKQuant ? u : 0;
    Raw raw = {};
    raw.low = *reinterpret_cast<const uint4 *>(base + within * 512 + lane * 16);
    if constexpr (kType == kWeightQ8_0) {
      raw.more = *reinterpret_cast<const uint4 *>(base + 512 + lane * 16);
    } else if constexpr (kType == kWeightQ6_K) {
      const uint2 w =
          *reinterpret_cast<const uint2 *>(base + hi_offset(kType) + within * 256 + lane * 8);
      raw.more.x = w.x;
      raw.more.y = w.y;
    } else if constexpr (kHasFifth) {
      raw.more.x =
          *reinterpret_cast<const uint32_t *>(base + hi_offset(kType) + within * 128 + lane * 4);
    }
    return raw;
  }

  // q6_k: of both blocks of a unit the codes in bits 2-7 of their bytes, whatever is below them.
  static __device__ __forceinline__ void words_of_codes(const Raw &raw, uint32_t (&words)[2][4]) {
    const uint32_t w[6] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.more.x, raw.more.y};
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i / 4][i % 4] = w[i];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[1][2 + i] = ((w[3 * i] << 6) & 0xc0c0c0c0u) | ((w[3 * i + 1] << 4) & 0x30303030u) |
                        ((w[3 * i + 2] << 2) & 0x0c0c0c0cu);
    }
  }
  // 4 c of them.
  static __device__ __forceinline__ void codes_times_four(const Raw &raw, uint32_t (&codes)[2][4]) {
    words_of_codes(raw, codes);
#pragma unroll
    for (int i = 0; i < 6; ++i) codes[i / 4][i % 4] &= 0xfcfcfcfcu;
  }

  // Of both blocks of a unit: the operand of hi and that of lo, [step][register].
  static __device__ __forceinline__ void operands(const Raw &raw, uint32_t (&hi)[2][4],
                                                  uint32_t (&lo)[2][4]) {
    const uint32_t words[4] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w};
    if constexpr (kType == kWeightQ6_K) {
      codes_times_four(raw, hi);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // bytes shifted right by two, their signs kept
          lo[step][i] =
              ((((hi[step][i] >> 2) & 0x3f3f3f3fu) ^ 0x20202020u) + 0x60606060u) ^ 0x80808080u;
      }
    } else if constexpr (kType == kWeightQ8_0) {
      const uint32_t second[4] = {raw.more.x, raw.more.y, raw.more.z, raw.more.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        lo[0][i] = words[i];
        lo[1][i] = second[i];
      }
    } else {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          if (kType == kWeightQ4_K && step == 1) {
            hi[1][reg] = words[reg] & 0xf0f0f0f0u;
            lo[1][reg] = hi[1][reg] >> 3;
            continue;
          }
          uint32_t codes = (words[reg] >> (4 * step)) & 0x0f0f0f0fu;
          if constexpr (kHasFifth) {
            const int bit = 4 * step + reg;  // to bit 4
            codes |= (bit <= 4 ? raw.more.x << (4 - bit) : raw.more.x >> (bit - 4)) & 0x10101010u;
          }
          lo[step][reg] = less_offset<kOffset>(codes);
          hi[step][reg] = less_offset<8 * kOffset>(times_eight(codes));
        }
      }
    }
  }
  static __device__ __forceinline__ void load(const uint8_t *chunk, int u, int lane,
                                              uint32_t (&hi)[2][4], uint32_t (&lo)[2][4]) {
    operands(load_raw(chunk, u, lane), hi, lo);
  }

  // Sums of c q over a block, of the rows of the lane and its two tokens; for q4_k and step 1 twice
  // that. b: of hi, of lo.
  static __device__ __forceinline__ void multiply(const uint32_t (&hi)[4], const uint32_t (&lo)[4],
                                                  const uint32_t (&b)[4], int (&dot)[4]) {
    constexpr int kZero[4] = {0, 0, 0, 0};
    if constexpr (kTwoSets) {
      int high[4];
      mma_s8_k32(high, lo, b[0], b[1], kZero);
      mma_s8_k32(dot, lo, b[2], b[3], kZero);
#pragma unroll
      for (int i = 0; i < 4; ++i) dot[i] += 8 * high[i];
    } else if constexpr (kIsUnsigned) {
      mma_u8_k32(dot, hi, b[0], b[1], kZero);
      mma_u8_k32(dot, lo, b[2], b[3]);
    } else {
      mma_s8_k32(dot, hi, b[0], b[1], kZero);
      mma_s8_k32(dot, lo, b[2], b[3]);
    }
  }

  // q6_k: the same over half h of a block.
  static __device__ __forceinline__ void multiply_half(int h, const uint32_t (&hi)[4],
                                                       const uint32_t (&lo)[4],
                                                       const uint32_t (&b)[4], int (&dot)[4]) {
    constexpr int kZero[4] = {0, 0, 0, 0};
    mma_s8_k16(dot, hi[2 * h], hi[2 * h + 1], b[h], kZero);
    mma_s8_k16(dot, hi[2 * h], hi[2 * h + 1], b[h]);
    mma_s8_k16(dot, lo[2 * h], lo[2 * h + 1], b[2 + h]);
  }
};

template <int kIndex>
__device__ __forceinline__ int unsigned_byte(uint32_t word) {
  return static_cast<int>(__byte_perm(word, 0, 0x4440 + kIndex));
}
template <int kIndex>
__device__ __forceinline__ int signed_byte(uint32_t word) {
  constexpr uint32_t kSign = 8 + kIndex;
  int v;  // the intrinsic takes no signs
  asm("prmt.b32 %0, %1, %2, %3;"
      : "=r"(v)
      : "r"(word), "r"(0), "n"(kSign << 12 | kSign << 8 | kSign << 4 | kIndex));
  return v;
}
// After inlining and unrolling `index` is a constant.
__device__ __forceinline__ int unsigned_byte(uint32_t word, int index) {
  return index == 0   ? unsigned_byte<0>(word)
         : index == 1 ? unsigned_byte<1>(word)
         : index == 2 ? unsigned_byte<2>(word)
                      : unsigned_byte<3>(word);
}
__device__ __forceinline__ int signed_byte(uint32_t word, int index) {
  return index == 0   ? signed_byte<0>(word)
         : index == 1 ? signed_byte<1>(word)
         : index == 2 ? signed_byte<2>(word)
                      : signed_byte<3>(word);
}

// The activations of a chunk of kGroups groups of 8 tokens, in shared memory.
struct TileActs {
  const uint8_t *base;

  // Where lane reads in a block: its four matrices come as {hi, hi of half 1, lo, lo of half 1}, so
  // that an operand's two registers are neighbours.
  static __device__ __forceinline__ int lane_offset(int lane) {
    return ((lane >> 3 & 1) * 2 + (lane >> 4)) * 128 + (lane & 7) * 16;
  }
  // Block `block` of group n: the b registers of hi, of lo. `offset` is lane_offset.
  __device__ __forceinline__ void load_block(int n, int block, int offset, uint32_t (&b)[4]) const {
    load_matrices(b, base + n * kActChunkBytes + block * (kActTokenBytes * kActGroup) + offset);
  }
  // Of tokens 2t and 2t + 1 of group n.
  __device__ __forceinline__ float2 scales(int n, int t) const {
    return *reinterpret_cast<const float2 *>(base + n * kActChunkBytes +
                                             act_codes_bytes(kActGroup) + t * 8);
  }
  // The halves of the sum of block `block` of token g.
  __device__ __forceinline__ uint32_t halves(int n, int g, int block) const {
    return *reinterpret_cast<const uint32_t *>(base + n * kActChunkBytes + kActHalvesOffset +
                                               g * kActHalvesTokenBytes + block * 4);
  }
  __device__ __forceinline__ float sum(int n, int token, int block) const {
    return static_cast<float>(*reinterpret_cast<const int16_t *>(
        base + n * kActChunkBytes + act_sums_offset(kActGroup) + token * 16 + block * 2));
  }
};

// The scales of q4_k and q5_k of rows g and g + 8, [r8][block / 4] by byte; q4_k's even ones
// doubled.
template <int kType>
__device__ __forceinline__ void load_block_scales(const uint8_t *tile, int g,
                                                  uint32_t (&scales)[2][2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4 w = *reinterpret_cast<const uint4 *>(tile + row_fields_offset(kType, g, r));
    scales[r][0] = w.y & 0x3f3f3f3fu;
    scales[r][1] = w.z & 0x3f3f3f3fu;
    if (kType == kWeightQ4_K) {
      scales[r][0] += w.y & 0x003f003fu;
      scales[r][1] += w.z & 0x003f003fu;
    }
  }
}

// f16 {16 m, m} of the six-bit byte `index` of four.
__device__ __forceinline__ uint32_t minimum_pair(uint32_t bytes, int index) {
  // 1024 + m twice, then 16 * (1024 + m) - 16384 and 1 * (1024 + m) - 1024: exact.
  const uint32_t twice = __byte_perm(bytes, 0x64u, 0x4040 + 0x0101 * static_cast<uint32_t>(index));
  const __half2 pair =
      __hfma2(*reinterpret_cast<const __half2 *>(&twice), __floats2half2_rn(16.0f, 1.0f),
              __floats2half2_rn(-16384.0f, -1024.0f));
  return *reinterpret_cast<const uint32_t *>(&pair);
}

// The float steps of a chunk of one tile of q4_k and q5_k; total: I, twice that for q4_k.
template <int kType, int kGroups>
__device__ __forceinline__ void finish_scaled(const uint8_t *tile, const TileActs &acts, int lane,
                                              const int (&total)[kGroups][4],
                                              float (&acc)[kGroups][4]) {
  const int g = lane >> 2, t = lane & 3;
  float d[2], dmin[2];
  uint32_t minima[4];  // of blocks t and t + 4 as f16 {16 m, m}, in the order of the operand
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowFields f =
        unpack_fields(*reinterpret_cast<const uint4 *>(tile + row_fields_offset(kType, g, r)));
    d[r] = kType == kWeightQ4_K ? __fmul_rn(0.5f, f.d) : f.d;
    dmin[r] = -f.dmin;
#pragma unroll
    for (int half = 0; half < 2; ++half) minima[2 * half + r] = minimum_pair(f.minima[half], t);
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    float least[4] = {};
    mma_f16_k16(least, minima, acts.halves(n, g, t), acts.halves(n, g, t + 4));
    const float2 dx = acts.scales(n, t);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float p =
          __fmaf_rn(d[j >> 1], __int2float_rn(total[n][j]), __fmul_rn(dmin[j >> 1], least[j]));
      acc[n][j] = __fmaf_rn((j & 1) == 0 ? dx.x : dx.y, p, acc[n][j]);
    }
  }
}

// The same for q6_k.
template <int kGroups>
__device__ __forceinline__ void finish_half_scaled(const uint8_t *tile, const TileActs &acts,
                                                   int lane, const int (&total)[kGroups][4],
                                                   float (&acc)[kGroups][4]) {
  const int g = lane >> 2, t = lane & 3;
  const uint32_t both = *reinterpret_cast<const uint32_t *>(tile + kQ6SuperScaleOffset + g * 4);
  const float d[2] = {half_bits_to_float(both), half_bits_to_float(both >> 16)};
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const float2 dx = acts.scales(n, t);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      acc[n][j] = __fmaf_rn((j & 1) == 0 ? dx.x : dx.y,
                            __fmul_rn(d[j >> 1], __int2float_rn(total[n][j])), acc[n][j]);
    }
  }
}

// q4_k and q5_k.
template <int kType, int kRowTiles, int kGroups>
__device__ __forceinline__ void scaled_chunk(const uint8_t *const (&tiles)[kRowTiles],
                                             const TileActs &acts, int lane,
                                             float (&acc)[kRowTiles][kGroups][4]) {
  using Codes = TileCodes<kType>;
  const int g = lane >> 2, offset = TileActs::lane_offset(lane);
  int total[kRowTiles][kGroups][4];
  uint32_t scales[kRowTiles][2][2];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) load_block_scales<kType>(tiles[i], g, scales[i]);
#pragma unroll
  for (int u = 0; u < kUnitsPerChunk; ++u) {
    uint32_t hi[kRowTiles][2][4], lo[kRowTiles][2][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) Codes::load(tiles[i], u, lane, hi[i], lo[i]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int block = 2 * u + step;
      int factor[kRowTiles][2];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
          factor[i][r] = unsigned_byte(scales[i][r][block >> 2], block & 3);
      }
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        uint32_t b[4];
        acts.load_block(n, block, offset, b);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          int dot[4];
          Codes::multiply(hi[i][step], lo[i][step], b, dot);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            total[i][n][j] = block == 0 ? factor[i][j >> 1] * dot[j]
                                        : factor[i][j >> 1] * dot[j] + total[i][n][j];
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
    finish_scaled<kType, kGroups>(tiles[i], acts, lane, total[i], acc[i]);
}

// q6_k for few tokens: the planes in registers of their own, which is fewer instructions than
// making c of 4 c. 4 |I| does not fit, but that of a plane does.
template <int kRowTiles, int kGroups>
__device__ __forceinline__ void half_scaled_planes_chunk(const uint8_t *const (&tiles)[kRowTiles],
                                                         const TileActs &acts, int lane,
                                                         float (&acc)[kRowTiles][kGroups][4]) {
  constexpr int kType = kWeightQ6_K;
  constexpr int kZero[4] = {0, 0, 0, 0};
  using Codes = TileCodes<kType>;
  const int g = lane >> 2, offset = TileActs::lane_offset(lane);
  int high[kRowTiles][kGroups][4], low[kRowTiles][kGroups][4];
#pragma unroll
  for (int u = 0; u < kUnitsPerChunk; ++u) {
    uint32_t codes[kRowTiles][2][4], scales[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      Codes::codes_times_four(Codes::load_raw(tiles[i], u, lane), codes[i]);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        scales[i][r] =
            *reinterpret_cast<const uint32_t *>(tiles[i] + row_fields_offset(kType, g, r) + 4 * u);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        uint32_t b[4];
        acts.load_block(n, 2 * u + step, offset, b);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t (&a)[4] = codes[i][step];
            int dot_high[4], dot_low[4];
            mma_s8_k16(dot_high, a[2 * h], a[2 * h + 1], b[h], kZero);
            mma_s8_k16(dot_low, a[2 * h], a[2 * h + 1], b[2 + h], kZero);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int factor = signed_byte(scales[i][j >> 1], 2 * step + h);
              const bool is_first = u + step + h == 0;
              high[i][n][j] = factor * dot_high[j] + (is_first ? 0 : high[i][n][j]);
              low[i][n][j] = factor * dot_low[j] + (is_first ? 0 : low[i][n][j]);
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) high[i][n][j] = 2 * high[i][n][j] + (low[i][n][j] >> 2);
    }
    finish_half_scaled<kGroups>(tiles[i], acts, lane, high[i], acc[i]);
  }
}

// q6_k.
template <int kRowTiles, int kGroups>
__device__ __forceinline__ void half_scaled_chunk(const uint8_t *const (&tiles)[kRowTiles],
                                                  const TileActs &acts, int lane,
                                                  float (&acc)[kRowTiles][kGroups][4]) {
  constexpr int kType = kWeightQ6_K;
  using Codes = TileCodes<kType>;
  const int g = lane >> 2, offset = TileActs::lane_offset(lane);
  int total[kRowTiles][kGroups][4];
#pragma unroll
  for (int u = 0; u < kUnitsPerChunk; ++u) {
    uint32_t hi[kRowTiles][2][4], lo[kRowTiles][2][4], scales[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      Codes::load(tiles[i], u, lane, hi[i], lo[i]);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        scales[i][r] =
            *reinterpret_cast<const uint32_t *>(tiles[i] + row_fields_offset(kType, g, r) + 4 * u);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        uint32_t b[4];
        acts.load_block(n, 2 * u + step, offset, b);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            int dot[4];
            Codes::multiply_half(h, hi[i][step], lo[i][step], b, dot);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int factor = signed_byte(scales[i][j >> 1], 2 * step + h);
              total[i][n][j] =
                  u + step + h == 0 ? factor * dot[j] : factor * dot[j] + total[i][n][j];
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
    finish_half_scaled<kGroups>(tiles[i], acts, lane, total[i], acc[i]);
}

// The types with a d per block; num_units of the chunk exist.
template <int kType, int kRowTiles, int kGroups>
__device__ __forceinline__ void blockwise_chunk(const uint8_t *const (&tiles)[kRowTiles],
                                                const TileActs &acts, int num_units, int lane,
                                                float (&acc)[kRowTiles][kGroups][4]) {
  using Codes = TileCodes<kType>;
  using Tile = WeightTile<kType>;
  const int g = lane >> 2, t = lane & 3, offset = TileActs::lane_offset(lane);
  float p[kRowTiles][kGroups][4] = {};
#pragma unroll 1
  for (int u = 0; u < num_units; ++u) {
    uint32_t hi[kRowTiles][2][4], lo[kRowTiles][2][4];
    typename Tile::BlockScales scales[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      Codes::load(tiles[i], u, lane, hi[i], lo[i]);
      scales[i] = Tile::load_scales(tiles[i], u, g);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        uint32_t b[4];
        acts.load_block(n, 2 * u + step, offset, b);
        float s[2];
        if (Tile::kHasMin) {
          s[0] = acts.sum(n, 2 * t, 2 * u + step);
          s[1] = acts.sum(n, 2 * t + 1, 2 * u + step);
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          int dot[4];
          Codes::multiply(hi[i][step], lo[i][step], b, dot);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            p[i][n][j] = __fmaf_rn(scales[i].d[step][j >> 1], __int2float_rn(dot[j]), p[i][n][j]);
            if (Tile::kHasMin)
              p[i][n][j] = __fmaf_rn(scales[i].m[step][j >> 1], s[j & 1], p[i][n][j]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const float2 dx = acts.scales(n, t);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        acc[i][n][j] = __fmaf_rn((j & 1) == 0 ? dx.x : dx.y, p[i][n][j], acc[i][n][j]);
    }
  }
}

// acc = fma(dx, p, acc) for one chunk of kRowTiles tiles of one type and kGroups groups of tokens.
template <int kType, int kRowTiles, int kGroups>
__device__ __forceinline__ void tile_chunk(const uint8_t *const (&tiles)[kRowTiles],
                                           const TileActs &acts, int num_units, int lane,
                                           float (&acc)[kRowTiles][kGroups][4]) {
  if constexpr (kType == kWeightQ4_K || kType == kWeightQ5_K) {
    scaled_chunk<kType, kRowTiles, kGroups>(tiles, acts, lane, acc);
  } else if constexpr (kType == kWeightQ6_K) {
    if constexpr (kGroups <= 2)
      half_scaled_planes_chunk<kRowTiles, kGroups>(tiles, acts, lane, acc);
    else
      half_scaled_chunk<kRowTiles, kGroups>(tiles, acts, lane, acc);
  } else {
    blockwise_chunk<kType, kRowTiles, kGroups>(tiles, acts, num_units, lane, acc);
  }
}

}  // namespace cuda
}  // namespace xllm
