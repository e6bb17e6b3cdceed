// Attention's tile with AVX-512: the 16 partial sums of a dot are one register, and up to six
// queries of a group share every key and value that is loaded, f16 ones converted on the way.
// kernels.h states the order. Bound: a fused multiply-add per 16 channels, query and key, twice.
// note: GCC 12 takes the undefined operands inside its own AVX-512 header for a mistake of ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "backend/cpu/attention_avx512.h"

#include <immintrin.h>

#include "backend/cpu/attention_tile.h"
#include "backend/cpu/lanes_avx2.h"
#include "backend/cpu/lanes_avx512.h"

namespace xllm::cpu {
namespace {

using L = LanesAvx2;

// Where the rows of a tile lie, and what is asked for ahead of the next one.
struct FloatRows {
  const float *k, *v;
  int head_dim;

  const float *key(int j) const { return k + int64_t{j} * head_dim; }
  const float *value(int j) const { return v + int64_t{j} * head_dim; }
  static __m512 load(const float *p) { return _mm512_loadu_ps(p); }
  void fetch_keys(int) const {}
  void fetch_values(int, int, int) const {}
  void forget_next() {}
};

struct HalfRows {
  HalfTile tile;
  HalfTile next;  // null pieces: nothing to fetch
  int head_dim;

  const uint16_t *key(int j) const { return row(tile.k, j); }
  const uint16_t *value(int j) const { return row(tile.v, j); }
  static __m512 load(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  }
  // Keys j to j + 3 of the next tile.
  void fetch_keys(int j) const {
    if (next.k[j / kTilePiece] != nullptr) fetch(row(next.k, j), 4 * head_dim);
  }
  // Channels c to c + count of value j of the next tile.
  void fetch_values(int j, int c, int count) const {
    if (next.v[j / kTilePiece] != nullptr) fetch(row(next.v, j) + c, count);
  }
  void forget_next() { next = {}; }

 private:
  const uint16_t *row(const uint16_t *const *pieces, int j) const {
    return pieces[j / kTilePiece] + int64_t{j % kTilePiece} * head_dim;
  }
  static void fetch(const uint16_t *p, int count) {
    for (int i = 0; i < count; i += 32) __builtin_prefetch(p + i, 0, 2);
  }
};

// p[n][j..j + 3] = the dots of N queries with four keys.
template <int N, typename Rows>
inline void score_keys(const float *q, const Rows &rows, int j, float (*p)[kKeyTile]) {
  const int head_dim = rows.head_dim;
  const auto *key0 = rows.key(j);  // four keys never lie in two pieces
  __m512 acc[N][4];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[n][i] = _mm512_setzero_ps();
  }
  for (int c = 0; c < head_dim; c += 16) {
    __m512 key[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) key[i] = Rows::load(key0 + int64_t{i} * head_dim + c);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const __m512 query = _mm512_loadu_ps(q + int64_t{n} * head_dim + c);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) acc[n][i] = _mm512_fmadd_ps(query, key[i], acc[n][i]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    __m256 dots[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      dots[i] =
          _mm256_add_ps(_mm512_castps512_ps256(acc[n][i]), _mm512_extractf32x8_ps(acc[n][i], 1));
    }
    // As L::sums: each half of a register holds the sums of four lanes.
    const __m256 fours =
        _mm256_hadd_ps(_mm256_hadd_ps(dots[0], dots[1]), _mm256_hadd_ps(dots[2], dots[3]));
    _mm_storeu_ps(p[n] + j,
                  _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
  }
}

// weigh_keys of N queries: their chains of dependent operations side by side, and what their older
// values are multiplied by in one vector.
template <int N>
inline void weigh_all(int lo, int hi, float scale, float (*p)[kKeyTile], AttentionState *states,
                      float *correction) {
  using L16 = LanesAvx512;
  const uint32_t inside = (hi < 32 ? (1u << hi) : 0u) - (1u << lo);
  const __mmask16 masks[2] = {static_cast<__mmask16>(inside), static_cast<__mmask16>(inside >> 16)};
  __m512 s[N][2];
  alignas(64) float older[16] = {}, newer[16] = {};
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    for (int i = 0; i < 2; ++i) {
      s[n][i] = _mm512_mask_mul_ps(_mm512_set1_ps(-HUGE_VALF), masks[i],
                                   _mm512_loadu_ps(p[n] + 16 * i), _mm512_set1_ps(scale));
    }
    // note: in this order of arguments a NaN is passed over, as in weigh_keys; its exponential
    // shows.
    const __m512 best = L16::max(s[n][1], L16::max(s[n][0], _mm512_set1_ps(states[n].max)));
    older[n] = states[n].max;
    newer[n] = L::max_lane(L::max(_mm512_castps512_ps256(best), _mm512_extractf32x8_ps(best, 1)));
  }
  alignas(64) float corrections[16];
  _mm512_store_ps(corrections,
                  exp_lanes<L16>(L16::sub(_mm512_load_ps(older), _mm512_load_ps(newer))));
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    const __m512 max = _mm512_set1_ps(newer[n]);
    const __m512 e0 = exp_lanes<L16>(L16::sub(s[n][0], max)),
                 e1 = exp_lanes<L16>(L16::sub(s[n][1], max));
    _mm512_storeu_ps(p[n], e0);
    _mm512_storeu_ps(p[n] + 16, e1);
    const __m512 total = L16::add(e0, e1);
    const float sum =
        L::sum(L::add(_mm512_castps512_ps256(total), _mm512_extractf32x8_ps(total, 1)));
    states[n].denominator = std::fma(states[n].denominator, corrections[n], sum);
    states[n].max = newer[n];
    correction[n] = corrections[n];
  }
}

