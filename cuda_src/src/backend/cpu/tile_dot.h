// Products of interleaved weights (interleave.h), written once over vectors V of eight or sixteen
// rows: codes are unpacked once for up to V::kMaxTokens tokens, a dot product stays in its lane,
// and the f32 terms follow in the order of kernels.h. Internal linkage: see lanes_scalar.h.
//
// V: I and F, kRows lanes of i32 and f32; loads, shifts and conversions of the usual names; and
//   dot<kCodes, N>(w, a, start)   start + the dots of N words of codes with 4 N activations at a
//   kTogether                     the dots of a group go side by side, word by word, in
//                                 dots<N, T>(w, a, sums), a [T][32]; else one after the other
//
// Index symbols: t token, b quant block, s 32 elements of a super-block, g word of four elements.
// Bound: at few tokens the memory's bandwidth, above the multiply ports (eight byte products, and
// three or four f32 operations, per 32 elements).
#pragma once

#include <cstdint>
#include <cstring>

#include "backend/cpu/act_pack.h"
#include "backend/cpu/interleave.h"
#include "backend/cpu/kernels.h"
#include "tensor/quant.h"

namespace xllm::cpu {
namespace {

// How far products with codes may be added in 16 bits: codes up to 15, 31, 63, or any int8.
enum class Codes { k4Bits, k5Bits, k6Bits, kSigned };

// A tile as one vector of rows sees it: its words are 4 * kInterleavedRows apart.
template <typename V>
struct Tile {
  const uint8_t *words;
  const uint8_t *halves;

  typename V::I word(int i) const { return V::load(words + 4 * kInterleavedRows * i); }
  typename V::F half() const { return V::load_halves(halves); }
  // The two f16 of a word.
  typename V::F low_half(int i) const { return V::low_halves(word(i)); }
  typename V::F high_half(int i) const { return V::high_halves(word(i)); }
};

// Piece `piece` of `pieces` of what lies kDistance ahead, as long as a tile, towards cache `level`:
// for products of eight rows of activations, which compute for so long between two loads that a
// core cannot see far enough ahead by itself. With fewer rows it costs more than it gains, and the
// level is what measured faster for each kind of tile (docs/perf/cpu.md).
template <int kBytes, int T, int level, int piece, int pieces, typename V>
inline void fetch_ahead(const Tile<V> &tile) {
  constexpr int kLines = (kInterleavedRows * kBytes / 64 + pieces - 1) / pieces;
  constexpr int kDistance = 4096;
  if (T < 8) return;
#pragma GCC unroll 16
  for (int i = piece * kLines; i < (piece + 1) * kLines; ++i)
    __builtin_prefetch(tile.words + kDistance + 64 * i, 0, level == 1 ? 3 : 2);
}

template <typename V>
inline typename V::I low_nibbles(typename V::I x) {
  return V::band(x, V::set1(0x0f0f0f0f));
}
template <typename V>
inline typename V::I high_nibbles(typename V::I x) {
  return V::band(V::template shift_right<4>(x), V::set1(0x0f0f0f0f));
}
// The integer that a dot of codes raised by kOffset starts from: kOffset * minus_sum.
template <typename V, int kOffset>
inline typename V::I start_of(int32_t minus_sum) {
  constexpr int kShift = kOffset == 128 ? 7 : kOffset == 16 ? 4 : 3;
  static_assert(kOffset == 1 << kShift, "a power of two");
  return V::template shift_left<kShift>(V::set1(minus_sum));
}
// Bit kBit of every byte to bit 4.
template <typename V, int kBit>
inline typename V::I fifth_bits(typename V::I x) {
  const typename V::I at4 = kBit < 4 ? V::template shift_left<(4 - kBit) & 7>(x)
                                     : V::template shift_right<(kBit - 4) & 7>(x);
  return V::band(at4, V::set1(0x10101010));
}

// use(t, start(t) + the dots of N words of codes with the activations at q[t][first]) for each of a
// group. A chain of dependent products is several times longer than what a core looks ahead, so
// that side by side they are faster; it takes a register for each.
template <typename V, Codes kCodes, int N, int T, typename Start, typename Use>
inline void for_each_dot(const typename V::I *w, const int8_t (*q)[32], int first,
                         const Start &start, const Use &use) {
  if constexpr (V::kTogether) {
    typename V::I sums[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) sums[t] = start(t);
    V::template dots<N, T>(w, &q[0][first], sums);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) use(t, sums[t]);
  } else {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) use(t, V::template dot<kCodes, N>(w, q[t] + first, start(t)));
  }
}

