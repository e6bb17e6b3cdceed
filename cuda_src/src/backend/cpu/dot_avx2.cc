// Products of quantised weights with AVX2: eight weight rows at a time, one per 32-bit lane, so
// that a row's f32 terms are lanes of one fma. The codes of eight rows are unpacked once for up to
// four tokens.
//
// Index symbols: r weight row of the eight, t token, b quant block or super-block, s 32 elements of
// a super-block. Bound: at one token the memory's bandwidth (about 100 instructions per 8 x 32
// weights), above it the multiply ports.
#include "backend/cpu/dot_avx2.h"

#include <immintrin.h>

#include <cstring>

#include "tensor/quant.h"

namespace xllm::cpu {
namespace {

constexpr int kRows = 8;

// The same block of eight rows.
struct RowPointers {
  const uint8_t *p[kRows];
};

// Memory that will be read next: eight rows side by side are too many streams for the hardware to
// follow, so the next eight are asked for while these are computed, as the one contiguous piece
// that they are. Past the end of a chunk too: the next chunk is often this thread's, and a prefetch
// of memory that does not exist is ignored. An address, because it may be no pointer into anything.
struct Ahead {
  uintptr_t next;  // 0: nothing

  void advance(int size_bytes) {
    if (next == 0) return;
    for (uintptr_t i = 0; i < static_cast<uintptr_t>(size_bytes); i += 64) {
      _mm_prefetch(reinterpret_cast<const char *>(next + i), _MM_HINT_T0);
    }
    next += static_cast<uintptr_t>(size_bytes);
  }
};

inline __m128i load16(const uint8_t *p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}
inline __m256i load32(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }

// ---- from eight vectors of codes to eight sums ----

// How far the products may be added in 16 bits. kSmall: unsigned codes up to 31 (eight products
// fit); kMedium: up to 63 (four fit); kSigned: any int8 but the activations' -128, which do not
// occur.
enum class Codes { kSmall, kMedium, kSigned };

// Sums of four products, eight lanes of i32, in element order.
template <Codes kCodes>
inline __m256i sum_fours(__m256i w, __m256i a) {
  const __m256i pairs = kCodes == Codes::kSigned
                            ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w))
                            : _mm256_maddubs_epi16(w, a);
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// Adds neighbouring lanes of x and y: [x0+x1, x2+x3, y0+y1, y2+y3] in each half. With 16-bit
// packing where the values fit.
template <bool kFits16>
inline __m256i add_neighbors(__m256i x, __m256i y) {
  if (kFits16) return _mm256_madd_epi16(_mm256_packs_epi32(x, y), _mm256_set1_epi16(1));
  return _mm256_hadd_epi32(x, y);
}

// The dots of eight rows with one token's 32: elements 0 to 15 in *first, 16 to 31 in *second, row
// r in lane r.
template <Codes kCodes>
inline void dot_rows(const __m256i w[kRows], __m256i a, __m256i *first, __m256i *second) {
  constexpr bool kFourFit = kCodes != Codes::kSigned, kEightFit = kCodes == Codes::kSmall;
  __m256i q[2];
  for (int i = 0; i < 2; ++i) {
    const __m256i *v = w + 4 * i;
    const __m256i x =
        add_neighbors<kFourFit>(sum_fours<kCodes>(v[0], a), sum_fours<kCodes>(v[1], a));
    const __m256i y =
        add_neighbors<kFourFit>(sum_fours<kCodes>(v[2], a), sum_fours<kCodes>(v[3], a));
    q[i] = add_neighbors<kEightFit>(x, y);
  }
  *first = _mm256_permute2x128_si256(q[0], q[1], 0x20);
  *second = _mm256_permute2x128_si256(q[0], q[1], 0x31);
}

// ---- scales of eight rows ----

inline uint32_t load_u32(const uint8_t *p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline int load_u16(const uint8_t *p) {
  uint16_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline __m256 load_halves(const RowPointers &rows, int64_t offset) {
  __m128i h = _mm_cvtsi32_si128(load_u16(rows.p[0] + offset));
  h = _mm_insert_epi16(h, load_u16(rows.p[1] + offset), 1);
  h = _mm_insert_epi16(h, load_u16(rows.p[2] + offset), 2);
  h = _mm_insert_epi16(h, load_u16(rows.p[3] + offset), 3);
  h = _mm_insert_epi16(h, load_u16(rows.p[4] + offset), 4);
  h = _mm_insert_epi16(h, load_u16(rows.p[5] + offset), 5);
  h = _mm_insert_epi16(h, load_u16(rows.p[6] + offset), 6);
  h = _mm_insert_epi16(h, load_u16(rows.p[7] + offset), 7);
  return _mm256_cvtph_ps(h);
}

// Two neighbouring f16 of each row.
inline void load_half_pairs(const RowPointers &rows, int64_t offset, __m256 *first,
                            __m256 *second) {
  const auto four = [&](int r) {
    __m128i v = _mm_cvtsi32_si128(static_cast<int>(load_u32(rows.p[r] + offset)));
    v = _mm_insert_epi32(v, static_cast<int>(load_u32(rows.p[r + 1] + offset)), 1);
    v = _mm_insert_epi32(v, static_cast<int>(load_u32(rows.p[r + 2] + offset)), 2);
    return _mm_insert_epi32(v, static_cast<int>(load_u32(rows.p[r + 3] + offset)), 3);
  };
  const __m128i low = four(0), high = four(4), mask = _mm_set1_epi32(0xffff);
  *first = _mm256_cvtph_ps(_mm_packus_epi32(_mm_and_si128(low, mask), _mm_and_si128(high, mask)));
  *second = _mm256_cvtph_ps(_mm_packus_epi32(_mm_srli_epi32(low, 16), _mm_srli_epi32(high, 16)));
}

// Eight bytes of each row to eight vectors of eight rows: out[2 * i] holds byte 2i of the rows in
// its lower and byte 2i + 1 in its upper eight bytes.
inline void transpose_bytes(const uint64_t rows[kRows], __m128i out[4]) {
  const auto pair = [&](int r) {
    return _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<long long>(rows[r])),
                             _mm_cvtsi64_si128(static_cast<long long>(rows[r + 1])));
  };
  const __m128i a = pair(0), b = pair(2), c = pair(4), d = pair(6);
  const __m128i e = _mm_unpacklo_epi16(a, b), f = _mm_unpackhi_epi16(a, b);
  const __m128i g = _mm_unpacklo_epi16(c, d), h = _mm_unpackhi_epi16(c, d);
  out[0] = _mm_unpacklo_epi32(e, g);
  out[1] = _mm_unpackhi_epi32(e, g);
  out[2] = _mm_unpacklo_epi32(f, h);
  out[3] = _mm_unpackhi_epi32(f, h);
}

// ---- codes of 32 elements of one row ----

// Bytes j of 16: low nibbles to elements 0 to 15, high ones to 16 to 31.
inline __m256i unpack_nibbles(const uint8_t *qs) {
  const __m256i both = _mm256_broadcastsi128_si256(load16(qs));
  const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
  return _mm256_and_si256(_mm256_srlv_epi32(both, shifts), _mm256_set1_epi8(15));
}

// Bit i of a 32-bit number to bit 4 of byte i.
inline __m256i spread_fifth_bits(uint32_t bits) {
  const __m256i byte_of = _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101,
                                             0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), byte_of);
  const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
  return _mm256_and_si256(is_set, _mm256_set1_epi8(16));
}

