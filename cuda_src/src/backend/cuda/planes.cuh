// How weights lie in device memory: the quant blocks of GGUF, rearranged without loss and without
// growth.
//
// A matrix of N rows and K columns is cut into tiles of 16 rows; a tile is a run of units of 16
// rows x 64 columns, so a tile, and any range of its columns, is contiguous and every piece starts
// on 16 bytes. K-quants interleave four units (256 columns, a *chunk*), because their scales belong
// to 256 columns; for the others a unit stands alone and a chunk is four of them, fewer at the end.
//
//   type        chunk bytes   (raw) q4_0 unit   lo[512] d[8 g][2 r][2 step] f16 576   16 x 2 x 18
//   q4_1 unit   lo[512] {d, m}[8 g][2 r][2 step] f16 640   16 x 2 x 20 q5_0 unit   lo[512] hi[128]
//   d[8][2][2]                                                            704   16 x 2 x 22 q5_1
//   unit   lo[512] hi[128] {d, m}[8][2][2] 768   16 x 2 x 24 q8_0 unit   code[1024] d[8][2][2] 1088
//   16 x 2 x 34 q4_k chunk  lo[4][512] {d, dmin, scales[12]}[8 g][2 r] 2304   16 x 144 q5_k chunk
//   lo[4][512] hi[4][128] {d, dmin, scales[12]}[8][2]                                    2816   16
//   x 176 q6_k chunk  lo[4][512] hi[4][256] scales[8][2][16] d[8][2] 3360   16 x 210
//
// Row r of a tile is g = r % 8, r8 = r / 8. Column k of a unit is step = k / 32, h = (k % 32) / 16,
// t = (k % 16) / 4, j = k % 4. Lane 4g + t of a warp owns, in one 16-byte load, the codes that the
// A operand of an int8 mma wants of it for two steps:
//   lo    byte lane * 16 + (2 * step + r8) * 4 + j, low nibble for h = 0, high nibble for h = 1
//   hi    q5: bit 4 * step + 2 * h + r8 of byte lane * 4 + j;  q6: bits 2 * (2 * h + r8).. of byte
//   lane * 8 + 4 * step + j code  byte step * 512 + lane * 16 + (2 * h + r8) * 4 + j
// so a register of four codes is one AND, or a shift and an AND, away.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

// How a matrix is stored on the device. The plain ones are rows as in the file.
enum WeightType : int {
  kWeightQ4_0,
  kWeightQ4_1,
  kWeightQ5_0,
  kWeightQ5_1,
  kWeightQ8_0,
  kWeightQ4_K,
  kWeightQ5_K,
  kWeightQ6_K,
  kNumTileTypes,
  kWeightF32 = kNumTileTypes,
  kWeightF16,
  kWeightBF16,
};

constexpr int kTileRows = 16;
constexpr int kUnitCols = 64;
constexpr int kChunkCols = 256;
constexpr int kUnitsPerChunk = kChunkCols / kUnitCols;

// Bytes of a full chunk.
XLLM_HOST_DEVICE constexpr uint32_t chunk_bytes(int type) {
  return type == kWeightQ4_0   ? 2304u
         : type == kWeightQ4_1 ? 2560u
         : type == kWeightQ5_0 ? 2816u
         : type == kWeightQ5_1 ? 3072u
         : type == kWeightQ8_0 ? 4352u
         : type == kWeightQ4_K ? 2304u
         : type == kWeightQ5_K ? 2816u
                               : 3360u;
}

XLLM_HOST_DEVICE constexpr bool is_k_quant(int type) {
  return type == kWeightQ4_K || type == kWeightQ5_K || type == kWeightQ6_K;
}

// Offsets of the planes: within a chunk for K-quants (planes hold four units), within a unit for
// the others.
XLLM_HOST_DEVICE constexpr uint32_t hi_offset(int type) { return is_k_quant(type) ? 2048u : 512u; }
XLLM_HOST_DEVICE constexpr uint32_t scale_offset(int type) {
  return type == kWeightQ4_0 || type == kWeightQ4_1   ? 512u
         : type == kWeightQ5_0 || type == kWeightQ5_1 ? 640u
         : type == kWeightQ8_0                        ? 1024u
         : type == kWeightQ4_K                        ? 2048u
         : type == kWeightQ5_K                        ? 2560u
                                                      : 3072u;
}
constexpr uint32_t kQ6SuperScaleOffset = 3328;

// A code's place within its unit.
struct UnitPlace {
  int lane, step, reg, j;  // reg = 2 * h + r8: the register of the A operand
};
XLLM_HOST_DEVICE UnitPlace unit_place(int row, int col) {
  const int g = row & 7, r8 = row >> 3, k = col & 31;
  return {4 * g + ((k & 15) >> 2), col >> 5, 2 * (k >> 4) + r8, k & 3};
}