// 16 bytes of nibbles from word `first` on: elements 0 to 15 low, 16 to 31 high.
template <typename V>
inline void plain_nibbles(const Tile<V> &tile, int first, typename V::I w[8]) {
  for (int g = 0; g < 4; ++g) {
    const typename V::I x = tile.word(first + g);
    w[g] = low_nibbles<V>(x);
    w[g + 4] = high_nibbles<V>(x);
  }
}

template <typename V>
inline void add_fifth_bits(typename V::I bits, typename V::I w[8]) {
  w[0] = V::bor(w[0], fifth_bits<V, 0>(bits));
  w[1] = V::bor(w[1], fifth_bits<V, 1>(bits));
  w[2] = V::bor(w[2], fifth_bits<V, 2>(bits));
  w[3] = V::bor(w[3], fifth_bits<V, 3>(bits));
  w[4] = V::bor(w[4], fifth_bits<V, 4>(bits));
  w[5] = V::bor(w[5], fifth_bits<V, 5>(bits));
  w[6] = V::bor(w[6], fifth_bits<V, 6>(bits));
  w[7] = V::bor(w[7], fifth_bits<V, 7>(bits));
}

// ---- plain blocks ----
// Each type: bytes of a block, whether it has a lone f16 or a word of two, what its codes are above
// the value they stand for, and how they are unpacked.

struct TileQ4_0 {
  static constexpr int kBytes = sizeof(BlockQ4_0), kOffset = 8;
  static constexpr bool kHasMin = false;
  static constexpr Codes kCodes = Codes::k4Bits;
  template <typename V>
  static void codes(const Tile<V> &tile, typename V::I w[8]) {
    plain_nibbles<V>(tile, 0, w);
  }
};

struct TileQ4_1 {
  static constexpr int kBytes = sizeof(BlockQ4_1), kOffset = 0;
  static constexpr bool kHasMin = true;
  static constexpr Codes kCodes = Codes::k4Bits;
  template <typename V>
  static void codes(const Tile<V> &tile, typename V::I w[8]) {
    plain_nibbles<V>(tile, 1, w);
  }
};

struct TileQ5_0 {
  static constexpr int kBytes = sizeof(BlockQ5_0), kOffset = 16;
  static constexpr bool kHasMin = false;
  static constexpr Codes kCodes = Codes::k5Bits;
  template <typename V>
  static void codes(const Tile<V> &tile, typename V::I w[8]) {
    plain_nibbles<V>(tile, 1, w);
    add_fifth_bits<V>(tile.word(0), w);
  }
};

struct TileQ5_1 {
  static constexpr int kBytes = sizeof(BlockQ5_1), kOffset = 0;
  static constexpr bool kHasMin = true;
  static constexpr Codes kCodes = Codes::k5Bits;
  template <typename V>
  static void codes(const Tile<V> &tile, typename V::I w[8]) {
    plain_nibbles<V>(tile, 2, w);
    add_fifth_bits<V>(tile.word(1), w);
  }
};

struct TileQ8_0 {
  static constexpr int kBytes = sizeof(BlockQ8_0), kOffset = 0;
  static constexpr bool kHasMin = false;
  static constexpr Codes kCodes = Codes::kSigned;
  template <typename V>
  static void codes(const Tile<V> &tile, typename V::I w[8]) {
    for (int g = 0; g < 8; ++g) w[g] = V::signed_codes(tile.word(g));
  }
};

template <typename V, typename Type, int T>
struct TilePlain {
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int kElements = kQuantBlock, kBytes = Type::kBytes;
  static constexpr bool kHasHalf = !Type::kHasMin;
  // note: V may want signed codes raised to unsigned ones.
  static constexpr int kOffset = Type::kOffset + (Type::kCodes == Codes::kSigned ? V::kRaised : 0);
  F acc[T];

