// Which instruction set computes: chosen once, when a backend is made.
#pragma once

#include <string>

#include "backend/cpu/kernels.h"

namespace xllm::cpu {

// The kernels of `name` ("scalar", "avx2", "avx512", "neon"), or of the best set that this CPU has
// when it is empty. Throws Error(kInvalidArgument) for a name that this build does not know and for
// a set that the CPU lacks.
const Kernels &choose_kernels(const std::string &name);

}  // namespace xllm::cpu
