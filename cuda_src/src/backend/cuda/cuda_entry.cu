#include <cstdio>
#include <cstring>
#include <memory>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_entry.h"
#include "build_info.h"

namespace {

void say(char *message, uint64_t size, const char *text) {
  if (message != nullptr && size > 0) std::snprintf(message, size, "%s", text);
}

}  // namespace

int xllm_cuda_backend_create(uint32_t abi, const char *build_id,
                             const xllm::BackendOptions *options, xllm::Backend **out,
                             char *message, uint64_t message_size) {
  using xllm::Status;
  if (abi != xllm::kBackendAbi || build_id == nullptr ||
      std::strcmp(build_id, XLLM_BUILD_ID) != 0) {
    say(message, message_size,
        "the CUDA library and the core come from different builds; install both from one");
    return static_cast<int>(Status::kDevice);
  }
  try {
    *out = std::make_unique<xllm::cuda::CudaBackend>(*options).release();
    return static_cast<int>(Status::kOk);
  } catch (const xllm::Error &error) {
    say(message, message_size, error.what());
    return static_cast<int>(error.status());
  } catch (const std::exception &error) {
    say(message, message_size, error.what());
    return static_cast<int>(Status::kInternal);
  } catch (...) {
    say(message, message_size, "unknown error");
    return static_cast<int>(Status::kInternal);
  }
}