inline __m256i iq4_values(__m256i nibbles) {
  static constexpr int8_t kValues[16] = XLLM_IQ4_VALUES;
  const __m256i table =
      _mm256_broadcastsi128_si256(load16(reinterpret_cast<const uint8_t *>(kValues)));
  return _mm256_shuffle_epi8(table, nibbles);
}

// ---- plain blocks ----
// Each type: bytes of a block, whether it has a min, what its codes are above the value they stand
// for, and how they are unpacked.

struct Q4_0 {
  static constexpr int kBytes = sizeof(BlockQ4_0), kOffset = 8;
  static constexpr bool kHasMin = false;
  static constexpr Codes kCodes = Codes::kSmall;
  static __m256i codes(const uint8_t *block) { return unpack_nibbles(block + 2); }
};

struct Q4_1 {
  static constexpr int kBytes = sizeof(BlockQ4_1), kOffset = 0;
  static constexpr bool kHasMin = true;
  static constexpr Codes kCodes = Codes::kSmall;
  static __m256i codes(const uint8_t *block) { return unpack_nibbles(block + 4); }
};

struct Q5_0 {
  static constexpr int kBytes = sizeof(BlockQ5_0), kOffset = 16;
  static constexpr bool kHasMin = false;
  static constexpr Codes kCodes = Codes::kSmall;
  static __m256i codes(const uint8_t *block) {
    return _mm256_or_si256(unpack_nibbles(block + 6), spread_fifth_bits(load_u32(block + 2)));
  }
};

