// The table of AVX2 kernels (with FMA, F16C and BMI2). Compiled for AVX2: nothing of it may run
// before choose_kernels has looked.
#include <immintrin.h>

#include <cmath>

#include "backend/cpu/dot_avx2.h"
#include "backend/cpu/dot_scalar.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/lane_kernels.h"
#include "backend/cpu/lanes_avx2.h"
#include "backend/cpu/row_math.h"
#include "backend/cpu/tile_dot_table.h"

namespace xllm::cpu {
namespace {

using L = LanesAvx2;

// The largest 32-bit lane.
inline uint32_t max_lane_u32(__m256i a) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

inline float from_bits(uint32_t bits) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits))));
}
inline uint32_t to_bits(float x) {
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(x))));
}

void quantize_avx2(const float *f, int cols, int8_t *q, float *d, float *ds, int16_t *sum) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int b = 0; b < cols / 32; ++b, f += 32, q += 32) {
    __m256 x[4];
    __m256i top = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm256_loadu_ps(f + 8 * i);
      top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(x[i]), magnitude));
    }
    const uint32_t largest = max_lane_u32(top);
    const bool is_finite = largest < 0x7f800000u;
    const float scale = from_bits(to_bits(from_bits(largest) / 127.0f) & ~3u);
    __m256i codes = _mm256_setzero_si256();
    if (is_finite && scale >= 0x1p-120f) {
      const __m256 inverse = _mm256_set1_ps(1.0f / scale);
      __m256i c[4];
      for (int i = 0; i < 4; ++i) c[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], inverse));
      codes = _mm256_packs_epi16(_mm256_packs_epi32(c[0], c[1]), _mm256_packs_epi32(c[2], c[3]));
      codes = _mm256_permutevar8x32_epi32(codes, order);
      codes = _mm256_max_epi8(codes, _mm256_set1_epi8(-127));
      d[b] = scale;
    } else {
      d[b] = is_finite ? 0.0f : from_bits(0x7fc00000u);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(q), codes);
    // Sums of 16: pairs, then fours, then across.
    const __m256i fours =
        _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
    const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    const __m256i sixteens = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0xb1));
    const int first = _mm256_cvtsi256_si32(sixteens);
    const int second = _mm_cvtsi128_si32(_mm256_extracti128_si256(sixteens, 1));
    ds[b] = d[b] * static_cast<float>(first + second);
    sum[2 * b] = static_cast<int16_t>(first);
    sum[2 * b + 1] = static_cast<int16_t>(second);
  }
}

Kernels make_kernels() {
  Kernels k = {};
  k.name = "avx2";
  k.tile_rows = kAvx2TileRows;
  for (uint32_t type = 0; type < 32; ++type) {
    const auto dtype = static_cast<DType>(type);
    k.dots[type] = avx2_quant_dot(dtype);
    if (k.dots[type] == nullptr) k.dots[type] = scalar_quant_dot(dtype);
    k.tiles[type] = avx2_tile_dot(dtype);
  }
  k.quantize = quantize_avx2;
  set_lane_kernels<L>(&k);
  return k;
}

}  // namespace

const Kernels &avx2_kernels() {
  static const Kernels kernels = make_kernels();
  return kernels;
}

}  // namespace xllm::cpu
