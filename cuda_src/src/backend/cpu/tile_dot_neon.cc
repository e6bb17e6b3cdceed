// Products of interleaved weights with NEON dot products: eight rows in two registers, four byte
// products and their sum per lane in one instruction, sixteen activations to a register of their
// own.
#include <arm_neon.h>

#include "backend/cpu/tile_dot.h"
#include "backend/cpu/tile_dot_table.h"

namespace xllm::cpu {
namespace {

struct TileNeon {
  struct I {
    int32x4_t low, high;
  };
  struct F {
    float32x4_t low, high;
  };
  static constexpr int kRows = 8;
  // 32 registers: sixteen of codes, four sums for each token.
  static constexpr int kMaxTokens = kNeonTileRows;
  static constexpr int kRaised = 0;         // signed by signed bytes
  static constexpr bool kTogether = false;  // sixteen registers

  static I load(const uint8_t *p) {
    return {vreinterpretq_s32_u8(vld1q_u8(p)), vreinterpretq_s32_u8(vld1q_u8(p + 16))};
  }
  static F load_halves(const uint8_t *p) { return from_halves(vreinterpretq_u16_u8(vld1q_u8(p))); }
  static F low_halves(I x) {
    return from_halves(vuzp1q_u16(vreinterpretq_u16_s32(x.low), vreinterpretq_u16_s32(x.high)));
  }
  static F high_halves(I x) {
    return from_halves(vuzp2q_u16(vreinterpretq_u16_s32(x.low), vreinterpretq_u16_s32(x.high)));
  }
  static I set1(int x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
  static I band(I a, I b) { return {vandq_s32(a.low, b.low), vandq_s32(a.high, b.high)}; }
  static I bor(I a, I b) { return {vorrq_s32(a.low, b.low), vorrq_s32(a.high, b.high)}; }
  template <int n>
  static I shift_left(I a) {
    return {vshlq_n_s32(a.low, n), vshlq_n_s32(a.high, n)};
  }
  template <int n>
  static I shift_right(I a) {
    if constexpr (n == 0) {
      return a;  // which the instruction cannot say
    } else {
      return {logical_shift_right<n>(a.low), logical_shift_right<n>(a.high)};
    }
  }
  template <int n>
  static I shift_right_signed(I a) {
    return {vshrq_n_s32(a.low, n), vshrq_n_s32(a.high, n)};
  }
  static I signed_codes(I x) { return x; }

  static F zero() { return set1_float(0); }
  static F set1_float(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static F to_float(I a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
  static F mul(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
  static F fma(F a, F b, F c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }
  static F negated_fma(F a, F b, F c) {
    return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
  }
  static void store(float *p, F a) {
    vst1q_f32(p, a.low);
    vst1q_f32(p + 4, a.high);
  }

  // All kinds of codes are signed bytes here.
  template <Codes kCodes, int N>
  static I dot(const I *w, const int8_t *a, I start) {
#pragma GCC unroll 2
    for (int g = 0; g < N; g += 4) {
      const int8x16_t acts = vld1q_s8(a + 4 * g);
      start = dot_word<0>(w[g], acts, start);
      start = dot_word<1>(w[g + 1], acts, start);
      start = dot_word<2>(w[g + 2], acts, start);
      start = dot_word<3>(w[g + 3], acts, start);
    }
    return start;
  }

 private:
  static F from_halves(uint16x8_t x) {
    const float16x8_t halves = vreinterpretq_f16_u16(x);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  template <int n>
  static int32x4_t logical_shift_right(int32x4_t a) {
    return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), n));
  }
  // Plus the dots of a word of each row with activations 4 * kWord to 4 * kWord + 3.
  template <int kWord>
  static I dot_word(I w, int8x16_t acts, I sum) {
    return {vdotq_laneq_s32(sum.low, vreinterpretq_s8_s32(w.low), acts, kWord),
            vdotq_laneq_s32(sum.high, vreinterpretq_s8_s32(w.high), acts, kWord)};
  }
};

}  // namespace

TileFn neon_tile_dot(DType dtype) { return TileProducts<TileNeon>::find(dtype); }

}  // namespace xllm::cpu
