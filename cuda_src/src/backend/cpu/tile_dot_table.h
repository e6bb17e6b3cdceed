// The products of interleaved weights (interleave.h), per instruction set.
#pragma once

#include "backend/cpu/kernels.h"

namespace xllm::cpu {

// nullptr for a type that is not interleaved.
TileFn avx2_tile_dot(DType dtype);
TileFn avx512_tile_dot(DType dtype);
TileFn neon_tile_dot(DType dtype);

}  // namespace xllm::cpu