  void start() {
    for (int t = 0; t < T; ++t) acc[t] = V::zero();
  }

  void add_block(const Tile<V> &tile, const PackedBlock<T> *acts, int b) {
    fetch_ahead<kBytes, T, 1, 0, 1>(tile);
    const PackedBlock<T> &act = acts[b];
    I w[8];
    Type::template codes<V>(tile, w);
    F d, m = V::zero();
    if (Type::kHasMin) {
      d = tile.low_half(0);
      m = tile.high_half(0);
    } else {
      d = tile.half();
    }
    const auto start = [&](int t) {
      if constexpr (kOffset != 0) return start_of<V, kOffset>(act.whole[t]);
      return V::set1(0);
    };
    for_each_dot<V, Type::kCodes, 8, T>(w, act.q, 0, start, [&](int t, I sum) {
      acc[t] = V::fma(V::mul(d, V::set1_float(act.d[t])), V::to_float(sum), acc[t]);
      if (Type::kHasMin) acc[t] = V::fma(m, V::set1_float(act.ds[t]), acc[t]);
    });
  }
};

// ---- super-blocks ----
// Of one or few groups of activations they are multiplied as they are unpacked; of more, a piece of
// a tile is unpacked once for all of them, as far as both stay in the first cache (kTogether).
// Each type: its codes, its scales per 32 (q4_k, q5_k, with mins) or per 16 (q6_k).

// Byte j of every word as f32.
template <typename V, int j>
inline typename V::F byte_to_float(typename V::I x) {
  return V::to_float(V::band(V::template shift_right<8 * j>(x), V::set1(255)));
}
template <typename V, int j>
inline typename V::F signed_byte_to_float(typename V::I x) {
  return V::to_float(V::template shift_right_signed<24>(V::template shift_left<24 - 8 * j>(x)));
}

// The 6-bit scales and mins of q4_k and q5_k as bytes, four to a word.
template <typename V>
struct TileScalesK4 {
  using I = typename V::I;
  I scale[2], min[2];

  explicit TileScalesK4(const Tile<V> &tile) {
    const I a = tile.word(1), b = tile.word(2), c = tile.word(3);
    const I six = V::set1(0x3f3f3f3f), top = V::set1(0x30303030);
    scale[0] = V::band(a, six);
    min[0] = V::band(b, six);
    scale[1] = V::bor(low_nibbles<V>(c), V::band(V::template shift_right<2>(a), top));
    min[1] = V::bor(high_nibbles<V>(c), V::band(V::template shift_right<2>(b), top));
  }
  template <int s>
  typename V::F scale_of() const {
    return byte_to_float<V, s % 4>(scale[s / 4]);
  }
  template <int s>
  typename V::F min_of() const {
    return byte_to_float<V, s % 4>(min[s / 4]);
  }
};

template <typename V, int s>
inline void nibbles_of_k4(const Tile<V> &tile, int first, typename V::I w[8]) {
  for (int g = 0; g < 8; ++g) {
    const typename V::I x = tile.word(first + 8 * (s / 2) + g);
    w[g] = s % 2 == 0 ? low_nibbles<V>(x) : high_nibbles<V>(x);
  }
}

// A super-block of each row of a vector, unpacked.
template <typename V>
struct UnpackedTile {
  typename V::I codes[8][8];
  typename V::F scales[16];  // per 32, or per 16
  typename V::F mins[8];
  typename V::F d, dmin;
};

struct TileQ4_K {
  static constexpr int kBytes = sizeof(BlockQ4_K);
  static constexpr Codes kCodes = Codes::k4Bits;
  template <typename V, int s>
  static void codes(const Tile<V> &tile, typename V::I w[8]) {
    nibbles_of_k4<V, s>(tile, 4, w);
  }
};

