// Tiles of consecutive rows of a sequence that share keys and values in attention
// (prompt_attention.cuh), as host and device see them.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

constexpr int kPromptGroups = 4;                   // of 8 columns
constexpr int kPromptColumns = 8 * kPromptGroups;  // rows x query heads of a kv head

// Rows of a tile; below 2 there is nothing to share.
XLLM_HOST_DEVICE constexpr int prompt_tile_rows(int group_size) {
  return kPromptColumns / group_size;
}

struct PromptTile {
  int first_row, num_rows;
};
XLLM_HOST_DEVICE int32_t pack_tile(const PromptTile &tile) {
  return tile.first_row * kPromptColumns + tile.num_rows - 1;
}
XLLM_HOST_DEVICE PromptTile unpack_tile(int32_t packed) {
  return {packed / kPromptColumns, packed % kPromptColumns + 1};
}

}  // namespace cuda
}  // namespace xllm
