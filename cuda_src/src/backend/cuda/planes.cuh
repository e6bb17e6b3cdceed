// How weights lie in device memory: the quant blocks of GGUF, rearranged without loss and without
// growth.
//
// A matrix of N rows and K columns is cut into tiles of 16 rows; a tile is a run of units of 16
// rows x 64 columns, so a tile, and any range of its columns, is contiguous and every piece starts
// on 16 bytes. K-quants interleave four units (256 columns, a *chunk*), because their scales belong
// to 256 columns; for the others a unit stands alone and a chunk is four of them, fewer at the end.
//
//   type        chunk bytes                                                          as in a file
//   q4_0 unit   lo[512] d[8 g][2 r][2 step] f16                                 576  16 x 2 x 18
//   q4_1 unit   lo[512] {d, m}[8 g][2 r][2 step] f16                            640  16 x 2 x 20
//   q5_0 unit   lo[512] hi[128] d[8][2][2]                                      704  16 x 2 x 22
//   q5_1 unit   lo[512] hi[128] {d, m}[8][2][2]                                 768  16 x 2 x 24
//   q8_0 unit   code[1024] d[8][2][2]                                          1088  16 x 2 x 34
//   q4_k chunk  lo[4][512] fields[8 g][2 r][16]                                2304  16 x 144
//   q5_k chunk  lo[4][512] hi[4][128] fields[8 g][2 r][16]                     2816  16 x 176
//   q6_k chunk  six[4][512] six[4][256] scales[8 g][2 r][16] d[8 g][2 r]       3360  16 x 210
//
// Row r of a tile is g = r % 8, r8 = r / 8. Column k of a unit is step = k / 32, h = (k % 32) / 16,
// t = (k % 16) / 4, j = k % 4. Lane 4g + t of a warp owns, in one 16-byte load, the codes that the
// A operand of an int8 mma wants of it for two steps; reg = 2 * h + r8 is the register:
//   lo    byte lane * 16 + reg * 4 + j, low nibble for step 0, high nibble for step 1
//   hi    of q5: bit 4 * step + reg of byte lane * 4 + j
//   code  byte step * 512 + lane * 16 + reg * 4 + j
//   six   eight registers of 6-bit codes, i = 4 * step + reg, in six words w0.. of four bytes (four
//         in the first plane, two in the second): code ^ 32, which is code - 32 in two's
//         complement, in bits 2-7 of w_i for i < 6; for i = 6 its bits 5-4, 3-2, 1-0 in bits 1-0 of
//         w0, w1, w2; for i = 7 in those of w3, w4, w5
// so a register of four codes is one AND away, times a power of two (WeightTile::code_factor).
//   fields of q4_k and q5_k, of one row: {d, dmin} f16, words w0, w1, w2 of four bytes. Byte i of
//   w0
//         holds scale i in bits 0-5, of w1 scale 4 + i, of w2 minimum i; bits 7-6 of byte i of w0,
//         w1, w2 are bits 5-4, 3-2, 1-0 of minimum 4 + i
//   scales of q6_k: of the 16 half blocks in order, int8
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
// Bytes of a row's fields of q4_k and q5_k, and of its scales of q6_k; row r at (2 g + r8) times
// it.
constexpr uint32_t kRowFieldBytes = 16;

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
  if (type == kWeightQ6_K) {
    const auto six = [&](int w) {  // byte of word w
      return w < 4 ? base[within * 512 + at.lane * 16 + w * 4 + at.j]
                   : base[hi_offset(type) + within * 256 + at.lane * 8 + (w - 4) * 4 + at.j];
    };
    const int i = 4 * at.step + at.reg;
    if (i < 6) return six(i) >> 2 ^ 32;
    const int first = 3 * (i - 6);
    return ((six(first) & 3) << 4 | (six(first + 1) & 3) << 2 | (six(first + 2) & 3)) ^ 32;
  }
  int code = base[within * 512 + at.lane * 16 + at.reg * 4 + at.j] >> (4 * at.step) & 15;
  if (type == kWeightQ5_0 || type == kWeightQ5_1 || type == kWeightQ5_K) {
    code |=
        (base[hi_offset(type) + within * 128 + at.lane * 4 + at.j] >> (4 * at.step + at.reg) & 1)
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

// The same from a row's fields in a tile.
XLLM_HOST_DEVICE void tile_scale_min(const uint8_t *fields, int s, int *scale, int *minimum) {
  const int i = s & 3;
  const int w0 = fields[4 + i], w1 = fields[8 + i], w2 = fields[12 + i];
  *scale = (s < 4 ? w0 : w1) & 63;
  *minimum = s < 4 ? w2 & 63 : (w0 >> 6) << 4 | (w1 >> 6) << 2 | w2 >> 6;
}

// Where the fields of q4_k and q5_k or the scales of q6_k of a row begin in a chunk.
XLLM_HOST_DEVICE uint32_t row_fields_offset(int type, int g, int r8) {
  return scale_offset(type) + static_cast<uint32_t>(2 * g + r8) * kRowFieldBytes;
}

// The value at (row, col) is dw * (code - offset) + shift. All of them are exact in f32.
struct TileFactors {
  float dw, shift;
  int offset;
};
XLLM_HOST_DEVICE TileFactors tile_factors(int type, const uint8_t *tile, int row, int64_t col,
                                          float (*half_to_float)(uint16_t)) {
  const int g = row & 7, r8 = row >> 3;
  const uint8_t *chunk = tile + col / kChunkCols * chunk_bytes(type);
  const int in_chunk = static_cast<int>(col % kChunkCols);
  const uint8_t *fields = chunk + row_fields_offset(type, g, r8);
  if (type == kWeightQ6_K) {
    const float d = half_to_float(load_u16(chunk + kQ6SuperScaleOffset + g * 4 + r8 * 2));
    return {d * static_cast<float>(static_cast<int8_t>(fields[in_chunk / 16])), 0.0f, 32};
  }
  if (type == kWeightQ4_K || type == kWeightQ5_K) {
    int scale = 0, minimum = 0;
    tile_scale_min(fields, in_chunk / 32, &scale, &minimum);
    return {half_to_float(load_u16(fields)) * static_cast<float>(scale),
            -(half_to_float(load_u16(fields + 2)) * static_cast<float>(minimum)), 0};
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

#ifdef __CUDACC__

__device__ __forceinline__ float half_bits_to_float(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits & 0xffffu)));
}

