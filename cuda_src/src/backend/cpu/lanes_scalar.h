// Eight f32 lanes in plain C++: what row_math.h and its like compute with where there is no vector
// set, and the definition of every operation for those that have one (lanes_avx2.h). Internal
// linkage, as in every lanes_*.h: an inline function that was compiled for one instruction set must
// not answer for another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/half.h"

namespace xllm::cpu {
namespace {

struct LanesScalar {
  struct F {
    float v[8];
  };

  template <typename Op>
  static F map(Op op) {
    F out;
    for (int i = 0; i < 8; ++i) out.v[i] = op(i);
    return out;
  }

  static F zero() { return F{}; }
  static F set1(float x) {
    return map([&](int) { return x; });
  }
  static F load(const float *p) {
    return map([&](int i) { return p[i]; });
  }
  static F load_half(const uint16_t *p) {
    return map([&](int i) { return half_to_float(p[i]); });
  }
  static F load_bfloat(const uint16_t *p) {
    return map([&](int i) { return bfloat16_to_float(p[i]); });
  }
  static F load_int8(const int8_t *p) {
    return map([&](int i) { return static_cast<float>(p[i]); });
  }
  // Eight codes of four bits, the even ones in the low nibbles, each 8 above its value.
  static F load_int4(const uint8_t *p) {
    return map([&](int i) { return static_cast<float>(((p[i / 2] >> (4 * (i % 2))) & 15) - 8); });
  }
  static void store(float *p, const F &a) { std::memcpy(p, a.v, sizeof a.v); }
  static void store_half(uint16_t *p, const F &a) {
    for (int i = 0; i < 8; ++i) p[i] = float_to_half(a.v[i]);
  }

  static F add(const F &a, const F &b) {
    return map([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F sub(const F &a, const F &b) {
    return map([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F mul(const F &a, const F &b) {
    return map([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F div(const F &a, const F &b) {
    return map([&](int i) { return a.v[i] / b.v[i]; });
  }
  static F fma(const F &a, const F &b, const F &c) {
    return map([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
  }
  // a where a > b, else b: a NaN in a is dropped, one in b is kept.
  static F max(const F &a, const F &b) {
    return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F min(const F &a, const F &b) {
    return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  // a < b ? yes : no, per lane.
  static F select_less(const F &a, const F &b, const F &yes, const F &no) {
    return map([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
  }
  // 2^n from the bits of n + 1.5 * 2^23, n an integer in -126..127.
  static F pow2_of_shifted(const F &shifted) {
    return map(
        [&](int i) { return float_from_bits((float_bits(shifted.v[i]) << 23) + 0x3f800000u); });
  }
  // ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
  static float sum(const F &a) {
    return ((a.v[0] + a.v[1]) + (a.v[2] + a.v[3])) + ((a.v[4] + a.v[5]) + (a.v[6] + a.v[7]));
  }
  // The sums of eight vectors.
  static F sums(const F a[8]) {
    return map([&](int i) { return sum(a[i]); });
  }
  static float max_lane(const F &a) {
    float out = a.v[0];
    for (int i = 1; i < 8; ++i) out = out > a.v[i] ? out : a.v[i];
    return out;
  }
};

}  // namespace
}  // namespace xllm::cpu
