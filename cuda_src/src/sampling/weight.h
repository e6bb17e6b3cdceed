// Weights of tokens as integers: exact sums, whatever the order of additions, so that a token drawn
// by threads of a CPU or of a GPU (cuda/sample_math.cuh) is the same.
#pragma once

#include <cstdint>
#include <cstring>

#include "sampling/exp_log.h"

namespace xllm {

// The best token's weight is 2^44: 2^18 tokens of that weight sum to less than 2^63, and what is
// rounded to 0 is less than 3e-14 of the best.
constexpr double kUnitWeight = 17592186044416.0;  // 2^44

// round(weight * 2^44) for 0 <= weight <= 1. Adding 2^52 leaves the integer in the low bits:
// without a conversion, a loop over it becomes vector code.
inline uint64_t fixed_weight(double weight) {
  const double moved = weight * kUnitWeight + 4503599627370496.0;  // 2^52
  uint64_t bits;
  std::memcpy(&bits, &moved, sizeof bits);
  return bits - 0x4330000000000000ULL;
}

// exp((logit - largest) / temperature); 0 for what is forbidden.
inline uint64_t weight_of(float logit, float largest, double temperature) {
  return fixed_weight(exp_neg((static_cast<double>(logit) - largest) / temperature));
}

// floor(random / 2^64 * total): below total, and each value as often as any other.
inline uint64_t scaled(uint64_t random, uint64_t total) {
  const uint64_t low = 0xffffffffULL;
  const uint64_t a = random >> 32, b = random & low, c = total >> 32, d = total & low;
  const uint64_t middle = a * d + (b * d >> 32);  // no carry: at most (2^32 - 1) * 2^32
  const uint64_t other = b * c + (middle & low);
  return a * c + (middle >> 32) + (other >> 32);
}

}  // namespace xllm