// Bytes 0..15 (or 0..31) of four codes each, less kOffset, as int8: the sum stays below 256 and
// never carries.
template <int kOffset>
__device__ __forceinline__ uint32_t less_offset(uint32_t codes) {
  if (kOffset == 0) return codes;
  constexpr uint32_t kAdd = (128u - kOffset) * 0x01010101u;
  return (codes + kAdd) ^ 0x80808080u;
}

// A row's fields of q4_k and q5_k: byte b of (scales, minima)[b / 4] is block b's.
struct RowFields {
  float d, dmin;
  uint32_t scales[2], minima[2];
};
__device__ __forceinline__ RowFields unpack_fields(const uint4 &v) {
  RowFields f;
  f.d = half_bits_to_float(v.x);
  f.dmin = half_bits_to_float(v.x >> 16);
  f.scales[0] = v.y & 0x3f3f3f3fu;
  f.scales[1] = v.z & 0x3f3f3f3fu;
  f.minima[0] = v.w & 0x3f3f3f3fu;
  f.minima[1] =
      ((v.y >> 2) & 0x30303030u) | ((v.z >> 4) & 0x0c0c0c0cu) | ((v.w >> 6) & 0x03030303u);
  return f;
}

template <int kType>
struct WeightTile {
  static constexpr bool kKQuant = is_k_quant(kType);
  static constexpr bool kHasMin =
      kType == kWeightQ4_1 || kType == kWeightQ5_1 || kType == kWeightQ4_K || kType == kWeightQ5_K;
  static constexpr bool kHalfBlocks = kType == kWeightQ6_K;  // a scale per 16 columns
  static constexpr int kOffset = kType == kWeightQ4_0 ? 8 : kType == kWeightQ5_0 ? 16 : 0;
  // High nibbles stay where they are: 16 times the code, as u8.
  static constexpr bool kHighInPlace = kType == kWeightQ4_1 || kType == kWeightQ4_K;
  static constexpr uint32_t kUnitBytes = chunk_bytes(kType) / kUnitsPerChunk;

