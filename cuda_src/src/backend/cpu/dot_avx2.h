// The products of quantised weights with AVX2. No inline code: this header is read by files of
// other instruction sets too.
#pragma once

#include "backend/cpu/kernels.h"

namespace xllm::cpu {

// The product of a quantised type, or null for one that AVX2 has no kernel for.
DotFn avx2_quant_dot(DType dtype);

}  // namespace xllm::cpu
