// One element of a quantised row, as the file has it: what the per-slot form multiplies with, bit
// for bit what the CPU's dequantiser gives. Formats: tensor/quant.h.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

// GGUF's numbers (tensor/dtype.h).
enum RowType : int {
  kRowF32 = 0,
  kRowF16 = 1,
  kRowQ4_0 = 2,
  kRowQ4_1 = 3,
  kRowQ5_0 = 6,
  kRowQ5_1 = 7,
  kRowQ8_0 = 8,
  kRowQ2_K = 10,
  kRowQ3_K = 11,
  kRowQ4_K = 12,
  kRowQ5_K = 13,
  kRowQ6_K = 14,
  kRowIQ4_NL = 20,
  kRowIQ4_XS = 23,
  kRowBF16 = 30,
};

// The 6-bit scale and min of sub-block s of q4_k and q5_k.
__device__ __forceinline__ int k4_scale(const uint8_t *scales, int s) {
  return s < 4 ? scales[s] & 63 : (scales[s + 4] & 15) | (scales[s - 4] >> 6) << 4;
}
__device__ __forceinline__ int k4_min(const uint8_t *scales, int s) {
  return s < 4 ? scales[s + 4] & 63 : (scales[s + 4] >> 4) | (scales[s] >> 6) << 4;
}

__device__ __forceinline__ float half_value(uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}

