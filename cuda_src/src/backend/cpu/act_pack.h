// Activations in the order in which a product with interleaved weights reads them, so that beside
// the weights it follows one stream through memory, not three for each row. A core's prefetcher
// keeps up with the weights only as long as little else misses the first cache
// (docs/perf/cpu.md).
//
// The rows of a step, each token's planes one after the other, are taken in groups of up to
// Kernels::tile_rows. A group is one PackedBlock for each 32 columns. Which groups there are
// depends on the number of rows that are left, so a piece of a step is packed as the step is if it
// begins at a multiple of tile_rows and ends at one, or at the end.
//
// Internal linkage: see lanes_scalar.h.
#pragma once

#include <cstdint>

#include "backend/cpu/kernels.h"

namespace xllm::cpu {
namespace {

// 32 columns of T rows.
template <int T>
struct PackedBlock {
  int8_t q[T][32];
  float d[T];
  float ds[T];
  int32_t whole[T];    // -sum(q), for types whose codes stand above their values
  int32_t half[2][T];  // 32 times the same of columns 0 to 15 and 16 to 31: what q6_k stands above
};

// Bytes of a row in each block.
constexpr int kPackedRowBytes = sizeof(PackedBlock<1>);
static_assert(sizeof(PackedBlock<8>) == 8 * kPackedRowBytes, "no padding");

// Rows of the next group when `left` are left. It may have place for one or two more than there
// are: computing with what lies there is cheaper than unpacking codes twice.
constexpr int packed_group(int left, int tile_rows) {
  if (tile_rows >= 8 && left >= 6) return 8;
  if (left >= 3) return 4;
  return left;
}

}  // namespace

// Rows of activations beyond those of a step that its last group may have place for.
constexpr int kPackedSpareRows = 2;

// Writes columns [first, first + count), multiples of 32, of row `row` of num_rows to `out`, where
// the rows of `cols` columns are packed.
void pack_activations(const ActRow &act, int row, int num_rows, int tile_rows, int cols, int first,
                      int count, uint8_t *out);

}  // namespace xllm::cpu