struct TileQ5_K {
  static constexpr int kBytes = sizeof(BlockQ5_K);
  static constexpr Codes kCodes = Codes::k5Bits;
  template <typename V, int s>
  static void codes(const Tile<V> &tile, typename V::I w[8]) {
    nibbles_of_k4<V, s>(tile, 12, w);
    for (int g = 0; g < 8; ++g) w[g] = V::bor(w[g], fifth_bits<V, s>(tile.word(4 + g)));
  }
};

template <typename V, typename Type, int T>
struct TileK4 {
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int kElements = kSuperBlock, kBytes = Type::kBytes;
  static constexpr bool kHasHalf = false;
  F acc[T];

  void start() {
    for (int t = 0; t < T; ++t) acc[t] = V::zero();
  }

  template <int s>
  static void add_sub_block(const Tile<V> &tile, const TileScalesK4<V> &scales,
                            const PackedBlock<T> *acts, int b, F inner[T]) {
    const PackedBlock<T> &act = acts[8 * b + s];
    fetch_ahead<kBytes, T, 2, s, 8>(tile);
    I w[8];
    Type::template codes<V, s>(tile, w);
    const F scale = scales.template scale_of<s>();
    for_each_dot<V, Type::kCodes, 8, T>(
        w, act.q, 0, [](int) { return V::set1(0); },
        [&](int t, I sum) {
          inner[t] = V::fma(V::set1_float(act.d[t]), V::mul(V::to_float(sum), scale), inner[t]);
        });
  }

  template <int s>
  static void add_min(const TileScalesK4<V> &scales, const PackedBlock<T> *acts, int b,
                      F least[T]) {
    const F min = scales.template min_of<s>();
    for (int t = 0; t < T; ++t)
      least[t] = V::fma(V::set1_float(acts[8 * b + s].ds[t]), min, least[t]);
  }

  template <int s>
  static void unpack_sub_block(const Tile<V> &tile, const TileScalesK4<V> &scales,
                               UnpackedTile<V> *out) {
    Type::template codes<V, s>(tile, out->codes[s]);
    out->scales[s] = scales.template scale_of<s>();
    out->mins[s] = scales.template min_of<s>();
  }

  static void unpack(const Tile<V> &tile, UnpackedTile<V> *out) {
    const TileScalesK4<V> scales(tile);
    unpack_sub_block<0>(tile, scales, out);
    unpack_sub_block<1>(tile, scales, out);
    unpack_sub_block<2>(tile, scales, out);
    unpack_sub_block<3>(tile, scales, out);
    unpack_sub_block<4>(tile, scales, out);
    unpack_sub_block<5>(tile, scales, out);
    unpack_sub_block<6>(tile, scales, out);
    unpack_sub_block<7>(tile, scales, out);
    out->d = tile.low_half(0);
    out->dmin = tile.high_half(0);
  }