  // What the registers of load_codes hold is the code (less its offset) times this, as int8, or as
  // u8 where kHighInPlace and step is 1.
  static XLLM_HOST_DEVICE constexpr int code_factor(int step) {
    return kType == kWeightQ6_K ? 4 : kHighInPlace && step == 1 ? 16 : 1;
  }

  // Of rows g and g + 8 and block 2u + step of the chunk at `chunk`, for types that have a d per
  // block: d, and m where the type has a minimum.
  struct BlockScales {
    float d[2][2], m[2][2];  // [step][r8]
  };
  static __device__ __forceinline__ BlockScales load_scales(const uint8_t *chunk, int u, int g) {
    static_assert(!kKQuant, "K-quants have a d per chunk");
    BlockScales f;
    const uint8_t *p = chunk + u * kUnitBytes + scale_offset(kType);
    if constexpr (kHasMin) {
      const uint4 v = *reinterpret_cast<const uint4 *>(p + g * 16);
      const uint32_t pairs[2][2] = {{v.x, v.y}, {v.z, v.w}};  // [r8][step]
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          f.d[step][r] = half_bits_to_float(pairs[r][step]);
          f.m[step][r] = half_bits_to_float(pairs[r][step] >> 16);
        }
      }
    } else {
      const uint2 v = *reinterpret_cast<const uint2 *>(p + g * 8);
      f.d[0][0] = half_bits_to_float(v.x);
      f.d[1][0] = half_bits_to_float(v.x >> 16);
      f.d[0][1] = half_bits_to_float(v.y);
      f.d[1][1] = half_bits_to_float(v.y >> 16);
    }
    return f;
  }

  // A registers of both steps of unit `u` of the chunk at `chunk`.
  static __device__ __forceinline__ void load_codes(const uint8_t *chunk, int u, int lane,
                                                    uint32_t (&a)[2][4]) {
    const uint8_t *base = kKQuant ? chunk : chunk + u * kUnitBytes;
    const int within = kKQuant ? u : 0;
    if constexpr (kType == kWeightQ8_0) {
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
    if constexpr (kType == kWeightQ6_K) {
      const uint2 w =
          *reinterpret_cast<const uint2 *>(base + hi_offset(kType) + within * 256 + lane * 8);
      constexpr uint32_t kCode = 0xfcfcfcfcu;
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) a[0][reg] = lo[reg] & kCode;
      a[1][0] = w.x & kCode;
      a[1][1] = w.y & kCode;
      a[1][2] = ((lo[0] << 6) & 0xc0c0c0c0u) | ((lo[1] << 4) & 0x30303030u) |
                ((lo[2] << 2) & 0x0c0c0c0cu);
      a[1][3] =
          ((lo[3] << 6) & 0xc0c0c0c0u) | ((w.x << 4) & 0x30303030u) | ((w.y << 2) & 0x0c0c0c0cu);
      return;
    }
    uint32_t hi = 0;
    if constexpr (kType == kWeightQ5_0 || kType == kWeightQ5_1 || kType == kWeightQ5_K)
      hi = *reinterpret_cast<const uint32_t *>(base + hi_offset(kType) + within * 128 + lane * 4);
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) {
      if constexpr (kHighInPlace) {
        a[0][reg] = lo[reg] & 0x0f0f0f0fu;
        a[1][reg] = lo[reg] & 0xf0f0f0f0u;
      } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t codes = (lo[reg] >> (4 * step)) & 0x0f0f0f0fu;
          if constexpr (kType == kWeightQ5_0 || kType == kWeightQ5_1 || kType == kWeightQ5_K) {
            const int bit = 4 * step + reg;  // to bit 4
            codes |= (bit <= 4 ? hi << (4 - bit) : hi >> (bit - 4)) & 0x10101010u;
          }
          a[step][reg] = less_offset<kOffset>(codes);
        }
      }
    }
  }
};

#endif  // __CUDACC__

}  // namespace cuda
}  // namespace xllm
