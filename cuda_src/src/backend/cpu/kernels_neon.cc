// The table of NEON kernels, with the dot products of ARMv8.2. Compiled for them: nothing of it may
// run before choose_kernels has looked.
//
// Scalar on purpose: products in the file's order of types that are interleaved (only tests read
// those), RoPE (as with AVX2: a head is a few hundred operations), and what row_math.h and
// kv_rows.h do element by element.
#include <arm_neon.h>

#include <cmath>
#include <cstring>

#include "backend/cpu/dot_neon.h"
#include "backend/cpu/dot_scalar.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/lane_kernels.h"
#include "backend/cpu/lanes_neon.h"
#include "backend/cpu/row_math.h"
#include "backend/cpu/tile_dot_table.h"

namespace xllm::cpu {
namespace {

using L = LanesNeon;

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Sixteen codes: to the nearest even integer, within -127..127.
inline int8x16_t round_codes(const float32x4_t x[4], float inverse) {
  int16x4_t c[4];
  for (int i = 0; i < 4; ++i) c[i] = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(x[i], inverse)));
  const int8x8_t low = vqmovn_s16(vcombine_s16(c[0], c[1]));
  const int8x8_t high = vqmovn_s16(vcombine_s16(c[2], c[3]));
  return vmaxq_s8(vcombine_s8(low, high), vdupq_n_s8(-127));
}

void quantize_neon(const float *f, int cols, int8_t *q, float *d, float *ds, int16_t *sum) {
  for (int b = 0; b < cols / 32; ++b, f += 32, q += 32) {
    float32x4_t x[8];
    uint32x4_t top = vdupq_n_u32(0);
    for (int i = 0; i < 8; ++i) {
      x[i] = vld1q_f32(f + 4 * i);
      top = vmaxq_u32(top, vandq_u32(vreinterpretq_u32_f32(x[i]), vdupq_n_u32(0x7fffffff)));
    }
    const uint32_t largest = vmaxvq_u32(top);
    const bool is_finite = largest < 0x7f800000u;
    const float scale = from_bits(to_bits(from_bits(largest) / 127.0f) & ~3u);
    int8x16_t codes[2] = {vdupq_n_s8(0), vdupq_n_s8(0)};
    if (is_finite && scale >= 0x1p-120f) {
      const float inverse = 1.0f / scale;
      codes[0] = round_codes(x, inverse);
      codes[1] = round_codes(x + 4, inverse);
      d[b] = scale;
    } else {
      d[b] = is_finite ? 0.0f : from_bits(0x7fc00000u);
    }
    vst1q_s8(q, codes[0]);
    vst1q_s8(q + 16, codes[1]);
    const int16_t first = vaddlvq_s8(codes[0]), second = vaddlvq_s8(codes[1]);
    ds[b] = d[b] * static_cast<float>(first + second);
    sum[2 * b] = first;
    sum[2 * b + 1] = second;
  }
}

Kernels make_kernels() {
  Kernels k = {};
  k.name = "neon";
  k.tile_rows = kNeonTileRows;
  for (uint32_t type = 0; type < 32; ++type) {
    const auto dtype = static_cast<DType>(type);
    k.dots[type] = neon_quant_dot(dtype);
    if (k.dots[type] == nullptr) k.dots[type] = scalar_quant_dot(dtype);
    k.tiles[type] = neon_tile_dot(dtype);
  }
  k.quantize = quantize_neon;
  set_lane_kernels<L>(&k);
  return k;
}

}  // namespace

const Kernels &neon_kernels() {
  static const Kernels kernels = make_kernels();
  return kernels;
}

}  // namespace xllm::cpu