// Element `col` of the row that begins at `row`.
__device__ __forceinline__ float row_element(int type, const uint8_t *row, int64_t col) {
  const int k = static_cast<int>(col % kQuantBlock), e = static_cast<int>(col % kSuperBlock);
  const int64_t plain = col / kQuantBlock, super = col / kSuperBlock;
  const int nibble = 4 * (k >> 4);
  switch (type) {
    case kRowF32:
      return reinterpret_cast<const float *>(row)[col];
    case kRowF16:
      return half_value(reinterpret_cast<const uint16_t *>(row)[col]);
    case kRowBF16:
      return __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t *>(row)[col])
                             << 16);
    case kRowQ4_0: {
      const auto &b = reinterpret_cast<const BlockQ4_0 *>(row)[plain];
      return half_value(b.d) * static_cast<float>((b.qs[k & 15] >> nibble & 15) - 8);
    }
    case kRowQ4_1: {
      const auto &b = reinterpret_cast<const BlockQ4_1 *>(row)[plain];
      const float product = half_value(b.d) * static_cast<float>(b.qs[k & 15] >> nibble & 15);
      return product + half_value(b.m);
    }
    case kRowQ5_0: {
      const auto &b = reinterpret_cast<const BlockQ5_0 *>(row)[plain];
      const int q = (b.qs[k & 15] >> nibble & 15) | (b.qh[k / 8] >> (k & 7) & 1) << 4;
      return half_value(b.d) * static_cast<float>(q - 16);
    }
    case kRowQ5_1: {
      const auto &b = reinterpret_cast<const BlockQ5_1 *>(row)[plain];
      const int q = (b.qs[k & 15] >> nibble & 15) | (b.qh[k / 8] >> (k & 7) & 1) << 4;
      const float product = half_value(b.d) * static_cast<float>(q);
      return product + half_value(b.m);
    }
    case kRowQ8_0: {
      const auto &b = reinterpret_cast<const BlockQ8_0 *>(row)[plain];
      return half_value(b.d) * static_cast<float>(b.qs[k]);
    }
    case kRowIQ4_NL: {
      constexpr int8_t kValues[16] = XLLM_IQ4_VALUES;
      const auto &b = reinterpret_cast<const BlockIQ4_NL *>(row)[plain];
      return half_value(b.d) * static_cast<float>(kValues[b.qs[k & 15] >> nibble & 15]);
    }
    case kRowQ2_K: {
      const auto &b = reinterpret_cast<const BlockQ2_K *>(row)[super];
      const int q = b.qs[e / 128 * 32 + k] >> (2 * (e % 128 / 32)) & 3;
      const int scale = b.scales[e / 16];
      const float product =
          (half_value(b.d) * static_cast<float>(scale & 15)) * static_cast<float>(q);
      const float shift = half_value(b.dmin) * static_cast<float>(scale >> 4);
      return product - shift;
    }
    case kRowQ3_K: {
      const auto &b = reinterpret_cast<const BlockQ3_K *>(row)[super];
      const int low = b.qs[e / 128 * 32 + k] >> (2 * (e % 128 / 32)) & 3;
      const int q = low - (b.hmask[k] >> (e / 32) & 1 ? 0 : 4);
      const int s = e / 16;
      const int scale = ((b.scales[s & 7] >> (4 * (s >> 3)) & 15) |
                         (b.scales[8 + (s & 3)] >> (2 * (s >> 2)) & 3) << 4) -
                        32;
      return (half_value(b.d) * static_cast<float>(scale)) * static_cast<float>(q);
    }
    case kRowQ4_K: {
      const auto &b = reinterpret_cast<const BlockQ4_K *>(row)[super];
      const int s = e / 32, q = b.qs[e / 64 * 32 + k] >> (4 * (s & 1)) & 15;
      const float product =
          (half_value(b.d) * static_cast<float>(k4_scale(b.scales, s))) * static_cast<float>(q);
      const float shift = half_value(b.dmin) * static_cast<float>(k4_min(b.scales, s));
      return product - shift;
    }
    case kRowQ5_K: {
      const auto &b = reinterpret_cast<const BlockQ5_K *>(row)[super];
      const int s = e / 32;
      const int q = (b.qs[e / 64 * 32 + k] >> (4 * (s & 1)) & 15) | (b.qh[k] >> s & 1) << 4;
      const float product =
          (half_value(b.d) * static_cast<float>(k4_scale(b.scales, s))) * static_cast<float>(q);
      const float shift = half_value(b.dmin) * static_cast<float>(k4_min(b.scales, s));
      return product - shift;
    }
    case kRowQ6_K: {
      const auto &b = reinterpret_cast<const BlockQ6_K *>(row)[super];
      const int part = e % 128 / 32;
      const int low = b.ql[e / 128 * 64 + 32 * (part & 1) + k] >> (4 * (part >> 1)) & 15;
      const int q = low | (b.qh[e / 128 * 32 + k] >> (2 * part) & 3) << 4;
      return (half_value(b.d) * static_cast<float>(b.scales[e / 16])) * static_cast<float>(q - 32);
    }
    case kRowIQ4_XS: {
      constexpr int8_t kValues[16] = XLLM_IQ4_VALUES;
      const auto &b = reinterpret_cast<const BlockIQ4_XS *>(row)[super];
      const int s = e / 32;
      const int scale =
          ((b.scales_l[s / 2] >> (4 * (s & 1)) & 15) | (b.scales_h >> (2 * s) & 3) << 4) - 32;
      const int q = kValues[b.qs[16 * s + (k & 15)] >> nibble & 15];
      return (half_value(b.d) * static_cast<float>(scale)) * static_cast<float>(q);
    }
  }
  return 0;
}

struct DequantizeArgs {
  const uint8_t *raw;  // [num_rows], each row_bytes long, aligned to 2 (f32 to 4)
  int64_t row_bytes, num_cols;
  int type;    // RowType
  float *out;  // [num_rows, num_cols]
};

// One element per thread; grid: x columns / 256, y rows. Runs once per matrix, faster than the
// upload.
__global__ void __launch_bounds__(256)
    dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
  wait_for_previous_kernel();
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (col >= args.num_cols) return;
  const int64_t row = blockIdx.y;
  args.out[row * args.num_cols + col] =
      row_element(args.type, args.raw + row * args.row_bytes, col);
}

}  // namespace cuda
}  // namespace xllm
