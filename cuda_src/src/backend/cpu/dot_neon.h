// The products of quantised weights with NEON. No inline code: this header is read by files of
// other instruction sets too.
#pragma once

#include "backend/cpu/kernels.h"

namespace xllm::cpu {

// The product of a quantised type that is not interleaved, or null for any other: the interleaved
// ones are never read in the file's order where there are tiles for them.
DotFn neon_quant_dot(DType dtype);

}  // namespace xllm::cpu