struct Q5_1 {
  static constexpr int kBytes = sizeof(BlockQ5_1), kOffset = 0;
  static constexpr bool kHasMin = true;
  static constexpr Codes kCodes = Codes::kSmall;
  static __m256i codes(const uint8_t *block) {
    return _mm256_or_si256(unpack_nibbles(block + 8), spread_fifth_bits(load_u32(block + 4)));
  }
};

struct Q8_0 {
  static constexpr int kBytes = sizeof(BlockQ8_0), kOffset = 0;
  static constexpr bool kHasMin = false;
  static constexpr Codes kCodes = Codes::kSigned;
  static __m256i codes(const uint8_t *block) { return load32(block + 2); }
};

struct IQ4_NL {
  static constexpr int kBytes = sizeof(BlockIQ4_NL), kOffset = 0;
  static constexpr bool kHasMin = false;
  static constexpr Codes kCodes = Codes::kSigned;
  static __m256i codes(const uint8_t *block) { return iq4_values(unpack_nibbles(block + 2)); }
};

template <typename Type, int T>
struct PlainProduct {
  static constexpr int kElements = kQuantBlock, kBytes = Type::kBytes;
  __m256 acc[T];

  void add_block(const RowPointers &rows, const ActRow *acts, int b) {
    const int64_t offset = int64_t{b} * Type::kBytes;
    __m256i w[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = Type::codes(rows.p[r] + offset);
    __m256 d, m = _mm256_setzero_ps();
    if (Type::kHasMin) {
      load_half_pairs(rows, offset, &d, &m);
    } else {
      d = load_halves(rows, offset);
    }
    for (int t = 0; t < T; ++t) {
      __m256i first, second;
      dot_rows<Type::kCodes>(w, load32(acts[t].q + b * kQuantBlock), &first, &second);
      __m256i sum = _mm256_add_epi32(first, second);
      if (Type::kOffset != 0) {
        const int shift = Type::kOffset * (acts[t].sum[2 * b] + acts[t].sum[2 * b + 1]);
        sum = _mm256_sub_epi32(sum, _mm256_set1_epi32(shift));
      }
      const __m256 scale = _mm256_mul_ps(d, _mm256_broadcast_ss(acts[t].d + b));
      acc[t] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sum), acc[t]);
      if (Type::kHasMin) acc[t] = _mm256_fmadd_ps(m, _mm256_broadcast_ss(acts[t].ds + b), acc[t]);
    }
  }
};

// ---- super-blocks ----
// Each type: where d and dmin lie, how its codes are unpacked, and its scales: per 32 (kPer32) or
// per 16 elements.

// The scales of eight rows, as f32: an integer times an integer sum below 2^24 is exact in f32 too.
// mins as i16 pairs per lane where they are per 16, as f32 where they are per 32.
struct SuperScales {
  __m256 scale[16];
  __m256 min32[8];
  __m256i min16[8];
};

