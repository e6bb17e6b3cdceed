// PTX in plain words, and the few reductions and functions whose order of operations defines the
// numbers. Device code only; no host header, so that NVRTC can compile it.
#pragma once

#include <cuda_fp16.h>

#include "tensor/quant.h"

#ifdef __CUDACC_RTC__
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint64_t = unsigned long long;
#endif

#ifdef __CUDACC__
#define XLLM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define XLLM_HOST_DEVICE inline
#endif

namespace xllm {
namespace cuda {

constexpr int kWarp = 32;

// ---- launch dependencies (programmatic dependent launch; nothing below sm_90) ----

// Returns when every kernel launched before this one has finished and its writes are visible.
// Before it, a kernel may read weights and other constants only. note: every CTA of every kernel
// calls it, or the order would not carry over to the next kernel but one.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as all CTAs of this one have called it (or ended) and there is
// room. Kernels that stream no weights call it first thing: then the product after them has its
// first weights in shared memory by the time they are done.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Barrier `index` of the CTA, 1 to 15, among `threads` threads: whole warps. 0 is __syncthreads'.
__device__ __forceinline__ void sync_some(int index, int threads) {
#if defined(__CUDA_ARCH__)
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
#elif defined(XLLM_ON_HOST)
  sync_some_on_host(index, threads);
#endif
}

// ---- memory ----

// 16 bytes to shared memory, past L1, without a register; a plain copy below sm_80. Both pointers
// aligned to 16.
__device__ __forceinline__ void copy_async_16(void *shared, const void *global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(global)
               : "memory");
#else
  *static_cast<uint4 *>(shared) = *static_cast<const uint4 *>(global);
#endif
}

// The same for 8 bytes, aligned to 8.
__device__ __forceinline__ void copy_async_8(void *shared, const void *global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(global) : "memory");
#else
  *static_cast<uint2 *>(shared) = *static_cast<const uint2 *>(global);
#endif
}

// 4 bytes, or zeros where has_source is false; `global` is readable either way.
__device__ __forceinline__ void copy_async_4_or_zero(void *shared, const void *global,
                                                     bool has_source) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(global),
               "r"(has_source ? 4 : 0)
               : "memory");
#else
  *static_cast<uint32_t *>(shared) = has_source ? *static_cast<const uint32_t *>(global) : 0u;
#endif
}

// copy_async_16, or 16 bytes of zeros where has_source is false; `global` is readable either way.
__device__ __forceinline__ void copy_async_16_or_zero(void *shared, const void *global,
                                                      bool has_source) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
               "r"(has_source ? 16 : 0)
               : "memory");
#else
  *static_cast<uint4 *>(shared) =
      has_source ? *static_cast<const uint4 *>(global) : make_uint4(0, 0, 0, 0);
#endif
}

__device__ __forceinline__ void commit_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of the groups that this thread committed are still on their way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// 16 bytes that are read once (weights): not kept in L1.
__device__ __forceinline__ uint4 load_once_16(const void *global) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global));
  return v;
#else
  return *static_cast<const uint4 *>(global);
#endif
}

// ---- tensor cores ----

// d = a * b + c, int8 [16, 32] x [32, 8]. Lane 4g + t holds a: rows g, g + 8 at k = 4t.. and k = 16
// + 4t.. (order: (g, lo), (g + 8, lo), (g, hi), (g + 8, hi)); b: column g at k = 4t.. and 16 +
// 4t..; c, d: rows g, g, g + 8, g + 8 at columns 2t, 2t + 1. sm_80 and up.
__device__ __forceinline__ void mma_s8_k32(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1, const int (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
#endif
}

// The same with unsigned bytes in a.
__device__ __forceinline__ void mma_u8_k32(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1, const int (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
#endif
}

// int8 over 16 of the k: a holds (g, 4t..), (g + 8, 4t..), b column g at 4t...
__device__ __forceinline__ void mma_s8_k16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0,
                                           const int (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, "
      "%9, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b0), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#endif
}

// d += a * b.
__device__ __forceinline__ void mma_s8_k32(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) {
  mma_s8_k32(d, a, b0, b1, d);
}
__device__ __forceinline__ void mma_u8_k32(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) {
  mma_u8_k32(d, a, b0, b1, d);
}
__device__ __forceinline__ void mma_s8_k16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  mma_s8_k16(d, a0, a1, b0, d);
}

// d += a * b, f16 [16, 16] x [16, 8] into f32. Lane 4g + t holds a: (g, 2t..), (g + 8, 2t..), (g,
// 2t + 8..), (g + 8, 2t + 8..); b: column g at k = 2t.., 2t + 8..; d as above. Below sm_80 the warp
// computes the same product with shuffles: slow, and right.
__device__ __forceinline__ void mma_f16_k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int t = lane & 3;
#pragma unroll 1
  for (int k4 = 0; k4 < 4; ++k4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int source = (lane & ~3) | k4;
      const uint32_t row0 = __shfl_sync(0xffffffffu, a[2 * half], source);
      const uint32_t row1 = __shfl_sync(0xffffffffu, a[2 * half + 1], source);
      const uint32_t b = half == 0 ? b0 : b1;
      const uint32_t col0 = __shfl_sync(0xffffffffu, b, 8 * t + k4);
      const uint32_t col1 = __shfl_sync(0xffffffffu, b, 8 * t + 4 + k4);
      const float2 r0 = __half22float2(*reinterpret_cast<const __half2 *>(&row0));
      const float2 r1 = __half22float2(*reinterpret_cast<const __half2 *>(&row1));
      const float2 c0 = __half22float2(*reinterpret_cast<const __half2 *>(&col0));
      const float2 c1 = __half22float2(*reinterpret_cast<const __half2 *>(&col1));
      d[0] = __fmaf_rn(r0.y, c0.y, __fmaf_rn(r0.x, c0.x, d[0]));
      d[1] = __fmaf_rn(r0.y, c1.y, __fmaf_rn(r0.x, c1.x, d[1]));
      d[2] = __fmaf_rn(r1.y, c0.y, __fmaf_rn(r1.x, c0.x, d[2]));
      d[3] = __fmaf_rn(r1.y, c1.y, __fmaf_rn(r1.x, c1.x, d[3]));
    }
  }
