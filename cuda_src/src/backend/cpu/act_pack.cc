#include "backend/cpu/act_pack.h"

#include <cstring>

namespace xllm::cpu {

void pack_activations(const ActRow &act, int row, int num_rows, int tile_rows, int cols, int first,
                      int count, uint8_t *out) {
  int start = row / tile_rows * tile_rows;  // of the row's group
  int width = packed_group(num_rows - start, tile_rows);
  while (row >= start + width) {
    start += width;
    width = packed_group(num_rows - start, tile_rows);
  }
  const auto w = static_cast<uint64_t>(width), i = static_cast<uint64_t>(row - start);
  const uint64_t block_bytes = w * kPackedRowBytes;
  const auto first_block = static_cast<uint64_t>(first / 32);
  uint8_t *block =
      out + static_cast<uint64_t>(start) * static_cast<uint64_t>(cols / 32) * kPackedRowBytes +
      first_block * block_bytes;
  for (int a = first / 32; a < (first + count) / 32; ++a, block += block_bytes) {
    // PackedBlock<width>, whose arrays follow one another.
    const int32_t sums[2] = {-act.sum[2 * a], -act.sum[2 * a + 1]};
    const int32_t whole = sums[0] + sums[1], halves[2] = {32 * sums[0], 32 * sums[1]};
    std::memcpy(block + 32 * i, act.q + 32 * a, 32);
    std::memcpy(block + 32 * w + 4 * i, act.d + a, 4);
    std::memcpy(block + 36 * w + 4 * i, act.ds + a, 4);
    std::memcpy(block + 40 * w + 4 * i, &whole, 4);
    std::memcpy(block + 44 * w + 4 * i, &halves[0], 4);
    std::memcpy(block + 48 * w + 4 * i, &halves[1], 4);
  }
}

}  // namespace xllm::cpu