// ---- one element, for the embedding and for tests ----

// Reads f16 bits at `p` (2-byte aligned).
XLLM_HOST_DEVICE uint16_t load_u16(const uint8_t *p) {
  return static_cast<uint16_t>(p[0] | p[1] << 8);
}

// The code of (row, col) of a tile, as stored (unsigned, offset not yet taken off; q8_0 signed).
XLLM_HOST_DEVICE int tile_code(int type, const uint8_t *tile, int row, int64_t col) {
  const int64_t unit = col / kUnitCols;
  const UnitPlace at = unit_place(row, static_cast<int>(col % kUnitCols));
  const uint8_t *chunk = tile + unit / kUnitsPerChunk * chunk_bytes(type);
  const int u = static_cast<int>(unit % kUnitsPerChunk);
  const bool k_quant = is_k_quant(type);
  const uint8_t *base = k_quant ? chunk : chunk + u * (chunk_bytes(type) / kUnitsPerChunk);
  const int within = k_quant ? u : 0;
  if (type == kWeightQ8_0) {
    return static_cast<int8_t>(base[at.step * 512 + at.lane * 16 + at.reg * 4 + at.j]);
  }
  const int h = at.reg >> 1, r8 = at.reg & 1;
  int code = base[within * 512 + at.lane * 16 + (2 * at.step + r8) * 4 + at.j] >> (4 * h) & 15;
  if (type == kWeightQ5_0 || type == kWeightQ5_1 || type == kWeightQ5_K) {
    code |=
        (base[hi_offset(type) + within * 128 + at.lane * 4 + at.j] >> (4 * at.step + at.reg) & 1)
        << 4;
  } else if (type == kWeightQ6_K) {
    code |=
        (base[hi_offset(type) + within * 256 + at.lane * 8 + 4 * at.step + at.j] >> (2 * at.reg) &
         3)
        << 4;
  }
  return code;
}

// The 6-bit scale and minimum of sub-block s of a q4_k or q5_k block.
XLLM_HOST_DEVICE void k_scale_min(const uint8_t *scales, int s, int *scale, int *minimum) {
  if (s < 4) {
    *scale = scales[s] & 63;
    *minimum = scales[s + 4] & 63;
  } else {
    *scale = (scales[s + 4] & 15) | (scales[s - 4] >> 6) << 4;
    *minimum = (scales[s + 4] >> 4) | (scales[s] >> 6) << 4;
  }
}

// What the products multiply with at (row, col): the value is dw * (code - offset) + shift. All of
// them are exact in f32.
struct TileFactors {
  float dw, shift;
  int offset;
};
XLLM_HOST_DEVICE TileFactors tile_factors(int type, const uint8_t *tile, int row, int64_t col,
                                          float (*half_to_float)(uint16_t)) {
  const int g = row & 7, r8 = row >> 3;
  const uint8_t *chunk = tile + col / kChunkCols * chunk_bytes(type);
  const int in_chunk = static_cast<int>(col % kChunkCols);
  if (type == kWeightQ6_K) {
    const float d = half_to_float(load_u16(chunk + kQ6SuperScaleOffset + g * 4 + r8 * 2));
    const int scale =
        static_cast<int8_t>(chunk[scale_offset(type) + g * 32 + r8 * 16 + in_chunk / 16]);
    return {d * static_cast<float>(scale), 0.0f, 32};
  }
  if (type == kWeightQ4_K || type == kWeightQ5_K) {
    const uint8_t *p = chunk + scale_offset(type) + g * 32 + r8 * 16;
    int scale = 0, minimum = 0;
    k_scale_min(p + 4, in_chunk / 32, &scale, &minimum);
    return {half_to_float(load_u16(p)) * static_cast<float>(scale),
            -(half_to_float(load_u16(p + 2)) * static_cast<float>(minimum)), 0};
  }
  const uint8_t *unit =
      chunk + in_chunk / kUnitCols * (chunk_bytes(type) / kUnitsPerChunk) + scale_offset(type);
  const int step = in_chunk % kUnitCols / 32;
  if (type == kWeightQ4_1 || type == kWeightQ5_1) {
    const uint8_t *p = unit + g * 16 + r8 * 8 + step * 4;
    return {half_to_float(load_u16(p)), half_to_float(load_u16(p + 2)), 0};
  }
  return {half_to_float(load_u16(unit + g * 8 + r8 * 4 + step * 2)), 0.0f,
          type == kWeightQ4_0   ? 8
          : type == kWeightQ5_0 ? 16
                                : 0};
}

