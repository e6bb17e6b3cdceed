// Which kernel of attention takes which rows of a step: tiles of consecutive rows where a sequence
// has several (prompt_attention.cuh), rows by themselves where it has one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/attention_splits.cuh"
#include "backend/cuda/prompt_tile.cuh"

namespace xllm::cuda {

// Consecutive rows of one kind. num_tiles 0: rows by themselves.
struct RowRun {
  int first_row, num_rows;
  int first_tile, num_tiles;
};

struct PromptTiles {
  std::vector<PromptTile> tiles;
  std::vector<RowRun> runs;

  // All rows by themselves.
  void set_plain(int num_rows) {
    tiles.clear();
    runs.assign(1, {0, num_rows, 0, 0});
  }

  // tile_rows: at most, for a tile. Rows of a tile cut their keys at the same places.
  void set(const ForwardBatch &batch, int tile_rows) {
    tiles.clear();
    runs.clear();
    for (size_t s = 0; s + 1 < batch.query_start.size(); ++s) {
      const int first = batch.query_start[s], end = batch.query_start[s + 1];
      if (first == end) continue;
      const bool is_tiled = end - first > 1;
      if (runs.empty() || (runs.back().num_tiles > 0) != is_tiled)
        runs.push_back({first, 0, static_cast<int>(tiles.size()), 0});
      runs.back().num_rows += end - first;
      for (int row = first; is_tiled && row < end;) {
        const int shift = shift_of(batch, row);
        PromptTile tile = {row, 1};
        while (tile.num_rows < tile_rows && row + tile.num_rows < end &&
               shift_of(batch, row + tile.num_rows) == shift) {
          ++tile.num_rows;
        }
        tiles.push_back(tile);
        ++runs.back().num_tiles;
        row += tile.num_rows;
      }
    }
  }

 private:
  static int shift_of(const ForwardBatch &batch, int row) {
    return split_shift(batch.positions[static_cast<size_t>(row)] + 1);
  }
};

}  // namespace xllm::cuda
