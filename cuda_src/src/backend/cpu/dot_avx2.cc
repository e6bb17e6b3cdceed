#include "backend/cpu/dot_avx2.h"

namespace xllm::cpu {

DotFn avx2_quant_dot(DType /*dtype*/) { return nullptr; }

}  // namespace xllm::cpu