// The value of (row, col) of a tile.
XLLM_HOST_DEVICE float tile_value(int type, const uint8_t *tile, int row, int64_t col,
                                  float (*half_to_float)(uint16_t)) {
  const TileFactors f = tile_factors(type, tile, row, col, half_to_float);
  return f.dw * static_cast<float>(tile_code(type, tile, row, col) - f.offset) + f.shift;
}

// ---- what a warp of a matrix kernel reads ----
// Scales of one chunk (K-quants) or unit (the others) in registers, then per step of 32 columns and
// for rows g and g + 8: the A registers, the factor dw of the integer dot product, and where the
// type has one the factor `shift` of the activations' sum (m of q4_1, -dmin * min of q4_k). All
// products below are exact in f32.

#ifdef __CUDACC__

// Byte `index` of `word` as f32 + 2^23, by placing it in the mantissa.
template <int kIndex>
__device__ __forceinline__ float biased_byte(uint32_t word) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7650 + kIndex));
}

__device__ __forceinline__ float half_bits_to_float(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits & 0xffffu)));
}

// Bytes 0..15 (or 0..31, 0..63) of four codes each, less kOffset, as int8: the sum stays below 256
// and never carries.
template <int kOffset>
__device__ __forceinline__ uint32_t less_offset(uint32_t codes) {
  if (kOffset == 0) return codes;
  constexpr uint32_t kAdd = (128u - kOffset) * 0x01010101u;
  return (codes + kAdd) ^ 0x80808080u;
}

template <int kType>
struct WeightTile {
  static constexpr bool kKQuant = is_k_quant(kType);
  static constexpr bool kHasMin =
      kType == kWeightQ4_1 || kType == kWeightQ5_1 || kType == kWeightQ4_K || kType == kWeightQ5_K;
  static constexpr bool kHalfBlocks = kType == kWeightQ6_K;  // a scale per 16 columns
  static constexpr int kNumScales = kHalfBlocks ? 2 : 1;
  static constexpr int kOffset = kType == kWeightQ4_0   ? 8
                                 : kType == kWeightQ5_0 ? 16
                                 : kType == kWeightQ6_K ? 32
                                                        : 0;
  static constexpr uint32_t kUnitBytes = chunk_bytes(kType) / kUnitsPerChunk;

  // q4_k, q5_k: scale and minimum bytes of sub-blocks 0-3 and 4-7. q6_k: 16 scales, sign bit
  // flipped. Others: f16 pairs.
  struct Scales {
    uint32_t word[2][4];
    float d[2], dmin[2];
  };

  // The same as they lie in memory.
  struct RawScales {
    uint4 v[2];
    uint32_t d;
  };

  // `at`: the chunk of a K-quant, the unit of another type.
  static __device__ __forceinline__ void load_raw(const uint8_t *at, int g, RawScales *raw) {
    const uint8_t *p = at + scale_offset(kType);
    if (kKQuant) {
#pragma unroll
      for (int r = 0; r < 2; ++r) raw->v[r] = *reinterpret_cast<const uint4 *>(p + g * 32 + r * 16);
      if (kType == kWeightQ6_K)
        raw->d = *reinterpret_cast<const uint32_t *>(at + kQ6SuperScaleOffset + g * 4);
    } else if (kHasMin) {
      raw->v[0] = *reinterpret_cast<const uint4 *>(p + g * 16);
    } else {
      const uint2 v = *reinterpret_cast<const uint2 *>(p + g * 8);
      raw->v[0].x = v.x;
      raw->v[0].y = v.y;
    }
  }

