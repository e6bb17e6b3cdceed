// Products with f32, f16 and bf16 weights over eight lanes L: R rows by T tokens at a time, each
// with its 16 partial sums. Internal linkage: see lanes_scalar.h.
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
  static typename L::F load(const float *p) { return L::load(p); }
};
template <typename L>
struct F16Weights {
  using Element = uint16_t;
  static typename L::F load(const uint16_t *p) { return L::load_half(p); }
};
template <typename L>
struct BF16Weights {
  using Element = uint16_t;
  static typename L::F load(const uint16_t *p) { return L::load_bfloat(p); }
};

template <typename L, typename W, int R, int T>
inline void float_dot_tile(const uint8_t *weights, uint64_t row_bytes, const ActRow *acts, int cols,
                           float *out, int64_t out_stride) {
  using F = typename L::F;
  using Element = typename W::Element;
  F low[R][T], high[R][T];
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) low[r][t] = high[r][t] = L::zero();
  }
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
        low[r][t] = L::fma(w, a[t], low[r][t]);
        high[r][t] = L::fma(w8, b[t], high[r][t]);
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
        low[r][t] = L::fma(W::load(w), L::load(a), low[r][t]);
        high[r][t] = L::fma(W::load(w + 8), L::load(a + 8), high[r][t]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) out[t * out_stride + r] = L::sum(L::add(low[r][t], high[r][t]));
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
  for (; r + 2 <= num_rows; r += 2) {
    float_dot_rows<L, W, 2>(weights + static_cast<uint64_t>(r) * row_bytes, row_bytes, acts,
                            num_tokens, cols, out + r, out_stride);
  }
  if (r < num_rows) {
    float_dot_rows<L, W, 1>(weights + static_cast<uint64_t>(r) * row_bytes, row_bytes, acts,
                            num_tokens, cols, out + r, out_stride);
  }
}

}  // namespace
}  // namespace xllm::cpu
