#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/matmul_args.cuh"
#include "backend/cuda/repack.cuh"
#include "backend/cuda/repack.h"
#include "base/checked.h"
#include "base/half.h"

namespace xllm {
namespace cuda {
namespace {

// ---- kernels ----

// One 4-byte word of a tile per thread; grid.y = tiles. Runs once per matrix, at the speed of the
// upload.
__global__ void __launch_bounds__(256)
    repack_kernel(RawRows raw, uint8_t *tiles, int64_t tile_size) {
  wait_for_previous_kernel();
  const int64_t offset = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) * 4;
  if (offset >= tile_size) return;
  uint32_t word = 0;
#pragma unroll 1
  for (int i = 0; i < 4; ++i)
    word |= static_cast<uint32_t>(packed_byte(raw, blockIdx.y, offset + i)) << (8 * i);
  *reinterpret_cast<uint32_t *>(tiles + static_cast<int64_t>(blockIdx.y) * tile_size + offset) =
      word;
}

RawRows raw_rows(DType dtype, const uint8_t *data, int64_t num_rows, int64_t num_cols) {
  return {data, static_cast<int64_t>(dtype_bytes(dtype, static_cast<uint64_t>(num_cols))), num_rows,
          num_cols, static_cast<int>(dtype)};
}

}  // namespace

// ---- launchers ----

int weight_type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return kWeightF32;
    case DType::kF16:
      return kWeightF16;
    case DType::kBF16:
      return kWeightBF16;
    case DType::kQ4_0:
    case DType::kQ4_1:
    case DType::kQ5_0:
    case DType::kQ5_1:
    case DType::kQ8_0:
    case DType::kQ3_K:
    case DType::kQ4_K:
    case DType::kQ5_K:
    case DType::kQ6_K:
    case DType::kIQ4_NL:
      return tile_type_of(static_cast<int>(dtype));
    case DType::kQ2_K:
    case DType::kIQ4_XS:
      return -1;
  }
  return -1;
}

bool is_plain(int weight_type) { return weight_type >= kNumTileTypes; }

uint64_t tile_bytes(int weight_type, int64_t cols) {
  const uint64_t units = ceil_div(static_cast<uint64_t>(cols), kUnitCols);
  return units * (chunk_bytes(weight_type) / kUnitsPerChunk);
}

uint64_t device_bytes(const MatrixView &matrix) {
  const int type = weight_type_of(matrix.dtype);
  if (is_plain(type)) return matrix.size_bytes();
  return ceil_div(static_cast<uint64_t>(matrix.rows), kTileRows) * tile_bytes(type, matrix.cols);
}

void repack(DType dtype, const uint8_t *raw, int64_t num_rows, int64_t num_cols, uint8_t *tiles,
            cudaStream_t stream) {
  const int64_t size = static_cast<int64_t>(tile_bytes(weight_type_of(dtype), num_cols));
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  constexpr int64_t kMaxGridY = 32768;
  for (int64_t first = 0; first < num_tiles; first += kMaxGridY) {
    const int64_t count = num_tiles - first < kMaxGridY ? num_tiles - first : kMaxGridY;
    RawRows rows = raw_rows(dtype, raw, num_rows - first * kTileRows, num_cols);
    rows.data += first * kTileRows * rows.row_bytes;
    const dim3 grid(static_cast<unsigned>((size / 4 + 255) / 256), static_cast<unsigned>(count));
    repack_kernel<<<grid, 256, 0, stream>>>(rows, tiles + first * size, size);
    check_launch("repack");
  }
}

std::vector<uint8_t> repack_on_host(const MatrixView &matrix) {
  const int64_t size = static_cast<int64_t>(tile_bytes(weight_type_of(matrix.dtype), matrix.cols));
  const RawRows rows =
      raw_rows(matrix.dtype, static_cast<const uint8_t *>(matrix.data), matrix.rows, matrix.cols);
  std::vector<uint8_t> tiles(device_bytes(matrix));
  for (int64_t i = 0; i < static_cast<int64_t>(tiles.size()); ++i) {
    tiles[static_cast<size_t>(i)] = packed_byte(rows, i / size, i % size);
  }
  return tiles;
}