inline __m256 bytes_to_float(__m128i bytes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}
inline __m256 signed_bytes_to_float(__m128i bytes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

struct KScales {
  uint64_t scale;
  uint64_t min;
};

// The eight 6-bit scales and mins of a row as bytes.
inline KScales unpack_scales_k4(const uint8_t *packed) {
  const uint32_t a = load_u32(packed), b = load_u32(packed + 4), c = load_u32(packed + 8);
  const uint32_t scale_high = (c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u);
  const uint32_t min_high = ((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u);
  return {(a & 0x3f3f3f3fu) | uint64_t{scale_high} << 32,
          (b & 0x3f3f3f3fu) | uint64_t{min_high} << 32};
}

inline void load_scales_k4(const RowPointers &rows, int64_t offset, SuperScales *out) {
  uint64_t scale[kRows], min[kRows];
  for (int r = 0; r < kRows; ++r) {
    const KScales k = unpack_scales_k4(rows.p[r] + offset);
    scale[r] = k.scale;
    min[r] = k.min;
  }
  __m128i s[4], m[4];
  transpose_bytes(scale, s);
  transpose_bytes(min, m);
  for (int i = 0; i < 4; ++i) {
    out->scale[2 * i] = bytes_to_float(s[i]);
    out->scale[2 * i + 1] = bytes_to_float(_mm_srli_si128(s[i], 8));
    out->min32[2 * i] = bytes_to_float(m[i]);
    out->min32[2 * i + 1] = bytes_to_float(_mm_srli_si128(m[i], 8));
  }
}

// Sixteen signed scale bytes of each row, per 16 elements.
inline void load_scales_16(const uint8_t (*bytes)[16], SuperScales *out) {
  for (int half = 0; half < 2; ++half) {
    uint64_t scale[kRows];
    for (int r = 0; r < kRows; ++r) std::memcpy(&scale[r], bytes[r] + 8 * half, 8);
    __m128i s[4];
    transpose_bytes(scale, s);
    for (int i = 0; i < 4; ++i) {
      out->scale[8 * half + 2 * i] = signed_bytes_to_float(s[i]);
      out->scale[8 * half + 2 * i + 1] = signed_bytes_to_float(_mm_srli_si128(s[i], 8));
    }
  }
}

enum class Min { kNone, kPer32, kPer16 };

inline __m256i nibbles_k4(const uint8_t *qs, int s) {
  const __m256i bytes = load32(qs + 32 * (s / 2));
  return _mm256_and_si256(s % 2 == 0 ? bytes : _mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
}

struct Q4_K {
  static constexpr int kBytes = sizeof(BlockQ4_K), kOffset = 0, kD = 0, kDMin = 2;
  static constexpr bool kPer32 = true;
  static constexpr Min kMin = Min::kPer32;
  static constexpr Codes kCodes = Codes::kSmall;
  static __m256i codes(const uint8_t *block, int s) { return nibbles_k4(block + 16, s); }
  static void scales(const RowPointers &rows, int64_t offset, SuperScales *out) {
    load_scales_k4(rows, offset + 4, out);
  }
};

struct Q5_K {
  static constexpr int kBytes = sizeof(BlockQ5_K), kOffset = 0, kD = 0, kDMin = 2;
  static constexpr bool kPer32 = true;
  static constexpr Min kMin = Min::kPer32;
  static constexpr Codes kCodes = Codes::kSmall;
  static __m256i codes(const uint8_t *block, int s) {
    const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << s));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(load32(block + 16), bit), bit);
    return _mm256_or_si256(nibbles_k4(block + 48, s),
                           _mm256_and_si256(is_set, _mm256_set1_epi8(16)));
  }
  static void scales(const RowPointers &rows, int64_t offset, SuperScales *out) {
    load_scales_k4(rows, offset + 4, out);
  }
};

struct Q6_K {
  static constexpr int kBytes = sizeof(BlockQ6_K), kOffset = 32, kD = 208, kDMin = -1;
  static constexpr bool kPer32 = false;
  static constexpr Min kMin = Min::kNone;
  static constexpr Codes kCodes = Codes::kMedium;
  static __m256i codes(const uint8_t *block, int s) {
    const int half = s / 4, k = s % 4;
    const __m256i low_bytes = load32(block + 64 * half + 32 * (k % 2));
    const __m256i low =
        _mm256_and_si256(k < 2 ? low_bytes : _mm256_srli_epi16(low_bytes, 4), _mm256_set1_epi8(15));
    const __m256i high_bytes = load32(block + 128 + 32 * half);
    // Bits 2k, 2k + 1 to bits 4, 5.
    const __m256i high = k == 0   ? _mm256_slli_epi16(high_bytes, 4)
                         : k == 1 ? _mm256_slli_epi16(high_bytes, 2)
                         : k == 2 ? high_bytes
                                  : _mm256_srli_epi16(high_bytes, 2);
    return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(48)));
  }
  static void scales(const RowPointers &rows, int64_t offset, SuperScales *out) {
    uint8_t bytes[kRows][16];
    for (int r = 0; r < kRows; ++r) std::memcpy(bytes[r], rows.p[r] + offset + 192, 16);
    load_scales_16(bytes, out);
  }
};

