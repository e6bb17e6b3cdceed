// The products of quantised weights in plain C++, over the codes of block_codes.h: the truth that
// vector sets are held to.
#pragma once

#include "backend/cpu/kernels.h"

namespace xllm::cpu {

// The product of a quantised type; null for f32, f16 and bf16, which are float_dot.h.
DotFn scalar_quant_dot(DType dtype);

}  // namespace xllm::cpu