float tile_value_on_host(int weight_type, const uint8_t *tiles, int64_t num_cols, int64_t row,
                         int64_t col) {
  const uint8_t *tile =
      tiles + static_cast<uint64_t>(row / kTileRows) * tile_bytes(weight_type, num_cols);
  return tile_value(weight_type, tile, static_cast<int>(row % kTileRows), col, half_to_float);
}

namespace {

// p of one output and chunk (matmul_args.cuh): q of the chunk's columns, of which num_cols exist.
float chunk_on_host(int type, const uint8_t *tile, int row, int64_t first, int num_cols,
                    const int16_t *q) {
  const int g = row & 7, r8 = row >> 3;
  const uint8_t *chunk = tile + first / kChunkCols * chunk_bytes(type);
  const uint8_t *fields = chunk + row_fields_offset(type, g, r8);
  // Of `count` columns from the chunk's column `from`.
  const auto dot = [&](int from, int count, int offset) {
    int sum = 0;
    for (int k = from; k < from + count; ++k)
      sum += (tile_code(type, tile, row, first + k) - offset) * q[k];
    return sum;
  };
  const auto sum_of = [&](int block) {
    int sum = 0;
    for (int k = 32 * block; k < 32 * block + 32; ++k) sum += q[k];
    return sum;
  };
  int whole = 0, low = 0;
  if (type == kWeightQ6_K) {
    for (int h = 0; h < 16; ++h) whole += static_cast<int8_t>(fields[h]) * dot(16 * h, 16, 32);
    const float d = half_to_float(load_u16(chunk + kQ6SuperScaleOffset + g * 4 + r8 * 2));
    return d * static_cast<float>(whole);
  }
  if (type == kWeightQ4_K || type == kWeightQ5_K) {
    for (int b = 0; b < 8; ++b) {
      int scale = 0, minimum = 0;
      tile_scale_min(fields, b, &scale, &minimum);
      whole += scale * dot(32 * b, 32, 0);
      low += minimum * sum_of(b);
    }
    return std::fmaf(half_to_float(load_u16(fields)), static_cast<float>(whole),
                     -(half_to_float(load_u16(fields + 2)) * static_cast<float>(low)));
  }
  float p = 0;
  for (int b = 0; 32 * b < num_cols; ++b) {
    const TileFactors f = tile_factors(type, tile, row, first + 32 * b, half_to_float);
    p = std::fmaf(f.dw, static_cast<float>(dot(32 * b, 32, f.offset)), p);
    if (type == kWeightQ4_1 || type == kWeightQ5_1)
      p = std::fmaf(f.shift, static_cast<float>(sum_of(b)), p);
  }
  return p;
}

}  // namespace

float product_on_host(int weight_type, const uint8_t *tiles, int64_t num_cols, int64_t row,
                      const int16_t *codes, const float *scales) {
  const uint8_t *tile =
      tiles + static_cast<uint64_t>(row / kTileRows) * tile_bytes(weight_type, num_cols);
  const int num_chunks = static_cast<int>((num_cols + kChunkCols - 1) / kChunkCols);
  const int num_slices = num_slices_of(num_chunks);
  float y = 0;
  for (int slice = 0; slice < num_slices; ++slice) {
    float acc = 0;
    const int end = slice_first_chunk(slice + 1, num_slices, num_chunks);
    for (int chunk = slice_first_chunk(slice, num_slices, num_chunks); chunk < end; ++chunk) {
      const int64_t first = int64_t{chunk} * kChunkCols;
      const int cols = static_cast<int>(std::min<int64_t>(num_cols - first, kChunkCols));
      const float p = chunk_on_host(weight_type, tile, static_cast<int>(row % kTileRows), first,
                                    cols, codes + first);
      acc = std::fmaf(scales[chunk], p, acc);
    }
    y = slice == 0 ? acc : y + acc;
  }
  return y;
}

namespace {
// The inverse of k_scale_min, onto zeros.
void set_scale_min(uint8_t *scales, int s, int scale, int minimum) {
  const auto put = [&](int at, int bits) { scales[at] = static_cast<uint8_t>(scales[at] | bits); };
  if (s < 4) {
    put(s, scale);
    put(s + 4, minimum);
  } else {
    put(s + 4, (scale & 15) | (minimum & 15) << 4);
    put(s - 4, scale >> 4 << 6);
    put(s, minimum >> 4 << 6);
  }
}
}  // namespace