// Bits 2k, 2k + 1 of 32 bytes, k = s % 4.
inline __m256i pairs_k(const uint8_t *qs, int s) {
  const __m256i bytes = load32(qs + 32 * (s / 4));
  const int k = s % 4;
  const __m256i shifted = k == 0   ? bytes
                          : k == 1 ? _mm256_srli_epi16(bytes, 2)
                          : k == 2 ? _mm256_srli_epi16(bytes, 4)
                                   : _mm256_srli_epi16(bytes, 6);
  return _mm256_and_si256(shifted, _mm256_set1_epi8(3));
}

struct Q2_K {
  static constexpr int kBytes = sizeof(BlockQ2_K), kOffset = 0, kD = 80, kDMin = 82;
  static constexpr bool kPer32 = false;
  static constexpr Min kMin = Min::kPer16;
  static constexpr Codes kCodes = Codes::kSmall;
  static __m256i codes(const uint8_t *block, int s) { return pairs_k(block + 16, s); }
  static void scales(const RowPointers &rows, int64_t offset, SuperScales *out) {
    uint8_t scale[kRows][16];
    alignas(32) uint32_t min[8][kRows];
    const __m128i mask = _mm_set1_epi8(15);
    for (int r = 0; r < kRows; ++r) {
      const __m128i packed = load16(rows.p[r] + offset);
      _mm_storeu_si128(reinterpret_cast<__m128i *>(scale[r]), _mm_and_si128(packed, mask));
      const __m128i mins = _mm_and_si128(_mm_srli_epi16(packed, 4), mask);
      alignas(32) uint16_t wide[16];
      _mm256_store_si256(reinterpret_cast<__m256i *>(wide), _mm256_cvtepu8_epi16(mins));
      for (int s = 0; s < 8; ++s) std::memcpy(&min[s][r], wide + 2 * s, 4);
    }
    load_scales_16(scale, out);
    for (int s = 0; s < 8; ++s) out->min16[s] = load32(min[s]);
  }
};

struct Q3_K {
  static constexpr int kBytes = sizeof(BlockQ3_K), kOffset = 4, kD = 108, kDMin = -1;
  static constexpr bool kPer32 = false;
  static constexpr Min kMin = Min::kNone;
  static constexpr Codes kCodes = Codes::kSmall;
  static __m256i codes(const uint8_t *block, int s) {
    const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << s));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(load32(block), bit), bit);
    return _mm256_or_si256(pairs_k(block + 32, s), _mm256_and_si256(is_set, _mm256_set1_epi8(4)));
  }
  static void scales(const RowPointers &rows, int64_t offset, SuperScales *out) {
    uint8_t bytes[kRows][16];
    for (int r = 0; r < kRows; ++r) {
      const uint8_t *packed = rows.p[r] + offset + 96;
      const uint32_t low[2] = {load_u32(packed), load_u32(packed + 4)};
      const uint32_t high = load_u32(packed + 8);
      for (int i = 0; i < 4; ++i) {  // scales 4i to 4i + 3
        const uint32_t four = ((i < 2 ? low[i] : low[i - 2] >> 4) & 0x0f0f0f0fu) |
                              ((high >> (2 * i)) & 0x03030303u) << 4;
        std::memcpy(bytes[r] + 4 * i, &four, 4);
      }
      const __m128i scale = _mm_sub_epi8(load16(bytes[r]), _mm_set1_epi8(32));
      _mm_storeu_si128(reinterpret_cast<__m128i *>(bytes[r]), scale);
    }
    load_scales_16(bytes, out);
  }
};

