// Products with f32, f16 and bf16 weights over eight lanes L: R rows by T tokens at a time, each
// with its 16 partial sums. Internal linkage: see lanes_scalar.h.
//
// f32 weights are what per-slot decoding computes with, the accuracy reference: there the rounding
// errors of products and sums are carried along (Ogita, Rump, Oishi, "Accurate sum and dot
// product", 2005, algorithm Dot2), so that a product is as good as one in twice the precision.
// Plain f32 sums are not enough: a model has positions that enlarge an error a hundred times.
#pragma once

#include <cstdint>
#include <cstring>

#include "backend/cpu/kernels.h"

namespace xllm::cpu {
namespace {

// How eight weights of a type become lanes.
template <typename L>
struct F32Weights {
  using Element = float;
  static constexpr bool kCompensated = true;
  static typename L::F load(const float *p) { return L::load(p); }
};
template <typename L>
struct F16Weights {
  using Element = uint16_t;
  static constexpr bool kCompensated = false;
  static typename L::F load(const uint16_t *p) { return L::load_half(p); }
};
template <typename L>
struct BF16Weights {
  using Element = uint16_t;
  static constexpr bool kCompensated = false;
  static typename L::F load(const uint16_t *p) { return L::load_bfloat(p); }
};

// Eight partial sums. Compensated: with what their additions and products have lost.
template <typename L, bool kCompensated>
struct PartialSums {
  typename L::F value = L::zero();
  void add_product(typename L::F w, typename L::F a) { value = L::fma(w, a, value); }
};
template <typename L>
struct PartialSums<L, true> {
  using F = typename L::F;
  F value = L::zero(), lost = L::zero();
  void add_product(F w, F a) {
    const F product = L::mul(w, a);
    const F product_lost = L::fma(w, a, L::sub(L::zero(), product));
    const F sum = L::add(value, product);
    const F taken = L::sub(sum, value);
    const F sum_lost = L::add(L::sub(value, L::sub(sum, taken)), L::sub(product, taken));
    value = sum;
    lost = L::add(lost, L::add(sum_lost, product_lost));
  }
};

template <typename L>
inline float total(const PartialSums<L, false> &low, const PartialSums<L, false> &high) {
  return L::sum(L::add(low.value, high.value));
}
template <typename L>
inline float total(const PartialSums<L, true> &low, const PartialSums<L, true> &high) {
  float value[16], lost[16];
  L::store(value, low.value);
  L::store(value + 8, high.value);
  L::store(lost, low.lost);
  L::store(lost + 8, high.lost);
  double sum = 0;
  for (int i = 0; i < 16; ++i) sum += static_cast<double>(value[i]) + static_cast<double>(lost[i]);
  return static_cast<float>(sum);
}

template <typename L, typename W, int R, int T>
inline void float_dot_tile(const uint8_t *weights, uint64_t row_bytes, const ActRow *acts, int cols,
                           float *out, int64_t out_stride) {
  using F = typename L::F;
  using Element = typename W::Element;
  PartialSums<L, W::kCompensated> low[R][T], high[R][T];
  const auto row = [&](int r) {
    return reinterpret_cast<const Element *>(weights + static_cast<uint64_t>(r) * row_bytes);
  };
  int i = 0;
  for (; i + 16 <= cols; i += 16) {
    F a[T], b[T];
    for (int t = 0; t < T; ++t) {
      a[t] = L::load(acts[t].f + i);
      b[t] = L::load(acts[t].f + i + 8);
    }
    for (int r = 0; r < R; ++r) {
      const F w = W::load(row(r) + i), w8 = W::load(row(r) + i + 8);
      for (int t = 0; t < T; ++t) {
        low[r][t].add_product(w, a[t]);
        high[r][t].add_product(w8, b[t]);
      }
    }
  }
  if (i < cols) {
    const size_t rest = static_cast<size_t>(cols - i);
    for (int r = 0; r < R; ++r) {
      Element w[16] = {};
      std::memcpy(w, row(r) + i, rest * sizeof(Element));
      for (int t = 0; t < T; ++t) {
        float a[16] = {};
        std::memcpy(a, acts[t].f + i, rest * sizeof(float));
        low[r][t].add_product(W::load(w), L::load(a));
        high[r][t].add_product(W::load(w + 8), L::load(a + 8));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) out[t * out_stride + r] = total<L>(low[r][t], high[r][t]);
  }
}

template <typename L, typename W, int R>
inline void float_dot_rows(const uint8_t *weights, uint64_t row_bytes, const ActRow *acts,
                           int num_tokens, int cols, float *out, int64_t out_stride) {
  int t = 0;
  for (; t + 2 <= num_tokens; t += 2) {
    float_dot_tile<L, W, R, 2>(weights, row_bytes, acts + t, cols, out + t * out_stride,
                               out_stride);
  }
  if (t < num_tokens) {
    float_dot_tile<L, W, R, 1>(weights, row_bytes, acts + t, cols, out + t * out_stride,
                               out_stride);
  }
}

template <typename L, typename W>
inline void float_dot(const uint8_t *weights, uint64_t row_bytes, int num_rows, const ActRow *acts,
                      int num_tokens, int cols, float *out, int64_t out_stride) {
  int r = 0;
  if (!W::kCompensated) {  // whose sums of two rows would not fit the registers
    for (; r + 2 <= num_rows; r += 2) {
      float_dot_rows<L, W, 2>(weights + static_cast<uint64_t>(r) * row_bytes, row_bytes, acts,
                              num_tokens, cols, out + r, out_stride);
    }
  }
  for (; r < num_rows; ++r) {
    float_dot_rows<L, W, 1>(weights + static_cast<uint64_t>(r) * row_bytes, row_bytes, acts,
                            num_tokens, cols, out + r, out_stride);
  }
}

}  // namespace
}  // namespace xllm::cpu