  static __device__ __forceinline__ void unpack(const RawScales &raw, Scales *s) {
    if (kType == kWeightQ4_K || kType == kWeightQ5_K) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 v = raw.v[r];
        s->d[r] = half_bits_to_float(v.x);
        s->dmin[r] = half_bits_to_float(v.x >> 16);
        s->word[r][0] = v.y & 0x3f3f3f3fu;
        s->word[r][1] = (v.w & 0x0f0f0f0fu) | ((v.y >> 2) & 0x30303030u);
        s->word[r][2] = v.z & 0x3f3f3f3fu;
        s->word[r][3] = ((v.w >> 4) & 0x0f0f0f0fu) | ((v.z >> 2) & 0x30303030u);
      }
    } else if (kType == kWeightQ6_K) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 v = raw.v[r];
        s->d[r] = half_bits_to_float(raw.d >> (16 * r));
        s->word[r][0] = v.x ^ 0x80808080u;
        s->word[r][1] = v.y ^ 0x80808080u;
        s->word[r][2] = v.z ^ 0x80808080u;
        s->word[r][3] = v.w ^ 0x80808080u;
      }
    } else if (kHasMin) {
      s->word[0][0] = raw.v[0].x;
      s->word[0][1] = raw.v[0].y;
      s->word[1][0] = raw.v[0].z;
      s->word[1][1] = raw.v[0].w;
    } else {
      s->word[0][0] = raw.v[0].x;
      s->word[1][0] = raw.v[0].y;
    }
  }

  static __device__ __forceinline__ void load_scales(const uint8_t *at, int g, Scales *s) {
    RawScales raw;
    load_raw(at, g, &raw);
    unpack(raw, s);
  }

  // Factors of step kStep (0..7 of a chunk for K-quants, 0..1 of a unit): dw[r8][half], shift[r8].
  template <int kStep>
  static __device__ __forceinline__ void step_scales(const Scales &s, float (&dw)[2][kNumScales],
                                                     float (&shift)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (kType == kWeightQ4_K || kType == kWeightQ5_K) {
        constexpr float kBias = 8388608.0f;
        dw[r][0] = __fmaf_rn(biased_byte<kStep & 3>(s.word[r][(kStep >> 2) & 1]), s.d[r],
                             -__fmul_rn(kBias, s.d[r]));
        shift[r] = __fmaf_rn(biased_byte<kStep & 3>(s.word[r][2 + ((kStep >> 2) & 1)]), -s.dmin[r],
                             __fmul_rn(kBias, s.dmin[r]));
      } else if (kType == kWeightQ6_K) {
        constexpr float kBias = 8388608.0f + 128.0f;
        const uint32_t word = s.word[r][(kStep >> 1) & 3];
        dw[r][0] = __fmul_rn(__fsub_rn(biased_byte<2 * (kStep & 1)>(word), kBias), s.d[r]);
        dw[r][kNumScales - 1] =
            __fmul_rn(__fsub_rn(biased_byte<2 * (kStep & 1) + 1>(word), kBias), s.d[r]);
      } else if (kHasMin) {
        dw[r][0] = half_bits_to_float(s.word[r][kStep & 1]);
        shift[r] = half_bits_to_float(s.word[r][kStep & 1] >> 16);
      } else {
        dw[r][0] = half_bits_to_float(s.word[r][0] >> (16 * (kStep & 1)));
      }
    }
  }

  // A registers of both steps of unit `u` of the chunk at `chunk`.
  static __device__ __forceinline__ void load_codes(const uint8_t *chunk, int u, int lane,
                                                    uint32_t (&a)[2][4]) {
    const uint8_t *base = kKQuant ? chunk : chunk + u * kUnitBytes;
    const int within = kKQuant ? u : 0;
    if (kType == kWeightQ8_0) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint4 v = *reinterpret_cast<const uint4 *>(base + step * 512 + lane * 16);
        a[step][0] = v.x;
        a[step][1] = v.y;
        a[step][2] = v.z;
        a[step][3] = v.w;
      }
      return;
    }
    const uint4 v = *reinterpret_cast<const uint4 *>(base + within * 512 + lane * 16);
    const uint32_t lo[4] = {v.x, v.y, v.z, v.w};
    uint32_t hi[2] = {0, 0};
    if (kType == kWeightQ5_0 || kType == kWeightQ5_1 || kType == kWeightQ5_K) {
      hi[0] =
          *reinterpret_cast<const uint32_t *>(base + hi_offset(kType) + within * 128 + lane * 4);
    } else if (kType == kWeightQ6_K) {
      const uint2 w =
          *reinterpret_cast<const uint2 *>(base + hi_offset(kType) + within * 256 + lane * 8);
      hi[0] = w.x;
      hi[1] = w.y;
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        uint32_t codes = (lo[2 * step + (reg & 1)] >> (4 * (reg >> 1))) & 0x0f0f0f0fu;
        if (kType == kWeightQ5_0 || kType == kWeightQ5_1 || kType == kWeightQ5_K) {
          const int bit = 4 * step + reg;  // to bit 4
          codes |= (bit <= 4 ? hi[0] << (4 - bit) : hi[0] >> (bit - 4)) & 0x10101010u;
        } else if (kType == kWeightQ6_K) {
          const int bit = 2 * reg;  // to bits 4, 5
          codes |= (bit <= 4 ? hi[step] << (4 - bit) : hi[step] >> (bit - 4)) & 0x30303030u;
        }
        a[step][reg] = less_offset<kOffset>(codes);
      }
    }
  }
};

#endif  // __CUDACC__

}  // namespace cuda
}  // namespace xllm
