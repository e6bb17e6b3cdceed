// wgmma (sm_90a): products of a warp group of four warps, done later than they are asked for.
#pragma once

#include "backend/cuda/device_utils.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define XLLM_HAS_WGMMA 1
#endif

namespace xllm {
namespace cuda {

__device__ __forceinline__ void wgmma_fence() {
#ifdef XLLM_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#ifdef XLLM_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#ifdef XLLM_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace cuda
}  // namespace xllm
