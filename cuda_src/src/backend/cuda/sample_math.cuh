// The numbers of the sampler on the device: operation by operation those of sampling/sampler.cc and
// sampling/exp_log.h, so that a row's token is the same wherever it is chosen.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

// exp_neg of sampling/exp_log.h.
__device__ __forceinline__ double exp_neg(double x) {
  x = x > -708.0 ? x : -708.0;
  constexpr double kInvLn2 = 1.4426950408889634;
  constexpr double kLn2Hi = 6.93147180369123816490e-01;
  constexpr double kLn2Lo = 1.90821492927058770002e-10;
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = __dadd_rn(__dmul_rn(x, kInvLn2), kRound);
  const double n = __dadd_rn(shifted, -kRound);
  const double r = __dadd_rn(__dadd_rn(x, -__dmul_rn(n, kLn2Hi)), -__dmul_rn(n, kLn2Lo));
  double p = 1.0 / 6227020800.0;
  p = __dadd_rn(__dmul_rn(p, r), 1.0 / 479001600.0);
  p = __dadd_rn(__dmul_rn(p, r), 1.0 / 39916800.0);
  p = __dadd_rn(__dmul_rn(p, r), 1.0 / 3628800.0);
  p = __dadd_rn(__dmul_rn(p, r), 1.0 / 362880.0);
  p = __dadd_rn(__dmul_rn(p, r), 1.0 / 40320.0);
  p = __dadd_rn(__dmul_rn(p, r), 1.0 / 5040.0);
  p = __dadd_rn(__dmul_rn(p, r), 1.0 / 720.0);
  p = __dadd_rn(__dmul_rn(p, r), 1.0 / 120.0);
  p = __dadd_rn(__dmul_rn(p, r), 1.0 / 24.0);
  p = __dadd_rn(__dmul_rn(p, r), 1.0 / 6.0);
  p = __dadd_rn(__dmul_rn(p, r), 0.5);
  p = __dadd_rn(__dadd_rn(__dmul_rn(p, __dmul_rn(r, r)), r), 1.0);
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(shifted));
  return __dmul_rn(p, __longlong_as_double(static_cast<long long>((bits + 1023) << 52)));
}

// sampling/weight.h: a weight in (0, 1] as an integer of 44 bits behind the point.
__device__ __forceinline__ uint64_t fixed_weight(double weight) {
  const double moved = __dadd_rn(__dmul_rn(weight, 17592186044416.0), 4503599627370496.0);
  return static_cast<uint64_t>(__double_as_longlong(moved)) - 0x4330000000000000ull;
}

__device__ __forceinline__ uint64_t weight_of(float logit, float largest, float temperature) {
  return fixed_weight(
      exp_neg(__ddiv_rn(__dadd_rn(static_cast<double>(logit), -static_cast<double>(largest)),
                        static_cast<double>(temperature))));
}

// Orders as the float does, -0 and 0 equal.
__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float logit_of_key(uint32_t key) {
  return __uint_as_float(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// Ascending where the best come first: the larger logit, then the lower id.
__device__ __forceinline__ uint64_t rank_key(float logit, int id) {
  return static_cast<uint64_t>(~order_key(logit)) << 32 | static_cast<uint32_t>(id);
}
__device__ __forceinline__ float logit_of_rank(uint64_t rank) {
  return logit_of_key(~static_cast<uint32_t>(rank >> 32));
}

__device__ __forceinline__ float negative_largest() { return -3.402823466e38f; }

// Keeps what is finite finite.
__device__ __forceinline__ float clamp_logit(float x) {
  return fminf(fmaxf(x, negative_largest()), 3.402823466e38f);
}

}  // namespace cuda
}  // namespace xllm
