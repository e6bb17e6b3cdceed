// Every return code of the CUDA runtime becomes an Error(kDevice) that names the call; running out
// of memory becomes Error(kMemory).
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "base/error.h"

namespace xllm {
namespace cuda {

// Throws unless `result` is cudaSuccess. `what` says what was being done ("copy weights").
inline void check(cudaError_t result, const char *what) {
  if (result == cudaSuccess) return;
  (void)cudaGetLastError();  // note: a sticky error stays; any other must not be reported twice
  throw Error(Status::kDevice,
              std::string("CUDA: ") + what + " failed: " + cudaGetErrorString(result) + " (" +
                  cudaGetErrorName(result) + ")",
              {{"cuda_error", cudaGetErrorName(result)}});
}

// After each launch: what the launch itself reports. What happens while it runs shows up in a later
// call on the stream.
inline void check_launch(const char *kernel) { check(cudaGetLastError(), kernel); }

}  // namespace cuda
}  // namespace xllm
