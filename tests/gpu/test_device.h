// The Device that launchers want, as CudaBackend finds it, and a stream of the check's own.
#pragma once

#include "backend/cuda/cuda_backend.h"

namespace xllm::check {

inline cuda::Device test_device() {
  const cuda::CudaBackend backend{BackendOptions()};
  return const_cast<cuda::CudaBackend &>(backend).device();
}

inline cudaStream_t test_stream() {
  static const cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    cuda::check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "create a stream");
    return made;
  }();
  return stream;
}

}  // namespace xllm::check