  // add_block of a tile that is unpacked, with the super-block's activations.
  static void add_unpacked(const UnpackedTile<V> &tile, const PackedBlock<T> *acts, F acc[T]) {
    F inner[T];
    for (int t = 0; t < T; ++t) inner[t] = V::zero();
    for (int s = 0; s < 8; ++s) {
      const PackedBlock<T> &act = acts[s];
      const F scale = tile.scales[s];
      for_each_dot<V, Type::kCodes, 8, T>(
          tile.codes[s], act.q, 0, [](int) { return V::set1(0); },
          [&](int t, I sum) {
            inner[t] = V::fma(V::set1_float(act.d[t]), V::mul(V::to_float(sum), scale), inner[t]);
          });
    }
    for (int t = 0; t < T; ++t) acc[t] = V::fma(tile.d, inner[t], acc[t]);
    F least[T];
    for (int t = 0; t < T; ++t) least[t] = V::zero();
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      for (int t = 0; t < T; ++t)
        least[t] = V::fma(V::set1_float(acts[s].ds[t]), tile.mins[s], least[t]);
    }
    for (int t = 0; t < T; ++t) acc[t] = V::negated_fma(tile.dmin, least[t], acc[t]);
  }

  // The mins come last, so that they take no registers before.
  void add_block(const Tile<V> &tile, const PackedBlock<T> *acts, int b) {
    const TileScalesK4<V> scales(tile);
    F inner[T];
    for (int t = 0; t < T; ++t) inner[t] = V::zero();
    add_sub_block<0>(tile, scales, acts, b, inner);
    add_sub_block<1>(tile, scales, acts, b, inner);
    add_sub_block<2>(tile, scales, acts, b, inner);
    add_sub_block<3>(tile, scales, acts, b, inner);
    add_sub_block<4>(tile, scales, acts, b, inner);
    add_sub_block<5>(tile, scales, acts, b, inner);
    add_sub_block<6>(tile, scales, acts, b, inner);
    add_sub_block<7>(tile, scales, acts, b, inner);
    const F d = tile.low_half(0), dmin = tile.high_half(0);
    for (int t = 0; t < T; ++t) acc[t] = V::fma(d, inner[t], acc[t]);
    F least[T];
    for (int t = 0; t < T; ++t) least[t] = V::zero();
    add_min<0>(scales, acts, b, least);
    add_min<1>(scales, acts, b, least);
    add_min<2>(scales, acts, b, least);
    add_min<3>(scales, acts, b, least);
    add_min<4>(scales, acts, b, least);
    add_min<5>(scales, acts, b, least);
    add_min<6>(scales, acts, b, least);
    add_min<7>(scales, acts, b, least);
    for (int t = 0; t < T; ++t) acc[t] = V::negated_fma(dmin, least[t], acc[t]);
  }
};

// Words of a tile of q6_k: scales 0 to 3; of each 32 elements two of their top bits, four of their
// low ones (interleave.h).
template <typename V, int s>
inline void codes_of_q6_k(const Tile<V> &tile, typename V::I w[8]) {
  using I = typename V::I;
  constexpr int first = 4 + 6 * s;
  for (int g = 0; g < 4; ++g) {
    const I x = tile.word(first + 2 + g);
    w[g] = low_nibbles<V>(x);
    w[g + 4] = high_nibbles<V>(x);
  }
  const I top_bits = V::set1(0x30303030);
  for (int i = 0; i < 2; ++i) {
    const I x = tile.word(first + i);
    I *to = w + 4 * i;
    to[0] = V::bor(to[0], V::band(V::template shift_left<4>(x), top_bits));
    to[1] = V::bor(to[1], V::band(V::template shift_left<2>(x), top_bits));
    to[2] = V::bor(to[2], V::band(x, top_bits));
    to[3] = V::bor(to[3], V::band(V::template shift_right<2>(x), top_bits));
  }
}

template <typename V, int T>
struct TileQ6_K {
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int kElements = kSuperBlock, kBytes = sizeof(BlockQ6_K);
  static constexpr bool kHasHalf = true;
  F acc[T];

  void start() {
    for (int t = 0; t < T; ++t) acc[t] = V::zero();
  }

  template <int s>
  static void add_sub_block(const Tile<V> &tile, const PackedBlock<T> *acts, int b, F inner[T]) {
    const PackedBlock<T> &act = acts[8 * b + s];
    fetch_ahead<kBytes, T, 2, s, 8>(tile);
    I w[8];
    codes_of_q6_k<V, s>(tile, w);
    const I scales = tile.word(s / 2);
    const F scale = signed_byte_to_float<V, 2 * (s % 2)>(scales),
            scale2 = signed_byte_to_float<V, 2 * (s % 2) + 1>(scales);
    F first[T];
    for_each_dot<V, Codes::k6Bits, 4, T>(
        w, act.q, 0, [&](int t) { return V::set1(act.half[0][t]); },
        [&](int t, I sum) { first[t] = V::mul(V::to_float(sum), scale); });
    for_each_dot<V, Codes::k6Bits, 4, T>(
        w + 4, act.q, 16, [&](int t) { return V::set1(act.half[1][t]); },
        [&](int t, I sum) {
          // Exact: both products and their sum are integers below 2^24.
          const F both = V::fma(V::to_float(sum), scale2, first[t]);
          inner[t] = V::fma(V::set1_float(act.d[t]), both, inner[t]);
        });
  }