#endif
}

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane l brings the address of row l % 8
// of matrix l / 8, 16 bytes each, and lane 4g + t receives of matrix i row g, columns 2t and 2t +
// 1, in r[i].
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void *row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
#else
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto from = reinterpret_cast<const uint32_t *>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), 8 * i + (lane >> 2)));
    r[i] = from[lane & 3];
  }
#endif
}

// The same, each matrix transposed: column g, rows 2t and 2t + 1.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void *row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
#else
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto mine = reinterpret_cast<unsigned long long>(row);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int source = 8 * i + 2 * (lane & 3);
    const auto low =
        reinterpret_cast<const unsigned short *>(__shfl_sync(0xffffffffu, mine, source));
    const auto high =
        reinterpret_cast<const unsigned short *>(__shfl_sync(0xffffffffu, mine, source + 1));
    r[i] = low[lane >> 2] | static_cast<uint32_t>(high[lane >> 2]) << 16;
  }
#endif
}

// Two of them, lanes 0 to 15 bring the addresses.
__device__ __forceinline__ void load_two_matrices_transposed(uint32_t (&r)[2], const void *row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
#else
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto mine = reinterpret_cast<unsigned long long>(row);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int source = 8 * i + 2 * (lane & 3);
    const auto low =
        reinterpret_cast<const unsigned short *>(__shfl_sync(0xffffffffu, mine, source));
    const auto high =
        reinterpret_cast<const unsigned short *>(__shfl_sync(0xffffffffu, mine, source + 1));
    r[i] = low[lane >> 2] | static_cast<uint32_t>(high[lane >> 2]) << 16;
  }
#endif
}

// An 8 x 8 matrix of 16-bit elements across the warp, transposed: from row g, columns 2t and 2t + 1
// in lane 4g + t to column g, rows 2t and 2t + 1.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
#else
  const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
  const uint32_t low = __shfl_sync(0xffffffffu, v, 8 * t + (g >> 1));
  const uint32_t high = __shfl_sync(0xffffffffu, v, 8 * t + 4 + (g >> 1));
  return __byte_perm(low, high, (g & 1) == 0 ? 0x5410 : 0x7632);
#endif
}

// acc + the dot product of four pairs, b int8, a int8 or u8.
template <bool kUnsigned>
__device__ __forceinline__ int dot4(uint32_t a, uint32_t b, int acc) {
  if constexpr (kUnsigned) {
#ifdef __CUDA_ARCH__
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(acc));
    return d;
#else
    for (int i = 0; i < 32; i += 8)
      acc += static_cast<int>(a >> i & 255) * static_cast<int8_t>(b >> i);
    return acc;
#endif
  } else {
    return __dp4a(static_cast<int>(a), static_cast<int>(b), acc);
  }
}

// ---- reductions in a fixed order ----

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

__device__ __forceinline__ int warp_sum(int v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, v);
#else
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
#endif
}

__device__ __forceinline__ uint32_t warp_max(uint32_t v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, v);
#else
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    v = max(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
#endif
}

// Sum over a CTA of kThreads threads, the same value in each; `shared` holds kThreads / 32 floats.
// Syncs before and after use.
template <int kThreads>
__device__ __forceinline__ float block_sum(float v, float *shared) {
  constexpr int kWarps = kThreads / kWarp;
  v = warp_sum(v);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  float total = static_cast<int>(threadIdx.x & 31) < kWarps ? shared[threadIdx.x & 31] : 0.0f;
  total = warp_sum(total);
  __syncthreads();
  return total;
}

// ---- functions ----

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

// e^x with the same bits on every GPU: Cody-Waite reduction and a degree-6 polynomial, within 2
// ulp; 0 below -87.3, NaN kept.
__device__ __forceinline__ float exp_f32(float x) {
  if (x < -87.3f) return 0.0f;
  x = x > 88.0f ? 88.0f : x;
  const float n = rintf(__fmul_rn(x, 1.44269504f));
  float r = __fmaf_rn(n, -0.693145752f, x);
  r = __fmaf_rn(n, -1.42860677e-6f, r);
  float p = 1.38888889e-3f;
  p = __fmaf_rn(p, r, 8.33333377e-3f);
  p = __fmaf_rn(p, r, 4.16666679e-2f);
  p = __fmaf_rn(p, r, 1.66666672e-1f);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  return __fmul_rn(p, __int_as_float((static_cast<int>(n) + 127) << 23));
}

// x * sigmoid(x).
__device__ __forceinline__ float silu(float x) {
  return __fdiv_rn(x, __fadd_rn(1.0f, exp_f32(-x)));
}

}  // namespace cuda
}  // namespace xllm
