// Tiles of consecutive rows of a sequence that share keys and values in attention (prompt_wide.cuh,
// and in pieces prompt_attention.cuh), as host and device see them.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

constexpr int kPromptGroups = 4;                   // of 8 columns
constexpr int kPromptColumns = 8 * kPromptGroups;  // rows x query heads of a kv head
constexpr int kWideColumns = 64;                   // likewise, of prompt_wide.cuh

// Rows of a tile; below 2 there is nothing to share.
XLLM_HOST_DEVICE constexpr int prompt_tile_rows(int group_size) {
  return kWideColumns / group_size;
}
// Rows of a tile that prompt_attention.cuh takes at once.
XLLM_HOST_DEVICE constexpr int prompt_piece_rows(int group_size) {
  return kPromptColumns / group_size;
}
// Into how many pieces that divides a tile; group_size at most kPromptColumns.
XLLM_HOST_DEVICE constexpr int prompt_tile_pieces(int group_size) {
  return (prompt_tile_rows(group_size) + prompt_piece_rows(group_size) - 1) /
         prompt_piece_rows(group_size);
}

struct PromptTile {
  int first_row, num_rows;
};
XLLM_HOST_DEVICE int32_t pack_tile(const PromptTile &tile) {
  return tile.first_row * kWideColumns + tile.num_rows - 1;
}
XLLM_HOST_DEVICE PromptTile unpack_tile(int32_t packed) {
  return {packed / kWideColumns, packed % kWideColumns + 1};
}
// Rows piece * rows.. of a tile, `rows` at most; there may be none.
XLLM_HOST_DEVICE PromptTile piece_of(const PromptTile &tile, int piece, int rows) {
  const int left = tile.num_rows - piece * rows;
  return {tile.first_row + piece * rows, left < rows ? left : rows};
}

}  // namespace cuda
}  // namespace xllm