  template <int s>
  static void unpack_sub_block(const Tile<V> &tile, UnpackedTile<V> *out) {
    codes_of_q6_k<V, s>(tile, out->codes[s]);
    const I scales = tile.word(s / 2);
    out->scales[2 * s] = signed_byte_to_float<V, 2 * (s % 2)>(scales);
    out->scales[2 * s + 1] = signed_byte_to_float<V, 2 * (s % 2) + 1>(scales);
  }

  static void unpack(const Tile<V> &tile, UnpackedTile<V> *out) {
    unpack_sub_block<0>(tile, out);
    unpack_sub_block<1>(tile, out);
    unpack_sub_block<2>(tile, out);
    unpack_sub_block<3>(tile, out);
    unpack_sub_block<4>(tile, out);
    unpack_sub_block<5>(tile, out);
    unpack_sub_block<6>(tile, out);
    unpack_sub_block<7>(tile, out);
    out->d = tile.half();
  }

  // add_block of a tile that is unpacked, with the super-block's activations.
  static void add_unpacked(const UnpackedTile<V> &tile, const PackedBlock<T> *acts, F acc[T]) {
    F inner[T];
    for (int t = 0; t < T; ++t) inner[t] = V::zero();
    for (int s = 0; s < 8; ++s) {
      const PackedBlock<T> &act = acts[s];
      const F scale = tile.scales[2 * s], scale2 = tile.scales[2 * s + 1];
      F first[T];
      for_each_dot<V, Codes::k6Bits, 4, T>(
          tile.codes[s], act.q, 0, [&](int t) { return V::set1(act.half[0][t]); },
          [&](int t, I sum) { first[t] = V::mul(V::to_float(sum), scale); });
      for_each_dot<V, Codes::k6Bits, 4, T>(
          tile.codes[s] + 4, act.q, 16, [&](int t) { return V::set1(act.half[1][t]); },
          [&](int t, I sum) {
            const F both = V::fma(V::to_float(sum), scale2, first[t]);
            inner[t] = V::fma(V::set1_float(act.d[t]), both, inner[t]);
          });
    }
    for (int t = 0; t < T; ++t) acc[t] = V::fma(tile.d, inner[t], acc[t]);
  }

  void add_block(const Tile<V> &tile, const PackedBlock<T> *acts, int b) {
    F inner[T];
    for (int t = 0; t < T; ++t) inner[t] = V::zero();
    add_sub_block<0>(tile, acts, b, inner);
    add_sub_block<1>(tile, acts, b, inner);
    add_sub_block<2>(tile, acts, b, inner);
    add_sub_block<3>(tile, acts, b, inner);
    add_sub_block<4>(tile, acts, b, inner);
    add_sub_block<5>(tile, acts, b, inner);
    add_sub_block<6>(tile, acts, b, inner);
    add_sub_block<7>(tile, acts, b, inner);
    const F d = tile.half();
    for (int t = 0; t < T; ++t) acc[t] = V::fma(d, inner[t], acc[t]);
  }
};

// ---- rows and tokens ----

// Rows of one vector, num_rows of them wanted, of the tokens whose sums are acc [num_acts].
template <typename V>
inline void store_sums(const typename V::F *acc, int num_rows, int num_acts, int num_planes,
                       float *out, int64_t out_stride) {
  for (int t = 0; t < num_acts; t += num_planes) {
    float *to = out + t / num_planes * out_stride;
    typename V::F sum = acc[t];
    if (num_planes == 2) sum = V::fma(V::set1_float(1), acc[t + 1], sum);
    if (num_rows >= V::kRows) {
      V::store(to, sum);
    } else {
      float whole[V::kRows];
      V::store(whole, sum);
      std::memcpy(to, whole, static_cast<size_t>(num_rows) * sizeof(float));
    }
  }
}

