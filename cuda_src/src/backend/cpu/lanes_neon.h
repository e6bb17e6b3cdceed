// The lanes of lanes_scalar.h as two NEON registers; every operation has the same result, bit for
// bit. Only for files that are compiled for AArch64.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace xllm::cpu {
namespace {

struct LanesNeon {
  struct F {
    float32x4_t low, high;
  };

  static F zero() { return set1(0); }
  static F set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static F load(const float *p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static F load_half(const uint16_t *p) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  static F load_bfloat(const uint16_t *p) {
    const uint16x8_t x = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(x)), 16)),
            vreinterpretq_f32_u32(vshlq_n_u32(vmovl_high_u16(x), 16))};
  }
  static F load_int8(const int8_t *p) { return from_int8(vld1_s8(p)); }
  static F load_int4(const uint8_t *p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    const uint8x8_t bytes = vcreate_u8(four);
    const uint8x8_t codes = vzip1_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4));
    return from_int8(vsub_s8(vreinterpret_s8_u8(codes), vdup_n_s8(8)));
  }
  static void store(float *p, F a) {
    vst1q_f32(p, a.low);
    vst1q_f32(p + 4, a.high);
  }
  static void store_half(uint16_t *p, F a) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.low), a.high)));
  }

  static F add(F a, F b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
  static F sub(F a, F b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
  static F mul(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
  static F div(F a, F b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
  static F fma(F a, F b, F c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }
  // note: not vmaxq and vminq, which keep the NaN of either side.
  static F max(F a, F b) { return select_less(b, a, a, b); }
  static F min(F a, F b) { return select_less(a, b, a, b); }
  static F select_less(F a, F b, F yes, F no) {
    return {vbslq_f32(vcltq_f32(a.low, b.low), yes.low, no.low),
            vbslq_f32(vcltq_f32(a.high, b.high), yes.high, no.high)};
  }
  static F pow2_of_shifted(F shifted) {
    return {pow2_of_shifted(shifted.low), pow2_of_shifted(shifted.high)};
  }
  static float sum(F a) {
    const float32x4_t pairs = vpaddq_f32(a.low, a.high);
    return vpadds_f32(vget_low_f32(vpaddq_f32(pairs, pairs)));
  }
  static F sums(const F a[8]) { return {sums_of_four(a), sums_of_four(a + 4)}; }
  static float max_lane(F a) { return vmaxvq_f32(vmaxq_f32(a.low, a.high)); }

 private:
  static F from_int8(int8x8_t x) {
    const int16x8_t wide = vmovl_s8(x);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
  }
  static float32x4_t pow2_of_shifted(float32x4_t shifted) {
    const uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23);
    return vreinterpretq_f32_u32(vaddq_u32(exponent, vdupq_n_u32(0x3f800000)));
  }
  static float32x4_t sums_of_four(const F a[4]) {
    // Each half of x and y holds the two sums of four lanes of one vector.
    const float32x4_t x =
        vpaddq_f32(vpaddq_f32(a[0].low, a[0].high), vpaddq_f32(a[1].low, a[1].high));
    const float32x4_t y =
        vpaddq_f32(vpaddq_f32(a[2].low, a[2].high), vpaddq_f32(a[3].low, a[3].high));
    return vpaddq_f32(x, y);
  }
};

}  // namespace
}  // namespace xllm::cpu
