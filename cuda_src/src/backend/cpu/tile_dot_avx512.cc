// Products of interleaved weights with AVX-512 VNNI: sixteen rows to a register, four byte products
// and their sum per lane in one instruction, the activations broadcast from memory.
// note: GCC 12 takes the undefined operands inside its own AVX-512 header for a mistake of ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "backend/cpu/tile_dot.h"
#include "backend/cpu/tile_dot_table.h"

namespace xllm::cpu {
namespace {

struct TileAvx512 {
  using I = __m512i;
  using F = __m512;
  static constexpr int kRows = 16;
  // 32 registers: eight of codes, two sums for each token, and what is in flight.
  static constexpr int kMaxTokens = kAvx512TileRows;
  // VNNI multiplies unsigned by signed bytes: int8 codes are raised by this.
  static constexpr int kRaised = 128;
  static constexpr bool kTogether = true;

  static I load(const uint8_t *p) { return _mm512_loadu_si512(p); }
  static F load_halves(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  }
  static F low_halves(I x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
  static F high_halves(I x) { return low_halves(_mm512_srli_epi32(x, 16)); }
  static I set1(int x) { return _mm512_set1_epi32(x); }
  static I band(I a, I b) { return _mm512_and_si512(a, b); }
  static I bor(I a, I b) { return _mm512_or_si512(a, b); }
  template <int n>
  static I shift_left(I a) {
    return _mm512_slli_epi32(a, n);
  }
  template <int n>
  static I shift_right(I a) {
    return _mm512_srli_epi32(a, n);
  }
  template <int n>
  static I shift_right_signed(I a) {
    return _mm512_srai_epi32(a, n);
  }
  static I signed_codes(I x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }

  static F zero() { return _mm512_setzero_ps(); }
  static F set1_float(float x) { return _mm512_set1_ps(x); }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F negated_fma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static void store(float *p, F a) { _mm512_storeu_ps(p, a); }

  template <Codes kCodes, int N>
  static I dot(const I *w, const int8_t *a, I start) {
#pragma GCC unroll 8
    for (int g = 0; g < N; ++g) {
      int four;
      std::memcpy(&four, a + 4 * g, 4);
      start = _mm512_dpbusd_epi32(start, w[g], _mm512_set1_epi32(four));
    }
    return start;
  }
  template <int N, int T>
  static void dots(const I *w, const int8_t *a, I *sums) {
#pragma GCC unroll 8
    for (int g = 0; g < N; ++g) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        int four;
        std::memcpy(&four, a + 32 * t + 4 * g, 4);
        sums[t] = _mm512_dpbusd_epi32(sums[t], w[g], _mm512_set1_epi32(four));
      }
    }
  }
};

}  // namespace

TileFn avx512_tile_dot(DType dtype) { return TileProducts<TileAvx512>::find(dtype); }

}  // namespace xllm::cpu
