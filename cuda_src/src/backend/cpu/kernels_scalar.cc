// The table of plain C++ kernels.
#include <cmath>

#include "backend/cpu/dot_scalar.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/lane_kernels.h"
#include "backend/cpu/lanes_scalar.h"
#include "backend/cpu/row_math.h"

namespace xllm::cpu {
namespace {

using L = LanesScalar;

void quantize_scalar(const float *f, int cols, int8_t *q, float *d, float *ds, int16_t *sum) {
  for (int b = 0; b < cols / 32; ++b, f += 32, q += 32) {
    // Magnitudes compare as their bits do, with infinity and NaN on top.
    uint32_t top = 0;
    for (int i = 0; i < 32; ++i) {
      const uint32_t bits = float_bits(f[i]) & 0x7fffffffu;
      top = bits > top ? bits : top;
    }
    const bool is_finite = top < 0x7f800000u;
    const float scale = float_from_bits(float_bits(float_from_bits(top) / 127.0f) & ~3u);
    int sums[2] = {0, 0};
    if (is_finite && scale >= 0x1p-120f) {
      const float inverse = 1.0f / scale;
      for (int i = 0; i < 32; ++i) {
        const long code = std::lrintf(f[i] * inverse);
        q[i] = static_cast<int8_t>(code > 127 ? 127 : code < -127 ? -127 : code);
        sums[i / 16] += q[i];
      }
      d[b] = scale;
    } else {
      for (int i = 0; i < 32; ++i) q[i] = 0;
      d[b] = is_finite ? 0.0f : float_from_bits(0x7fc00000u);
    }
    ds[b] = d[b] * static_cast<float>(sums[0] + sums[1]);
    sum[2 * b] = static_cast<int16_t>(sums[0]);
    sum[2 * b + 1] = static_cast<int16_t>(sums[1]);
  }
}

Kernels make_kernels() {
  Kernels k = {};
  k.name = "scalar";
  for (uint32_t type = 0; type < 32; ++type)
    k.dots[type] = scalar_quant_dot(static_cast<DType>(type));
  k.quantize = quantize_scalar;
  set_lane_kernels<L>(&k);
  return k;
}

}  // namespace

const Kernels &scalar_kernels() {
  static const Kernels kernels = make_kernels();
  return kernels;
}

}  // namespace xllm::cpu