// 16 * V channels of N queries: out = out * correction, then += p * v, keys ascending.
template <int N, int V, typename Rows>
inline void add_weighted(const float (*p)[kKeyTile], const Rows &rows, int lo, int hi,
                         const float *correction, AttentionState *states, int c) {
  __m512 acc[N][V];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
      acc[n][i] =
          _mm512_mul_ps(_mm512_loadu_ps(states[n].out + c + 16 * i), _mm512_set1_ps(correction[n]));
    }
  }
  for (int j = lo; j < hi; ++j) {
    const auto *row = rows.value(j) + c;
    rows.fetch_values(j, c, 16 * V);
    __m512 value[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) value[i] = Rows::load(row + 16 * i);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const __m512 weight = _mm512_set1_ps(p[n][j]);
#pragma GCC unroll 8
      for (int i = 0; i < V; ++i) acc[n][i] = _mm512_fmadd_ps(weight, value[i], acc[n][i]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) _mm512_storeu_ps(states[n].out + c + 16 * i, acc[n][i]);
  }
}

template <int N, typename Rows>
void attend_queries(const float *q, const Rows &rows, int lo, int hi, float scale,
                    AttentionState *states) {
  float p[N][kKeyTile], correction[N];
  for (int j = lo / 8 * 8; j < hi; j += 8) {
    for (int i = j; i < j + 8; i += 4) {
      rows.fetch_keys(i);
      score_keys<N>(q, rows, i, p);
    }
  }
  weigh_all<N>(lo, hi, scale, p, states, correction);
  int c = 0;
  for (; c + 64 <= rows.head_dim; c += 64)
    add_weighted<N, 4>(p, rows, lo, hi, correction, states, c);
  for (; c < rows.head_dim; c += 16) add_weighted<N, 1>(p, rows, lo, hi, correction, states, c);
}

// Queries in groups of 6, 4, 3, 2 or 1, none of them of one query where it can be helped.
template <typename Rows>
void attend_all(const float *q, int num_queries, Rows rows, int lo, int hi, float scale,
                AttentionState *states) {
  while (num_queries > 0) {
    int count = num_queries;
    if (num_queries == 5) count = 3;
    if (num_queries > 6) count = 4;
    switch (count) {
      case 6:
        attend_queries<6>(q, rows, lo, hi, scale, states);
        break;
      case 4:
        attend_queries<4>(q, rows, lo, hi, scale, states);
        break;
      case 3:
        attend_queries<3>(q, rows, lo, hi, scale, states);
        break;
      case 2:
        attend_queries<2>(q, rows, lo, hi, scale, states);
        break;
      default:
        attend_queries<1>(q, rows, lo, hi, scale, states);
    }
    rows.forget_next();  // asked for already
    num_queries -= count;
    q += int64_t{count} * rows.head_dim;
    states += count;
  }
}

}  // namespace

void avx512_attend_tile(const float *q, int num_queries, const float *k, const float *v,
                        int head_dim, int lo, int hi, float scale, AttentionState *states) {
  if (head_dim % 16 != 0) {
    attend_tile_lanes<L>(q, num_queries, k, v, head_dim, lo, hi, scale, states);
    return;
  }
  attend_all(q, num_queries, FloatRows{k, v, head_dim}, lo, hi, scale, states);
}

void avx512_attend_halves(const float *q, int num_queries, const HalfTile &tile,
                          const HalfTile &next, int head_dim, int lo, int hi, float scale,
                          AttentionState *states) {
  attend_all(q, num_queries, HalfRows{tile, next, head_dim}, lo, hi, scale, states);
}

}  // namespace xllm::cpu