// Sixteen rows (num_rows of them wanted) by a group of T rows of activations, num_acts of them
// wanted: whole tokens of num_planes each.
template <typename V, typename Product, int T>
inline void multiply_tile(const uint8_t *weights, int num_rows, const uint8_t *group, int num_acts,
                          int num_planes, int cols, float *out, int64_t out_stride) {
  const auto *acts = reinterpret_cast<const PackedBlock<T> *>(group);
  constexpr int kHalfBytes = Product::kHasHalf ? 2 * kInterleavedRows : 0;
  constexpr int kTileBytes = kInterleavedRows * Product::kBytes;
  for (int r = 0; r < num_rows; r += V::kRows) {
    Product product;
    product.start();
    Tile<V> tile = {weights + kHalfBytes + 4 * r, weights + 2 * r};
    for (int b = 0; b < cols / Product::kElements; ++b) {
      product.add_block(tile, acts, b);
      tile.words += kTileBytes;
      tile.halves += kTileBytes;
    }
    store_sums<V>(product.acc, num_rows - r, num_acts, num_planes, out + r, out_stride);
  }
}

// Super-blocks that are unpacked at a time, and rows of activations that pass over them: what is
// unpacked, a group's activations and all sums stay in the first cache.
constexpr int kUnpackedBlocks = 2;
constexpr int kUnpackedActs = 128;
// From so many rows of activations on it is worth it: with few, unpacking waits for the memory
// alone.
constexpr int kUnpackFrom = 32;

template <typename V, typename Product, int T>
inline void multiply_unpacked(const UnpackedTile<V> *tiles, int num_tiles, const uint8_t *group,
                              bool is_first, typename V::F *acc) {
  const auto *acts = reinterpret_cast<const PackedBlock<T> *>(group);
  typename V::F sums[T];
  for (int t = 0; t < T; ++t) sums[t] = is_first ? V::zero() : acc[t];
  for (int i = 0; i < num_tiles; ++i) Product::add_unpacked(tiles[i], acts + 8 * i, sums);
  for (int t = 0; t < T; ++t) acc[t] = sums[t];
}

// Sixteen rows, as many as a vector has, by up to kUnpackedActs rows of activations.
template <typename V, template <int> class P>
void multiply_all_unpacked(const uint8_t *weights, int num_rows, const uint8_t *acts, int num_acts,
                           int acts_left, int num_planes, int cols, float *out,
                           int64_t out_stride) {
  using Product = P<V::kMaxTokens>;
  constexpr int kHalfBytes = Product::kHasHalf ? 2 * kInterleavedRows : 0;
  constexpr int kTileBytes = kInterleavedRows * Product::kBytes;
  static_assert(V::kRows == kInterleavedRows, "a vector is a tile");
  UnpackedTile<V> tiles[kUnpackedBlocks];
  typename V::F acc[kUnpackedActs + kPackedSpareRows];
  const int num_blocks = cols / Product::kElements;
  const int num_groups = (num_acts + V::kMaxTokens - 1) / V::kMaxTokens;
  Tile<V> tile = {weights + kHalfBytes, weights};
  for (int b = 0; b < num_blocks; b += kUnpackedBlocks) {
    const int count = num_blocks - b < kUnpackedBlocks ? num_blocks - b : kUnpackedBlocks;
    for (int i = 0; i < count; ++i) {
      Product::unpack(tile, &tiles[i]);
      tile.words += kTileBytes;
      tile.halves += kTileBytes;
    }
    const uint8_t *group = acts;
    const int fetched = count * kTileBytes / num_groups / 64 * 64 + 64;  // of the next piece
    const uint8_t *next = tile.words;
    for (int t = 0; t < num_acts;) {
      for (int i = 0; i < fetched; i += 64) __builtin_prefetch(next + i, 0, 2);
      next += fetched;
      const int width = packed_group(acts_left - t, V::kMaxTokens);
      const uint8_t *from = group + int64_t{8} * b * width * kPackedRowBytes;
      if (width == V::kMaxTokens) {
        multiply_unpacked<V, Product, V::kMaxTokens>(tiles, count, from, b == 0, acc + t);
      } else if (width == 4) {
        multiply_unpacked<V, P<4>, 4>(tiles, count, from, b == 0, acc + t);
      } else if (width == 2) {
        multiply_unpacked<V, P<2>, 2>(tiles, count, from, b == 0, acc + t);
      } else {
        multiply_unpacked<V, P<1>, 1>(tiles, count, from, b == 0, acc + t);
      }
      t += width;
      group += int64_t{width} * (cols / 32) * kPackedRowBytes;
    }
  }
  store_sums<V>(acc, num_rows, num_acts, num_planes, out, out_stride);
}

