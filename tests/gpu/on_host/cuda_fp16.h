// What device headers ask of CUDA, on the host: one CTA at a time, its threads as fibers of one
// thread (cta.h), so that a kernel's own source runs where there is no GPU. Slow, and right: the
// paths below sm_75 of device_utils.cuh, where tensor products are sums of products.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local  // one per CTA: all its fibers are one thread

using std::max;
using std::min;

struct Index3 {
  unsigned x, y, z;
};
extern Index3 threadIdx, blockIdx, gridDim;

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};
inline float __half2float(__half h) { return static_cast<float>(same_bits<_Float16>(h.bits)); }
inline __half __float2half_rn(float x) { return {same_bits<uint16_t>(static_cast<_Float16>(x))}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a)));
}
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i)
    c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  return c;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i)
    r |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return r;
}

#define XLLM_ON_HOST
void sync_some_on_host(int index, int threads);
void __syncthreads();
void __syncwarp();
inline void __threadfence() {}
template <typename T>
T __ldcg(const T *p) {
  return *p;
}
inline int atomicAdd(int *p, int v) {
  const int before = *p;
  *p += v;
  return before;
}

uint64_t exchange_in_warp(uint64_t mine, int source);
template <typename T>
T __shfl_sync(unsigned, T v, int source) {
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof v);
  bits = exchange_in_warp(bits, source);
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T v, int offset) {
  return __shfl_sync(mask, v, static_cast<int>(threadIdx.x & 31) ^ offset);
}
