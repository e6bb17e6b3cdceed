// exp and log of our own: additions and multiplications in double and nothing else, so that a token
// drawn here is the same whichever C library the machine has. note: relies on being compiled
// without contraction into fma (the whole core is). Relative error below 4e-16.
#pragma once

#include <cstdint>
#include <cstring>

namespace xllm {

// e^x for x <= 0. At and below -708 (and for -infinity) it stays at e^-708, 3e-308, which no sum of
// weights notices: without a branch, a loop over it becomes vector code.
inline double exp_neg(double x) {
  x = x > -708 ? x : -708;
  // x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts so that n * hi is exact (Cody and Waite).
  constexpr double kInvLn2 = 1.4426950408889634;
  constexpr double kLn2Hi = 6.93147180369123816490e-01;
  constexpr double kLn2Lo = 1.90821492927058770002e-10;
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double shifted = x * kInvLn2 + kRound;
  const double n = shifted - kRound;
  const double r = (x - n * kLn2Hi) - n * kLn2Lo;
  // The Taylor series to r^13 / 13!: its remainder is below 2e-17 on this interval.
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  // 2^n: the low bits of `shifted` hold n, and n + 1023 is in [2, 1023].
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  double scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// ln x for finite normal x > 0.
inline double log_pos(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  // x = m 2^e with m in [sqrt(1/2), sqrt(2)).
  int64_t e = static_cast<int64_t>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffULL) | (uint64_t{1023} << 52);
  double m;
  std::memcpy(&m, &bits, sizeof m);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++e;
  }
  // ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| <= 0.172: s^25 / 25 is below 1e-20.
  const double s = (m - 1) / (m + 1);
  const double z = s * s;
  double p = 1.0 / 23.0;
  for (int k = 21; k >= 1; k -= 2) p = p * z + 1.0 / k;
  constexpr double kLn2Hi = 6.93147180369123816490e-01;
  constexpr double kLn2Lo = 1.90821492927058770002e-10;
  const double n = static_cast<double>(e);
  return n * kLn2Hi + (2 * s * p + n * kLn2Lo);
}

}  // namespace xllm
