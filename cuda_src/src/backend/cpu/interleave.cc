#include "backend/cpu/interleave.h"

#include <cstring>

#include "tensor/quant.h"

namespace xllm::cpu {
namespace {

// Where a block's lone f16 and its fifth bits lie; -1 where it has none.
struct BlockShape {
  int half;
  int fifth_bits;
};

bool find_shape(DType dtype, BlockShape *out) {
  switch (dtype) {
    case DType::kQ4_0:
    case DType::kQ8_0:
      *out = {0, -1};
      return true;
    case DType::kQ5_0:
      *out = {0, 2};
      return true;
    case DType::kQ5_1:
      *out = {-1, 4};
      return true;
    case DType::kQ6_K:
      *out = {208, -1};
      return true;
    case DType::kQ4_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
      *out = {-1, -1};
      return true;
    default:
      return false;
  }
}

// Bit 4 * g + i to bit 8 * i + g.
uint32_t permute_fifth_bits(uint32_t bits) {
  uint32_t out = 0;
  for (int g = 0; g < 8; ++g) {
    for (int i = 0; i < 4; ++i) out |= ((bits >> (4 * g + i)) & 1u) << (8 * i + g);
  }
  return out;
}

}  // namespace

bool can_interleave(DType dtype) {
  BlockShape shape;
  return find_shape(dtype, &shape);
}

uint64_t interleaved_bytes(int64_t rows, uint64_t row_bytes) {
  const int64_t tiles = (rows + kInterleavedRows - 1) / kInterleavedRows;
  return static_cast<uint64_t>(tiles) * kInterleavedRows * row_bytes;
}

void interleave_rows(DType dtype, const uint8_t *rows, uint64_t row_bytes, int num_rows, int cols,
                     uint8_t *out) {
  BlockShape shape = {-1, -1};
  find_shape(dtype, &shape);
  const DTypeInfo &info = dtype_info(dtype);
  const int block_bytes = static_cast<int>(info.block_bytes);
  const int num_blocks = cols / static_cast<int>(info.block_elems);
  const int half_bytes = shape.half >= 0 ? 2 * kInterleavedRows : 0;
  if (num_rows < kInterleavedRows) std::memset(out, 0, kInterleavedRows * row_bytes);
  for (int r = 0; r < num_rows; ++r) {
    const uint8_t *block = rows + static_cast<uint64_t>(r) * row_bytes;
    uint8_t *tile = out;
    for (int b = 0; b < num_blocks; ++b) {
      if (shape.half >= 0) std::memcpy(tile + 2 * r, block + shape.half, 2);
      uint8_t *word_out = tile + half_bytes + 4 * r;
      for (int at = shape.half == 0 ? 2 : 0; at + 4 <= block_bytes; at += 4) {
        uint32_t word;
        std::memcpy(&word, block + at, 4);
        if (at == shape.fifth_bits) word = permute_fifth_bits(word);
        std::memcpy(word_out, &word, 4);
        word_out += 4 * kInterleavedRows;
      }
      block += block_bytes;
      tile += kInterleavedRows * block_bytes;
    }
  }
}

}  // namespace xllm::cpu
