// Barriers in shared memory, by which copies are counted and warps wait for one another.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void init_barrier(uint64_t *barrier, int arrivals) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
#endif
}

// After init_barrier, by the thread that called it, before anybody else knows of the barrier.
__device__ __forceinline__ void publish_barriers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// What this thread wrote before is there for who waits.
__device__ __forceinline__ void arrive(uint64_t *barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(
                   shared_address(barrier))
               : "memory");
#endif
}

// Until the phase of this parity is complete: 0 for the first, then 1, 0, ...
__device__ __forceinline__ void wait_for_phase(uint64_t *barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t address = shared_address(barrier);
  uint32_t done = 0;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
#if __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n\t"
#else
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n\t"
#endif
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  } while (done == 0);
#endif
}

// Arrivals that complete a phase of a stage's barrier.
__device__ __forceinline__ constexpr int stage_arrivals() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return 1;
#else
  return kWarp;
#endif
}

}  // namespace cuda
}  // namespace xllm
