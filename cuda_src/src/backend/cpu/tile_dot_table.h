// The products of interleaved weights (interleave.h), per instruction set.
#pragma once

#include "backend/cpu/kernels.h"

namespace xllm::cpu {

// Rows of activations at once, as many as fit into the set's registers (Kernels::tile_rows).
constexpr int kAvx2TileRows = 4;
constexpr int kAvx512TileRows = 8;
constexpr int kNeonTileRows = 4;

// nullptr for a type that is not interleaved.
TileFn avx2_tile_dot(DType dtype);
TileFn avx512_tile_dot(DType dtype);
TileFn neon_tile_dot(DType dtype);

}  // namespace xllm::cpu