struct IQ4_XS {
  static constexpr int kBytes = sizeof(BlockIQ4_XS), kOffset = 0, kD = 0, kDMin = -1;
  static constexpr bool kPer32 = true;
  static constexpr Min kMin = Min::kNone;
  static constexpr Codes kCodes = Codes::kSigned;
  static __m256i codes(const uint8_t *block, int s) {
    return iq4_values(unpack_nibbles(block + 8 + 16 * s));
  }
  static void scales(const RowPointers &rows, int64_t offset, SuperScales *out) {
    uint64_t scale[kRows];
    for (int r = 0; r < kRows; ++r) {
      const uint8_t *block = rows.p[r] + offset;
      // Nibble s and bits 2s of two bytes, to byte s.
      const uint64_t low = _pdep_u64(load_u32(block + 4), 0x0f0f0f0f0f0f0f0fu);
      const uint64_t high =
          _pdep_u64(static_cast<uint64_t>(load_u16(block + 2)), 0x3030303030303030u);
      scale[r] = low | high;
    }
    __m128i s[4];
    transpose_bytes(scale, s);
    const __m128i offset32 = _mm_set1_epi8(32);
    for (int i = 0; i < 4; ++i) {
      const __m128i bytes = _mm_sub_epi8(s[i], offset32);
      out->scale[2 * i] = signed_bytes_to_float(bytes);
      out->scale[2 * i + 1] = signed_bytes_to_float(_mm_srli_si128(bytes, 8));
    }
  }
};

// One 32 of a super-block; kS is a constant so that the shifts of codes() are.
template <typename Type, int T, int kS>
inline void add_sub_block(const RowPointers &rows, int64_t offset, const ActRow *acts, int b,
                          const SuperScales &scales, __m256 inner[T], __m256 least[T]) {
  const int a = 8 * b + kS;  // the activations' block
  __m256i w[kRows];
  for (int r = 0; r < kRows; ++r) w[r] = Type::codes(rows.p[r] + offset, kS);
  for (int t = 0; t < T; ++t) {
    __m256i first, second;
    dot_rows<Type::kCodes>(w, load32(acts[t].q + 32 * a), &first, &second);
    __m256 sum;
    if (Type::kPer32) {
      sum = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(first, second)), scales.scale[kS]);
    } else {
      if (Type::kOffset != 0) {
        first = _mm256_sub_epi32(first, _mm256_set1_epi32(Type::kOffset * acts[t].sum[2 * a]));
        second =
            _mm256_sub_epi32(second, _mm256_set1_epi32(Type::kOffset * acts[t].sum[2 * a + 1]));
      }
      // Exact: both products and their sum are integers below 2^24.
      sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), scales.scale[2 * kS + 1],
                            _mm256_mul_ps(_mm256_cvtepi32_ps(first), scales.scale[2 * kS]));
    }
    const __m256 d = _mm256_broadcast_ss(acts[t].d + a);
    inner[t] = _mm256_fmadd_ps(d, sum, inner[t]);
    if (Type::kMin == Min::kPer32)
      least[t] = _mm256_fmadd_ps(_mm256_broadcast_ss(acts[t].ds + a), scales.min32[kS], least[t]);
    if (Type::kMin == Min::kPer16) {
      int pair;
      std::memcpy(&pair, acts[t].sum + 2 * a, sizeof pair);
      const __m256i mins = _mm256_madd_epi16(scales.min16[kS], _mm256_set1_epi32(pair));
      least[t] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(mins), least[t]);
    }
  }
}

template <typename Type, int T>
struct SuperProduct {
  static constexpr int kElements = kSuperBlock, kBytes = Type::kBytes;
  __m256 acc[T];

  void add_block(const RowPointers &rows, const ActRow *acts, int b) {
    const int64_t offset = int64_t{b} * Type::kBytes;
    SuperScales scales;
    Type::scales(rows, offset, &scales);
    __m256 inner[T], least[T];
    for (int t = 0; t < T; ++t) inner[t] = least[t] = _mm256_setzero_ps();
    add_sub_block<Type, T, 0>(rows, offset, acts, b, scales, inner, least);
    add_sub_block<Type, T, 1>(rows, offset, acts, b, scales, inner, least);
    add_sub_block<Type, T, 2>(rows, offset, acts, b, scales, inner, least);
    add_sub_block<Type, T, 3>(rows, offset, acts, b, scales, inner, least);
    add_sub_block<Type, T, 4>(rows, offset, acts, b, scales, inner, least);
    add_sub_block<Type, T, 5>(rows, offset, acts, b, scales, inner, least);
    add_sub_block<Type, T, 6>(rows, offset, acts, b, scales, inner, least);
    add_sub_block<Type, T, 7>(rows, offset, acts, b, scales, inner, least);

    const __m256 d = load_halves(rows, offset + Type::kD);
    for (int t = 0; t < T; ++t) acc[t] = _mm256_fmadd_ps(d, inner[t], acc[t]);
    if (Type::kMin != Min::kNone) {
      const __m256 dmin = load_halves(rows, offset + Type::kDMin);
      for (int t = 0; t < T; ++t) acc[t] = _mm256_fnmadd_ps(dmin, least[t], acc[t]);
    }
  }
};

