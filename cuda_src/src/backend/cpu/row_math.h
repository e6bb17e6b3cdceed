// The f32 arithmetic of a row, written once over eight lanes L (lanes_*.h) and compiled for each
// instruction set, which is why all sets give equal bytes: sums, norm, SiLU, RoPE. kernels.h states
// the order of each. Internal linkage: see lanes_scalar.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace xllm::cpu {
namespace {

// e^x, relative error below 1.2e-7 (tested): x = n ln2 + r, then 1 + r + r^2 q(r) with q a minimax
// polynomial of our own fit over |r| <= ln2 / 2. Below -87 it is 0 and above 88 infinity, which
// keeps 2^n a normal number; exp(0) is exactly 1. NaN stays NaN.
template <typename L>
inline typename L::F exp_lanes(const typename L::F &x) {
  using F = typename L::F;
  const F low = L::set1(-87.0f), high = L::set1(88.0f);
  const F clamped = L::min(high, L::max(low, x));  // note: this order of arguments keeps a NaN
  const F shift = L::set1(12582912.0f);            // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = L::fma(clamped, L::set1(1.44269504f), shift);
  const F n = L::sub(shifted, shift);
  F r = L::fma(n, L::set1(-0.693359375f), clamped);
  r = L::fma(n, L::set1(2.12194440e-4f), r);
  F q = L::set1(0x1.6a23cep-10f);
  q = L::fma(q, r, L::set1(0x1.123a20p-7f));
  q = L::fma(q, r, L::set1(0x1.5558f2p-5f));
  q = L::fma(q, r, L::set1(0x1.555492p-3f));
  q = L::fma(q, r, L::set1(0x1.fffffcp-2f));
  const F p = L::add(L::fma(q, L::mul(r, r), r), L::set1(1.0f));
  F result = L::mul(p, L::pow2_of_shifted(shifted));
  result = L::select_less(x, low, L::zero(), result);
  return L::select_less(high, x, L::set1(HUGE_VALF), result);
}

// Eight elements from i, those at n and beyond as zero.
template <typename L>
inline typename L::F load_tail(const float *p, int i, int n) {
  float padded[8] = {};
  if (i < n) std::memcpy(padded, p + i, static_cast<size_t>(n - i < 8 ? n - i : 8) * sizeof(float));
  return L::load(padded);
}

template <typename L>
inline void store_tail(float *p, int i, int n, const typename L::F &a) {
  float whole[8];
  L::store(whole, a);
  std::memcpy(p + i, whole, static_cast<size_t>(n - i) * sizeof(float));
}

template <typename L>
inline float sum_of_squares(const float *x, int n) {
  using F = typename L::F;
  F low = L::zero(), high = L::zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const F a = L::load(x + i), b = L::load(x + i + 8);
    low = L::fma(a, a, low);
    high = L::fma(b, b, high);
  }
  if (i < n) {
    const F a = load_tail<L>(x, i, n), b = load_tail<L>(x, i + 8, n);
    low = L::fma(a, a, low);
    high = L::fma(b, b, high);
  }
  return L::sum(L::add(low, high));
}

template <typename L>
inline void remainder_row(const float *f, int cols, const int8_t *q, const float *d, float *out) {
  using F = typename L::F;
  for (int i = 0; i < cols; i += 8) {
    const F scale = L::sub(L::zero(), L::set1(d[i / 32]));
    L::store(out + i, L::fma(scale, L::load_int8(q + i), L::load(f + i)));
  }
}

template <typename L>
inline void rms_norm_row(const float *x, const float *weight, int n, float eps, float *out) {
  using F = typename L::F;
  const float mean = sum_of_squares<L>(x, n) / static_cast<float>(n);
  const F inverse = L::set1(1.0f / std::sqrt(mean + eps));
  int i = 0;
  for (; i + 8 <= n; i += 8)
    L::store(out + i, L::mul(L::mul(L::load(x + i), inverse), L::load(weight + i)));
  if (i < n)
    store_tail<L>(out, i, n,
                  L::mul(L::mul(load_tail<L>(x, i, n), inverse), load_tail<L>(weight, i, n)));
}

template <typename L>
inline typename L::F silu_mul_lanes(const typename L::F &gate, const typename L::F &up) {
  const typename L::F one = L::set1(1.0f);
  return L::mul(L::div(gate, L::add(one, exp_lanes<L>(L::sub(L::zero(), gate)))), up);
}

template <typename L>
inline void silu_mul_row(const float *gate, const float *up, int n, float *out) {
  int i = 0;
  for (; i + 8 <= n; i += 8)
    L::store(out + i, silu_mul_lanes<L>(L::load(gate + i), L::load(up + i)));
  if (i < n)
    store_tail<L>(out, i, n, silu_mul_lanes<L>(load_tail<L>(gate, i, n), load_tail<L>(up, i, n)));
}

template <typename L>
inline void add_row(float *x, const float *y, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) L::store(x + i, L::add(L::load(x + i), L::load(y + i)));
  for (; i < n; ++i) x[i] += y[i];
}

template <typename L>
inline void rope_row(float *head, const float *cos_sin, int rotary_dim, bool is_neighbor) {
  const int half = rotary_dim / 2;
  const int step = is_neighbor ? 2 : 1, distance = is_neighbor ? 1 : half;
  for (int i = 0; i < half; ++i) {
    float *p = head + i * step;
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    const float x = p[0], y = p[distance];
    p[0] = std::fma(x, c, -(y * s));
    p[distance] = std::fma(y, c, x * s);
  }
}

}  // namespace
}  // namespace xllm::cpu
