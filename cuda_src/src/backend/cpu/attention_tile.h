// One tile of keys against the queries of a group, over eight lanes L. kernels.h states the order.
// Internal linkage: see lanes_scalar.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "backend/cpu/kernels.h"
#include "backend/cpu/row_math.h"

namespace xllm::cpu {
namespace {

// The dots of q with eight keys.
template <typename L>
inline typename L::F score_lanes(const float *q, const float *k, int head_dim) {
  using F = typename L::F;
  F dots[8];
  for (int j = 0; j < 8; ++j, k += head_dim) {
    F low = L::zero(), high = L::zero();
    int c = 0;
    for (; c + 16 <= head_dim; c += 16) {
      low = L::fma(L::load(q + c), L::load(k + c), low);
      high = L::fma(L::load(q + c + 8), L::load(k + c + 8), high);
    }
    if (c < head_dim) {
      low = L::fma(load_tail<L>(q, c, head_dim), load_tail<L>(k, c, head_dim), low);
      high = L::fma(load_tail<L>(q, c + 8, head_dim), load_tail<L>(k, c + 8, head_dim), high);
    }
    dots[j] = L::add(low, high);
  }
  return L::sums(dots);
}

// out[c..] = out[c..] * correction, then += p * v over keys [lo, hi); N vectors of channels at
// once.
template <typename L, int N>
inline void add_values(const float *p, const float *v, int head_dim, int lo, int hi,
                       float correction, float *out) {
  using F = typename L::F;
  F acc[N];
  const F factor = L::set1(correction);
  for (int n = 0; n < N; ++n) acc[n] = L::mul(L::load(out + 8 * n), factor);
  for (int j = lo; j < hi; ++j) {
    const F weight = L::set1(p[j]);
    const float *row = v + static_cast<int64_t>(j) * head_dim;
    for (int n = 0; n < N; ++n) acc[n] = L::fma(weight, L::load(row + 8 * n), acc[n]);
  }
  for (int n = 0; n < N; ++n) L::store(out + 8 * n, acc[n]);
}

// From products of q with the keys to p: scaled, -infinity outside [lo, hi), then e^(s - M); the
// state's maximum and denominator follow. Returns what the older values are multiplied by.
template <typename L>
inline float weigh_keys(int lo, int hi, float scale, float *p, AttentionState *state) {
  using F = typename L::F;
  F best = L::set1(state->max);
  for (int j = 0; j < kKeyTile; j += 8) {
    if (j + 8 <= lo || j >= hi) {
      L::store(p + j, L::set1(-HUGE_VALF));
      continue;
    }
    L::store(p + j, L::mul(L::load(p + j), L::set1(scale)));
    if (j < lo || j + 8 > hi) {
      for (int i = j; i < j + 8; ++i) {
        if (i < lo || i >= hi) p[i] = -HUGE_VALF;
      }
    }
    best = L::max(L::load(p + j), best);
  }
  const float max = L::max_lane(best);
  const F max_lanes = L::set1(max);
  F total = L::zero();
  F first = L::zero();
  for (int j = 0; j < kKeyTile; j += 8) {
    const F e = exp_lanes<L>(L::sub(L::load(p + j), max_lanes));
    L::store(p + j, e);
    // The f32 sum of 32: partial i % 16, then its two halves.
    if (j == 0) first = e;
    if (j == 8) total = e;
    if (j == 16) first = L::add(first, e);
    if (j == 24) total = L::add(first, L::add(total, e));
  }
  float correction[8];
  L::store(correction, exp_lanes<L>(L::sub(L::set1(state->max), max_lanes)));
  state->denominator = std::fma(state->denominator, correction[0], L::sum(total));
  state->max = max;
  return correction[0];
}

template <typename L>
inline void attend_tile_lanes(const float *q, int num_queries, const float *k, const float *v,
                              int head_dim, int lo, int hi, float scale, AttentionState *states) {
  for (int n = 0; n < num_queries; ++n, q += head_dim) {
    float p[kKeyTile];
    for (int j = lo / 8 * 8; j < hi; j += 8)
      L::store(p + j, score_lanes<L>(q, k + static_cast<int64_t>(j) * head_dim, head_dim));
    const float correction = weigh_keys<L>(lo, hi, scale, p, &states[n]);
    float *out = states[n].out;
    int c = 0;
    for (; c + 64 <= head_dim; c += 64)
      add_values<L, 8>(p, v + c, head_dim, lo, hi, correction, out + c);
    for (; c + 8 <= head_dim; c += 8)
      add_values<L, 1>(p, v + c, head_dim, lo, hi, correction, out + c);
    for (; c < head_dim; ++c) {
      float acc = out[c] * correction;
      for (int j = lo; j < hi; ++j)
        acc = std::fma(p[j], v[static_cast<int64_t>(j) * head_dim + c], acc);
      out[c] = acc;
    }
  }
}

template <typename L>
inline void merge_attention_lanes(AttentionState *into, const AttentionState &from, int head_dim) {
  using F = typename L::F;
  const float max = into->max > from.max ? into->max : from.max;
  const F a = exp_lanes<L>(L::sub(L::set1(into->max), L::set1(max)));
  const F b = exp_lanes<L>(L::sub(L::set1(from.max), L::set1(max)));
  const auto merge = [&](const F &x, const F &y) { return L::fma(x, a, L::mul(y, b)); };
  float denominator[8];
  L::store(denominator, merge(L::set1(into->denominator), L::set1(from.denominator)));
  into->denominator = denominator[0];
  into->max = max;
  float *out = into->out;
  int c = 0;
  for (; c + 8 <= head_dim; c += 8) {
    L::store(out + c, merge(L::load(out + c), L::load(from.out + c)));
  }
  if (c < head_dim) {
    store_tail<L>(out, c, head_dim,
                  merge(load_tail<L>(out, c, head_dim), load_tail<L>(from.out, c, head_dim)));
  }
}

}  // namespace
}  // namespace xllm::cpu