// TileFn of a type: P<T> is its product for T rows of activations.
template <typename V, template <int> class P>
void tile_dot(const uint8_t *weights, uint64_t row_bytes, int num_rows, const uint8_t *acts,
              int num_tokens, int num_planes, int cols, float *out, int64_t out_stride) {
  const int num_acts = num_tokens * num_planes;
  for (int r = 0; r < num_rows; r += kInterleavedRows) {
    const uint8_t *tile = weights + static_cast<uint64_t>(r) * row_bytes;
    const int rows = num_rows - r < kInterleavedRows ? num_rows - r : kInterleavedRows;
    const uint8_t *group = acts;
    if constexpr (V::kTogether && P<1>::kElements == kSuperBlock) {
      if (num_acts >= kUnpackFrom) {
        for (int t = 0; t < num_acts; t += kUnpackedActs) {
          const int left = num_acts - t;
          multiply_all_unpacked<V, P>(tile, rows, group,
                                      left < kUnpackedActs ? left : kUnpackedActs, left, num_planes,
                                      cols, out + t / num_planes * out_stride + r, out_stride);
          group += int64_t{kUnpackedActs} * (cols / 32) * kPackedRowBytes;
        }
        continue;
      }
    }
    for (int t = 0; t < num_acts;) {  // always whole tokens
      const int left = num_acts - t, width = packed_group(left, V::kMaxTokens);
      const int count = left < width ? left : width;
      float *to = out + t / num_planes * out_stride + r;
      if (V::kMaxTokens >= 8 && width == 8) {
        multiply_tile<V, P<V::kMaxTokens>, V::kMaxTokens>(tile, rows, group, count, num_planes,
                                                          cols, to, out_stride);
      } else if (width == 4) {
        multiply_tile<V, P<4>, 4>(tile, rows, group, count, num_planes, cols, to, out_stride);
      } else if (width == 2) {
        multiply_tile<V, P<2>, 2>(tile, rows, group, count, num_planes, cols, to, out_stride);
      } else {
        multiply_tile<V, P<1>, 1>(tile, rows, group, count, num_planes, cols, to, out_stride);
      }
      t += count;
      group += int64_t{width} * (cols / 32) * kPackedRowBytes;
    }
  }
}

// The products of every type over V.
template <typename V>
struct TileProducts {
  template <int T>
  using Q4_0 = TilePlain<V, TileQ4_0, T>;
  template <int T>
  using Q4_1 = TilePlain<V, TileQ4_1, T>;
  template <int T>
  using Q5_0 = TilePlain<V, TileQ5_0, T>;
  template <int T>
  using Q5_1 = TilePlain<V, TileQ5_1, T>;
  template <int T>
  using Q8_0 = TilePlain<V, TileQ8_0, T>;
  template <int T>
  using Q4_K = TileK4<V, TileQ4_K, T>;
  template <int T>
  using Q5_K = TileK4<V, TileQ5_K, T>;
  template <int T>
  using Q6_K = TileQ6_K<V, T>;

  static TileFn find(DType dtype) {
    switch (dtype) {
      case DType::kQ4_0:
        return tile_dot<V, Q4_0>;
      case DType::kQ4_1:
        return tile_dot<V, Q4_1>;
      case DType::kQ5_0:
        return tile_dot<V, Q5_0>;
      case DType::kQ5_1:
        return tile_dot<V, Q5_1>;
      case DType::kQ8_0:
        return tile_dot<V, Q8_0>;
      case DType::kQ4_K:
        return tile_dot<V, Q4_K>;
      case DType::kQ5_K:
        return tile_dot<V, Q5_K>;
      case DType::kQ6_K:
        return tile_dot<V, Q6_K>;
      default:
        return nullptr;
    }
  }
};

}  // namespace
}  // namespace xllm::cpu
