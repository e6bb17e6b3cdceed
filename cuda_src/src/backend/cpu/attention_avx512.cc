// Attention's tile with AVX-512: the 16 partial sums of a dot are one register, and up to three
// queries of a group share every key and value that is loaded. kernels.h states the order.
// note: GCC 12 takes the undefined operands inside its own AVX-512 header for a mistake of ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "backend/cpu/attention_avx512.h"

#include <immintrin.h>

#include "backend/cpu/attention_tile.h"
#include "backend/cpu/lanes_avx2.h"

namespace xllm::cpu {
namespace {

using L = LanesAvx2;

// p[n] = the dots of N queries with eight keys.
template <int N>
inline void score_keys(const float *q, const float *k, int head_dim, float *const *p) {
  __m256 dots[N][8];
  for (int j = 0; j < 8; j += 4, k += int64_t{4} * head_dim) {
    __m512 acc[N][4];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) acc[n][i] = _mm512_setzero_ps();
    }
    for (int c = 0; c < head_dim; c += 16) {
      __m512 key[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) key[i] = _mm512_loadu_ps(k + int64_t{i} * head_dim + c);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const __m512 query = _mm512_loadu_ps(q + int64_t{n} * head_dim + c);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) acc[n][i] = _mm512_fmadd_ps(query, key[i], acc[n][i]);
      }
    }
    for (int n = 0; n < N; ++n) {
      for (int i = 0; i < 4; ++i) {
        dots[n][j + i] =
            _mm256_add_ps(_mm512_castps512_ps256(acc[n][i]), _mm512_extractf32x8_ps(acc[n][i], 1));
      }
    }
  }
  for (int n = 0; n < N; ++n) L::store(p[n], L::sums(dots[n]));
}

// 16 * V channels of N queries: out = out * correction, then += p * v, keys ascending.
template <int N, int V>
inline void add_weighted(const float (*p)[kKeyTile], const float *v, int head_dim, int lo, int hi,
                         const float *correction, AttentionState *states, int c) {
  __m512 acc[N][V];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
      acc[n][i] =
          _mm512_mul_ps(_mm512_loadu_ps(states[n].out + c + 16 * i), _mm512_set1_ps(correction[n]));
    }
  }
  for (int j = lo; j < hi; ++j) {
    const float *row = v + static_cast<int64_t>(j) * head_dim + c;
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
      const __m512 value = _mm512_loadu_ps(row + 16 * i);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        acc[n][i] = _mm512_fmadd_ps(_mm512_set1_ps(p[n][j]), value, acc[n][i]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) _mm512_storeu_ps(states[n].out + c + 16 * i, acc[n][i]);
  }
}

template <int N>
void attend_queries(const float *q, const float *k, const float *v, int head_dim, int lo, int hi,
                    float scale, AttentionState *states) {
  float p[N][kKeyTile], correction[N];
  for (int j = lo / 8 * 8; j < hi; j += 8) {
    float *to[N];
    for (int n = 0; n < N; ++n) to[n] = p[n] + j;
    score_keys<N>(q, k + static_cast<int64_t>(j) * head_dim, head_dim, to);
  }
  for (int n = 0; n < N; ++n) correction[n] = weigh_keys<L>(lo, hi, scale, p[n], &states[n]);
  int c = 0;
  for (; c + 64 <= head_dim; c += 64)
    add_weighted<N, 4>(p, v, head_dim, lo, hi, correction, states, c);
  for (; c < head_dim; c += 16) add_weighted<N, 1>(p, v, head_dim, lo, hi, correction, states, c);
}

}  // namespace

void avx512_attend_tile(const float *q, int num_queries, const float *k, const float *v,
                        int head_dim, int lo, int hi, float scale, AttentionState *states) {
  if (head_dim % 16 != 0) {
    attend_tile_lanes<L>(q, num_queries, k, v, head_dim, lo, hi, scale, states);
    return;
  }
  while (num_queries > 0) {
    const int count = num_queries == 4 ? 2 : num_queries < 3 ? num_queries : 3;
    if (count == 3) {
      attend_queries<3>(q, k, v, head_dim, lo, hi, scale, states);
    } else if (count == 2) {
      attend_queries<2>(q, k, v, head_dim, lo, hi, scale, states);
    } else {
      attend_queries<1>(q, k, v, head_dim, lo, hi, scale, states);
    }
    num_queries -= count;
    q += int64_t{count} * head_dim;
    states += count;
  }
}

}  // namespace xllm::cpu
