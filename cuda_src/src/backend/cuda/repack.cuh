// Quant blocks of a file to tiles (planes.cuh) and back: byte by byte, the same code on the GPU and
// on the host.
#pragma once

#include "backend/cuda/planes.cuh"

namespace xllm {
namespace cuda {

// GGUF's numbers (tensor/dtype.h) of the types that become tiles. Two have no kernels of their own
// and become a type that holds their values exactly: iq4_nl as q8_0 (the code book's values are
// int8), q3_k as q6_k (its codes and scales are narrower).
enum SourceType : int {
  kSourceQ4_0 = 2,
  kSourceQ4_1 = 3,
  kSourceQ5_0 = 6,
  kSourceQ5_1 = 7,
  kSourceQ8_0 = 8,
  kSourceQ3_K = 11,
  kSourceQ4_K = 12,
  kSourceQ5_K = 13,
  kSourceQ6_K = 14,
  kSourceIQ4_NL = 20,
};

// Rows of a matrix as they stand in the file.
struct RawRows {
  const uint8_t *data;
  int64_t row_bytes;
  int64_t num_rows;  // rows past it are padding
  int64_t num_cols;  // a multiple of 32
  int source;
};

XLLM_HOST_DEVICE constexpr int tile_type_of(int source) {
  return source == kSourceQ4_0                              ? kWeightQ4_0
         : source == kSourceQ4_1                            ? kWeightQ4_1
         : source == kSourceQ5_0                            ? kWeightQ5_0
         : source == kSourceQ5_1                            ? kWeightQ5_1
         : source == kSourceQ8_0 || source == kSourceIQ4_NL ? kWeightQ8_0
         : source == kSourceQ4_K                            ? kWeightQ4_K
         : source == kSourceQ5_K                            ? kWeightQ5_K
                                                            : kWeightQ6_K;
}

// First byte of the quant block that holds (row, col).
XLLM_HOST_DEVICE const uint8_t *raw_block(const RawRows &raw, int64_t row, int64_t col) {
  const int type = raw.source;
  const int elems = type >= kSourceQ3_K && type <= kSourceQ6_K ? kSuperBlock : kQuantBlock;
  const int bytes = type == kSourceQ4_0 || type == kSourceIQ4_NL ? 18
                    : type == kSourceQ4_1                        ? 20
                    : type == kSourceQ5_0                        ? 22
                    : type == kSourceQ5_1                        ? 24
                    : type == kSourceQ8_0                        ? 34
                    : type == kSourceQ3_K                        ? 110
                    : type == kSourceQ4_K                        ? 144
                    : type == kSourceQ5_K                        ? 176
                                                                 : 210;
  return raw.data + row * raw.row_bytes + col / elems * bytes;
}

// The code of (row, col) as a tile stores it.
XLLM_HOST_DEVICE int raw_code(const RawRows &raw, int64_t row, int64_t col) {
  if (row >= raw.num_rows || col >= raw.num_cols) return 0;
  const uint8_t *block = raw_block(raw, row, col);
  const int k = static_cast<int>(col % kQuantBlock);
  const int e = static_cast<int>(col % kSuperBlock);
  const int nibble = 4 * (k >> 4);
  switch (raw.source) {
    case kSourceQ4_0:
      return block[2 + (k & 15)] >> nibble & 15;
    case kSourceQ4_1:
      return block[4 + (k & 15)] >> nibble & 15;
    case kSourceQ5_0:
      return (block[6 + (k & 15)] >> nibble & 15) | (block[2 + k / 8] >> (k & 7) & 1) << 4;
    case kSourceQ5_1:
      return (block[8 + (k & 15)] >> nibble & 15) | (block[4 + k / 8] >> (k & 7) & 1) << 4;
    case kSourceQ8_0:
      return block[2 + k];
    case kSourceIQ4_NL: {
      constexpr int8_t kValues[16] = XLLM_IQ4_VALUES;
      return static_cast<uint8_t>(kValues[block[2 + (k & 15)] >> nibble & 15]);
    }
    case kSourceQ3_K: {
      const int low = block[32 + e / 128 * 32 + (e & 31)] >> (2 * (e % 128 / 32)) & 3;
      const int high = block[e & 31] >> (e / 32) & 1;
      return low + 4 * high - 4 + 32;
    }
    case kSourceQ4_K:
      return block[16 + e / 64 * 32 + k] >> (4 * (e / 32 & 1)) & 15;
    case kSourceQ5_K:
      return (block[48 + e / 64 * 32 + k] >> (4 * (e / 32 & 1)) & 15) |
             (block[16 + k] >> (e / 32) & 1) << 4;
    default: {  // q6_k
      const int part = e % 128 / 32;
      const int low = block[e / 128 * 64 + 32 * (part & 1) + k] >> (4 * (part >> 1)) & 15;
      const int high = block[128 + e / 128 * 32 + k] >> (2 * part) & 3;
      return low | high << 4;
    }
  }
}

// Byte `index` of the scale fields of the block at (row, col): d for q4_0, q5_0, q8_0; d, m for
// q4_1, q5_1; d, dmin for q4_k, q5_k; for q6_k the 16 scales, then d.
// Outside the matrix: zeros, d among them.
XLLM_HOST_DEVICE uint8_t raw_scale_byte(const RawRows &raw, int64_t row, int64_t col, int index) {
  if (row >= raw.num_rows || col >= raw.num_cols) return 0;
  const uint8_t *block = raw_block(raw, row, col);
  if (raw.source == kSourceQ6_K) return block[192 + index];
  if (raw.source == kSourceQ3_K) {
    if (index >= 16) return block[108 + index - 16];
    const uint8_t *scales = block + 96;
    const int low = scales[index & 7] >> (4 * (index >> 3)) & 15;
    const int high = scales[8 + (index & 3)] >> (2 * (index >> 2)) & 3;
    return static_cast<uint8_t>((low | high << 4) - 32);
  }
  return block[index];
}

// Byte `at` of the fields of q4_k and q5_k (planes.cuh) of the chunk at (row0, col0).
XLLM_HOST_DEVICE uint8_t field_byte(const RawRows &raw, int64_t row0, int64_t col0, int at) {
  const int of_row = at / static_cast<int>(kRowFieldBytes),
            in = at % static_cast<int>(kRowFieldBytes);
  const int64_t row = row0 + of_row / 2 + 8 * (of_row % 2);
  if (in < 4 || row >= raw.num_rows || col0 >= raw.num_cols)
    return raw_scale_byte(raw, row, col0, in);
  const uint8_t *scales = raw_block(raw, row, col0) + 4;
  const int word = in / 4 - 1, i = in % 4;
  int scale[2], minimum[2];  // of blocks i, 4 + i
  k_scale_min(scales, i, &scale[0], &minimum[0]);
  k_scale_min(scales, 4 + i, &scale[1], &minimum[1]);
  const int low = word == 2 ? minimum[0] : scale[word];
  return static_cast<uint8_t>(low | (minimum[1] >> (4 - 2 * word) & 3) << 6);
}

// Byte j of word w of a lane's 6-bit codes (planes.cuh) of the unit at (row0, col0).
XLLM_HOST_DEVICE uint8_t six_byte(const RawRows &raw, int64_t row0, int64_t col0, int lane, int w,
                                  int j) {
  const auto code = [&](int i) {  // of register i = 4 * step + reg, as two's complement
    const int reg = i & 3;
    return raw_code(raw, row0 + lane / 4 + 8 * (reg & 1),
                    col0 + i / 4 * 32 + (reg >> 1) * 16 + lane % 4 * 4 + j) ^
           32;
  };
  return static_cast<uint8_t>(code(w) << 2 | (code(6 + w / 3) >> (4 - 2 * (w % 3)) & 3));
}

// Byte `offset` of the tile of rows 16 * tile.. .
XLLM_HOST_DEVICE uint8_t packed_byte(const RawRows &raw, int64_t tile, int64_t offset) {
  const int type = tile_type_of(raw.source);
  const bool k_quant = is_k_quant(type);
  const int64_t piece_bytes = k_quant ? chunk_bytes(type) : chunk_bytes(type) / kUnitsPerChunk;
  const int64_t col0 = offset / piece_bytes * (k_quant ? kChunkCols : kUnitCols);
  const int64_t row0 = tile * kTileRows;
  const int at = static_cast<int>(offset % piece_bytes);
  const int lo_bytes = k_quant ? 2048 : type == kWeightQ8_0 ? 1024 : 512;

  if (at < lo_bytes) {
    if (type == kWeightQ8_0) {
      const int lane = at % 512 / 16, reg = at % 16 / 4, j = at % 4;
      return static_cast<uint8_t>(
          raw_code(raw, row0 + lane / 4 + 8 * (reg & 1),
                   col0 + at / 512 * 32 + (reg >> 1) * 16 + lane % 4 * 4 + j));
    }
    const int lane = at % 512 / 16, reg = at % 16 / 4, j = at % 4;
    const int64_t unit_col = col0 + at / 512 * kUnitCols;
    if (type == kWeightQ6_K) return six_byte(raw, row0, unit_col, lane, reg, j);
    const int64_t row = row0 + lane / 4 + 8 * (reg & 1);
    const int64_t col = unit_col + (reg >> 1) * 16 + lane % 4 * 4 + j;
    return static_cast<uint8_t>((raw_code(raw, row, col) & 15) | (raw_code(raw, row, col + 32) & 15)
                                                                     << 4);
  }
  if (at < static_cast<int>(scale_offset(type))) {  // high bits
    const int in = at - static_cast<int>(hi_offset(type));
    if (type == kWeightQ6_K) {
      return six_byte(raw, row0, col0 + in / 256 * kUnitCols, in % 256 / 8, 4 + in % 8 / 4, in % 4);
    }
    const int lane = in % 128 / 4, j = in % 4;
    int byte = 0;
    for (int i = 0; i < 8; ++i) {
      const int reg = i % 4;
      const int64_t row = row0 + lane / 4 + 8 * (reg & 1);
      const int64_t col =
          col0 + in / 128 * kUnitCols + i / 4 * 32 + (reg >> 1) * 16 + lane % 4 * 4 + j;
      byte |= raw_code(raw, row, col) >> 4 << i;
    }
    return static_cast<uint8_t>(byte);
  }
  const int in = at - static_cast<int>(scale_offset(type));
  if (type == kWeightQ6_K) {
    if (in >= 256) {
      const int d = in - 256;
      return raw_scale_byte(raw, row0 + d / 4 + 8 * (d % 4 / 2), col0, 16 + d % 2);
    }
    return raw_scale_byte(raw, row0 + in / 32 + 8 * (in % 32 / 16), col0, in % 16);
  }
  if (k_quant) return field_byte(raw, row0, col0, in);
  const int size = type == kWeightQ4_1 || type == kWeightQ5_1 ? 4 : 2;  // bytes of a block's scales
  const int64_t row = row0 + in / (4 * size) + 8 * (in % (4 * size) / (2 * size));
  return raw_scale_byte(raw, row, col0 + in % (2 * size) / size * 32, in % size);
}

}  // namespace cuda
}  // namespace xllm
