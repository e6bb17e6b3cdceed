#include "backend/cpu/dequant.h"

#include <cstring>

#include "backend/cpu/block_codes.h"

namespace xllm::cpu {
namespace {

template <typename Block>
void dequantize_plain(const void *row, int64_t cols, bool has_min, float *out) {
  const auto *blocks = static_cast<const Block *>(row);
  for (int64_t b = 0; b < cols / kQuantBlock; ++b, out += kQuantBlock) {
    PlainCodes codes;
    decode(blocks[b], &codes);
    for (int i = 0; i < kQuantBlock; ++i) {
      const float product = codes.d * static_cast<float>(codes.q[i]);
      out[i] = has_min ? product + codes.m : product;
    }
  }
}

template <typename Block>
void dequantize_super(const void *row, int64_t cols, bool has_min, float *out) {
  const auto *blocks = static_cast<const Block *>(row);
  for (int64_t b = 0; b < cols / kSuperBlock; ++b, out += kSuperBlock) {
    SuperCodes codes;
    decode(blocks[b], &codes);
    for (int i = 0; i < kSuperBlock; ++i) {
      const float product =
          (codes.d * static_cast<float>(codes.scale[i / 16])) * static_cast<float>(codes.q[i]);
      out[i] = has_min ? product - codes.dmin * static_cast<float>(codes.min[i / 16]) : product;
    }
  }
}

}  // namespace

void dequantize_row(DType dtype, const void *row, int64_t cols, float *out) {
  switch (dtype) {
    case DType::kF32:
      std::memcpy(out, row, static_cast<size_t>(cols) * sizeof(float));
      return;
    case DType::kF16:
      for (int64_t i = 0; i < cols; ++i)
        out[i] = half_to_float(static_cast<const uint16_t *>(row)[i]);
      return;
    case DType::kBF16:
      for (int64_t i = 0; i < cols; ++i)
        out[i] = bfloat16_to_float(static_cast<const uint16_t *>(row)[i]);
      return;
    case DType::kQ4_0:
      return dequantize_plain<BlockQ4_0>(row, cols, false, out);
    case DType::kQ4_1:
      return dequantize_plain<BlockQ4_1>(row, cols, true, out);
    case DType::kQ5_0:
      return dequantize_plain<BlockQ5_0>(row, cols, false, out);
    case DType::kQ5_1:
      return dequantize_plain<BlockQ5_1>(row, cols, true, out);
    case DType::kQ8_0:
      return dequantize_plain<BlockQ8_0>(row, cols, false, out);
    case DType::kIQ4_NL:
      return dequantize_plain<BlockIQ4_NL>(row, cols, false, out);
    case DType::kQ2_K:
      return dequantize_super<BlockQ2_K>(row, cols, true, out);
    case DType::kQ3_K:
      return dequantize_super<BlockQ3_K>(row, cols, false, out);
    case DType::kQ4_K:
      return dequantize_super<BlockQ4_K>(row, cols, true, out);
    case DType::kQ5_K:
      return dequantize_super<BlockQ5_K>(row, cols, true, out);
    case DType::kQ6_K:
      return dequantize_super<BlockQ6_K>(row, cols, false, out);
    case DType::kIQ4_XS:
      return dequantize_super<BlockIQ4_XS>(row, cols, false, out);
  }
}

}  // namespace xllm::cpu