std::vector<uint8_t> unpack_on_host(DType dtype, const std::vector<uint8_t> &tiles,
                                    int64_t num_rows, int64_t num_cols) {
  const DTypeInfo &info = dtype_info(dtype);
  const int type = weight_type_of(dtype);
  const uint64_t row_bytes = dtype_bytes(dtype, static_cast<uint64_t>(num_cols));
  const uint64_t size = tile_bytes(type, num_cols);
  std::vector<uint8_t> raw(row_bytes * static_cast<uint64_t>(num_rows), 0);
  for (int64_t row = 0; row < num_rows; ++row) {
    const uint8_t *tile = tiles.data() + static_cast<uint64_t>(row / kTileRows) * size;
    const int r = static_cast<int>(row % kTileRows), g = r & 7, r8 = r >> 3;
    for (int64_t col = 0; col < num_cols; col += info.block_elems) {
      uint8_t *block = raw.data() + static_cast<uint64_t>(row) * row_bytes +
                       static_cast<uint64_t>(col) / info.block_elems * info.block_bytes;
      const uint8_t *chunk = tile + col / kChunkCols * chunk_bytes(type);
      const uint8_t *unit =
          chunk + col % kChunkCols / kUnitCols * (chunk_bytes(type) / kUnitsPerChunk);
      const int step = static_cast<int>(col % kUnitCols / 32);
      // Scales.
      if (type == kWeightQ6_K) {
        std::memcpy(block + 192, chunk + row_fields_offset(type, g, r8), 16);
        std::memcpy(block + 208, chunk + kQ6SuperScaleOffset + g * 4 + r8 * 2, 2);
      } else if (is_k_quant(type)) {
        const uint8_t *fields = chunk + row_fields_offset(type, g, r8);
        std::memcpy(block, fields, 4);
        for (int i = 0; i < 8; ++i) {
          int scale = 0, minimum = 0;
          tile_scale_min(fields, i, &scale, &minimum);
          set_scale_min(block + 4, i, scale, minimum);
        }
      } else if (type == kWeightQ4_1 || type == kWeightQ5_1) {
        std::memcpy(block, unit + scale_offset(type) + g * 16 + r8 * 8 + step * 4, 4);
      } else {
        std::memcpy(block, unit + scale_offset(type) + g * 8 + r8 * 4 + step * 2, 2);
      }
      // Codes: the inverse of raw_code.
      for (int e = 0; e < static_cast<int>(info.block_elems); ++e) {
        const int code = tile_code(type, tile, r, col + e);
        const int k = e % 32, nibble = 4 * (k >> 4);
        const auto put = [&](int at, int bits) {
          block[at] = static_cast<uint8_t>(block[at] | bits);
        };
        switch (type) {
          case kWeightQ4_0:
            put(2 + (k & 15), code << nibble);
            break;
          case kWeightQ4_1:
            put(4 + (k & 15), code << nibble);
            break;
          case kWeightQ5_0:
            put(6 + (k & 15), (code & 15) << nibble);
            put(2 + k / 8, code >> 4 << (k & 7));
            break;
          case kWeightQ5_1:
            put(8 + (k & 15), (code & 15) << nibble);
            put(4 + k / 8, code >> 4 << (k & 7));
            break;
          case kWeightQ8_0:
            block[2 + k] = static_cast<uint8_t>(code);
            break;
          case kWeightQ4_K:
            put(16 + e / 64 * 32 + k, code << (4 * (e / 32 & 1)));
            break;
          case kWeightQ5_K:
            put(48 + e / 64 * 32 + k, (code & 15) << (4 * (e / 32 & 1)));
            put(16 + k, code >> 4 << (e / 32));
            break;
          default: {
            const int part = e % 128 / 32;
            put(e / 128 * 64 + 32 * (part & 1) + k, (code & 15) << (4 * (part >> 1)));
            put(128 + e / 128 * 32 + k, code >> 4 << (2 * part));
          }
        }
      }
    }
  }
  return raw;
}

}  // namespace cuda
}  // namespace xllm
