// Chooses and makes a backend; the only place that knows which devices exist.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace xllm {

// Same numbers as xllm_backend_kind in xllm.h.
enum class BackendKind : int { kAuto = 0, kCpu = 1, kCuda = 2 };

// Auto: CUDA where the driver shows a device and the CUDA library of this very build loads, else
// the CPU, with one log line that says why. kCuda throws Error(kDevice) with the reason and the
// remedy where that fails.
std::unique_ptr<Backend> make_backend(BackendKind kind, const BackendOptions &options);

}  // namespace xllm