// ---- rows and tokens ----

// Eight rows (num_rows of them wanted) by T tokens.
template <typename Product, int T>
void multiply_rows(const RowPointers &rows, int num_rows, const ActRow *acts, int cols, Ahead ahead,
                   float *out, int64_t out_stride) {
  Product product;
  for (int t = 0; t < T; ++t) product.acc[t] = _mm256_setzero_ps();
  for (int b = 0; b < cols / Product::kElements; ++b) {
    ahead.advance(kRows * Product::kBytes);
    product.add_block(rows, acts, b);
  }
  for (int t = 0; t < T; ++t) {
    if (num_rows == kRows) {
      _mm256_storeu_ps(out + t * out_stride, product.acc[t]);
    } else {
      float whole[kRows];
      _mm256_storeu_ps(whole, product.acc[t]);
      std::memcpy(out + t * out_stride, whole, static_cast<size_t>(num_rows) * sizeof(float));
    }
  }
}

template <template <typename, int> class Product, typename Type>
void dot(const uint8_t *weights, uint64_t row_bytes, int num_rows, const ActRow *acts,
         int num_tokens, int cols, float *out, int64_t out_stride) {
  for (int r = 0; r < num_rows; r += kRows) {
    const int count = num_rows - r < kRows ? num_rows - r : kRows;
    RowPointers rows;
    // Lanes beyond the last row compute it again.
    for (int i = 0; i < kRows; ++i)
      rows.p[i] = weights + static_cast<uint64_t>(r + (i < count ? i : count - 1)) * row_bytes;
    Ahead ahead = {reinterpret_cast<uintptr_t>(rows.p[0]) + kRows * row_bytes};
    int t = 0;
    for (; t + 4 <= num_tokens; t += 4, ahead.next = 0) {
      multiply_rows<Product<Type, 4>, 4>(rows, count, acts + t, cols, ahead,
                                         out + t * out_stride + r, out_stride);
    }
    float *rest = out + t * out_stride + r;
    switch (num_tokens - t) {
      case 1:
        multiply_rows<Product<Type, 1>, 1>(rows, count, acts + t, cols, ahead, rest, out_stride);
        break;
      case 2:
        multiply_rows<Product<Type, 2>, 2>(rows, count, acts + t, cols, ahead, rest, out_stride);
        break;
      case 3:
        multiply_rows<Product<Type, 3>, 3>(rows, count, acts + t, cols, ahead, rest, out_stride);
        break;
      default:
        break;
    }
  }
}

}  // namespace

DotFn avx2_quant_dot(DType dtype) {
  switch (dtype) {
    case DType::kQ4_0:
      return dot<PlainProduct, Q4_0>;
    case DType::kQ4_1:
      return dot<PlainProduct, Q4_1>;
    case DType::kQ5_0:
      return dot<PlainProduct, Q5_0>;
    case DType::kQ5_1:
      return dot<PlainProduct, Q5_1>;
    case DType::kQ8_0:
      return dot<PlainProduct, Q8_0>;
    case DType::kIQ4_NL:
      return dot<PlainProduct, IQ4_NL>;
    case DType::kQ2_K:
      return dot<SuperProduct, Q2_K>;
    case DType::kQ3_K:
      return dot<SuperProduct, Q3_K>;
    case DType::kQ4_K:
      return dot<SuperProduct, Q4_K>;
    case DType::kQ5_K:
      return dot<SuperProduct, Q5_K>;
    case DType::kQ6_K:
      return dot<SuperProduct, Q6_K>;
    case DType::kIQ4_XS:
      return dot<SuperProduct, IQ4_XS>;
    default:
      return nullptr;
  }
}

}  // namespace xllm::cpu
