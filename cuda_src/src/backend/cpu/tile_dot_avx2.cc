// Products of interleaved weights with AVX2: eight rows to a register. Pairs of byte products are
// added in 16 bits as far as the type's codes allow.
#include <immintrin.h>

#include "backend/cpu/tile_dot.h"
#include "backend/cpu/tile_dot_table.h"

namespace xllm::cpu {
namespace {

struct TileAvx2 {
  using I = __m256i;
  using F = __m256;
  static constexpr int kRows = 8;
  static constexpr int kMaxTokens = kAvx2TileRows;  // 16 registers
  static constexpr int kRaised = 0;
  static constexpr bool kTogether = false;  // sixteen registers

  static I load(const uint8_t *p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  }
  static F load_halves(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  static F low_halves(I x) { return high_halves(_mm256_slli_epi32(x, 16)); }
  static F high_halves(I x) {
    const I high = _mm256_srli_epi32(x, 16);
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
  }
  static I set1(int x) { return _mm256_set1_epi32(x); }
  static I band(I a, I b) { return _mm256_and_si256(a, b); }
  static I bor(I a, I b) { return _mm256_or_si256(a, b); }
  template <int n>
  static I shift_left(I a) {
    return _mm256_slli_epi32(a, n);
  }
  template <int n>
  static I shift_right(I a) {
    return _mm256_srli_epi32(a, n);
  }
  template <int n>
  static I shift_right_signed(I a) {
    return _mm256_srai_epi32(a, n);
  }
  static I signed_codes(I x) { return x; }

  static F zero() { return _mm256_setzero_ps(); }
  static F set1_float(float x) { return _mm256_set1_ps(x); }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F negated_fma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static void store(float *p, F a) { _mm256_storeu_ps(p, a); }

  template <Codes kCodes, int N>
  static I dot(const I *w, const int8_t *a, I start) {
    // Words whose pairs of products fit in 16 bits together: 2 * 15 * 127 * 8, 2 * 31 * 127 * 4,
    // 2 * 63 * 127 * 2 and, the activations' -128 not occurring, 2 * 128 * 127.
    constexpr int kFit = kCodes == Codes::k4Bits   ? 8
                         : kCodes == Codes::k5Bits ? 4
                         : kCodes == Codes::k6Bits ? 2
                                                   : 1;
    constexpr int kSteps = kFit < N ? kFit : N;
    const I ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int first = 0; first < N; first += kSteps) {
      I pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int g = first; g < first + kSteps; ++g) {
        int four;
        std::memcpy(&four, a + 4 * g, 4);
        const I b = _mm256_set1_epi32(four);
        const I p = kCodes == Codes::kSigned
                        ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[g]), _mm256_sign_epi8(b, w[g]))
                        : _mm256_maddubs_epi16(w[g], b);
        pairs = g == first ? p : _mm256_add_epi16(pairs, p);
      }
      start = _mm256_add_epi32(start, _mm256_madd_epi16(pairs, ones));
    }
    return start;
  }
};

}  // namespace

TileFn avx2_tile_dot(DType dtype) { return TileProducts<TileAvx2>::find(dtype); }

}  // namespace xllm::cpu
