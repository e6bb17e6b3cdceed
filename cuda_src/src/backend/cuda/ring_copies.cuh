// Copies of chunks of weights into a warp's ring in shared memory: asked for by the warp, counted
// by a barrier in shared memory per stage. One bulk copy per chunk on sm_90; 16-byte copies by all
// lanes on sm_80.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

// ---- barriers in shared memory (mbarrier, sm_80 and up) ----

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

// Of a warp, after __syncwarp(): one arrival stands for all lanes, because what they read and wrote
// comes before it. racecheck counts for a thread what it did itself and nothing else, so in a build
// for it (XLLM_RACECHECK) every lane arrives.
#ifdef XLLM_RACECHECK
constexpr int kWarpArrivals = kWarp;
#else
constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ void arrive_warp(uint64_t *barrier, int lane) {
  if (lane < kWarpArrivals) arrive(barrier);
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

// ---- copies ----

// Arrivals that complete a phase of a stage's barrier.
__device__ __forceinline__ constexpr int stage_arrivals() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return 1;
#else
  return kWarp;
#endif
}

// Asks for `bytes` (a multiple of 16; both pointers aligned to 16), by a whole warp that is done
// with what the stage held (and has called __syncwarp since).
__device__ __forceinline__ void copy_chunk(uint8_t *stage, const uint8_t *from, int bytes,
                                           uint64_t *barrier, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (lane == 0) {
    const uint32_t address = shared_address(barrier);
    asm volatile(
        "{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n\t}" ::"r"(
            address),
        "r"(bytes)
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(stage)),
        "l"(from), "r"(bytes), "r"(address)
        : "memory");
  }
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  for (int i = lane * 16; i < bytes; i += kWarp * 16) copy_async_16(stage + i, from + i);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

}  // namespace cuda
}  // namespace xllm
