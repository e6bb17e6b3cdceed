// Rows of the KV cache from and to f32, over eight lanes L. tensor/kv.h describes the bytes,
// kernels.h the rounding. Internal linkage: see lanes_scalar.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "backend/cpu/row_math.h"
#include "tensor/kv.h"

namespace xllm::cpu {
namespace {

template <typename L>
inline void store_half_row(const float *row, int n, uint16_t *out) {
  int i = 0;
  for (; i + 8 <= n; i += 8) L::store_half(out + i, L::load(row + i));
  if (i < n) {
    uint16_t whole[8];
    L::store_half(whole, load_tail<L>(row, i, n));
    std::memcpy(out + i, whole, static_cast<size_t>(n - i) * sizeof(uint16_t));
  }
}

template <typename L>
inline void load_half_row(const uint16_t *row, int n, float *out) {
  int i = 0;
  for (; i + 8 <= n; i += 8) L::store(out + i, L::load_half(row + i));
  if (i < n) {
    uint16_t padded[8] = {};
    std::memcpy(padded, row + i, static_cast<size_t>(n - i) * sizeof(uint16_t));
    store_tail<L>(out, i, n, L::load_half(padded));
  }
}

// 32 channels to codes of -max_code..max_code; returns the scale as f16 bits.
template <typename L>
inline uint16_t quantize_kv_group(const float *x, int max_code, int8_t codes[kKvGroup]) {
  // Magnitudes compare as their bits do, with infinity and NaN on top.
  uint32_t top = 0;
  for (int i = 0; i < kKvGroup; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffffu;
    top = bits > top ? bits : top;
  }
  std::memset(codes, 0, kKvGroup);
  if (top >= 0x7f800000u) return 0x7e00u;  // NaN, so that the scores show it
  float largest;
  std::memcpy(&largest, &top, sizeof largest);
  const float wanted = largest / static_cast<float>(max_code);
  uint16_t halves[8];
  L::store_half(halves, L::set1(wanted < 65504.0f ? wanted : 65504.0f));
  float scales[8];
  L::store(scales, L::load_half(halves));
  if (scales[0] == 0) return 0;
  const float inverse = 1.0f / scales[0], limit = static_cast<float>(max_code);
  for (int i = 0; i < kKvGroup; ++i) {
    const float scaled = x[i] * inverse;
    const float bounded = scaled > limit ? limit : scaled < -limit ? -limit : scaled;
    codes[i] = static_cast<int8_t>(std::lrintf(bounded));
  }
  return halves[0];
}

template <typename L>
inline void store_kv_row(const KvLayout &layout, const float *row, int offset, uint8_t *page) {
  uint8_t *out = page + layout.row_bytes() * static_cast<uint64_t>(offset);
  const int n = layout.head_dim;
  if (layout.type == KvType::kF32) {
    std::memcpy(out, row, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  if (layout.type == KvType::kF16) {
    store_half_row<L>(row, n, reinterpret_cast<uint16_t *>(out));
    return;
  }
  auto *scales = reinterpret_cast<uint16_t *>(
      page + layout.scales_offset() + layout.scale_row_bytes() * static_cast<uint64_t>(offset));
  const bool is_int8 = layout.type == KvType::kInt8;
  for (int g = 0; g < n / kKvGroup; ++g) {
    int8_t codes[kKvGroup];
    scales[g] = quantize_kv_group<L>(row + g * kKvGroup, is_int8 ? 127 : 7, codes);
    if (is_int8) {
      std::memcpy(out + g * kKvGroup, codes, kKvGroup);
    } else {
      for (int i = 0; i < kKvGroup / 2; ++i) {
        out[g * kKvGroup / 2 + i] =
            static_cast<uint8_t>((codes[2 * i] + 8) | (codes[2 * i + 1] + 8) << 4);
      }
    }
  }
}

// Rows of int8 or int4 codes with an f16 scale per group: x = scale * code.
template <typename L, bool kIsInt8>
inline void load_coded_rows(const KvLayout &layout, const uint8_t *page, int offset, int num_rows,
                            float *rows) {
  const int n = layout.head_dim;
  const uint64_t row_bytes = layout.row_bytes(), scale_bytes = layout.scale_row_bytes();
  const uint8_t *codes = page + row_bytes * static_cast<uint64_t>(offset);
  const uint8_t *scales =
      page + layout.scales_offset() + scale_bytes * static_cast<uint64_t>(offset);
  for (int r = 0; r < num_rows; ++r, codes += row_bytes, scales += scale_bytes) {
    for (int c = 0; c < n; c += kKvGroup, rows += kKvGroup) {
      uint16_t half[8];
      std::memcpy(half, scales + c / kKvGroup * 2, 2);
      for (int i = 1; i < 8; ++i) half[i] = half[0];
      const typename L::F scale = L::load_half(half);
      for (int i = 0; i < kKvGroup; i += 8) {
        const typename L::F code =
            kIsInt8 ? L::load_int8(reinterpret_cast<const int8_t *>(codes) + c + i)
                    : L::load_int4(codes + (c + i) / 2);
        L::store(rows + i, L::mul(scale, code));
      }
    }
  }
}

template <typename L>
inline void load_kv_rows(const KvLayout &layout, const uint8_t *page, int offset, int num_rows,
                         float *rows) {
  const uint8_t *in = page + layout.row_bytes() * static_cast<uint64_t>(offset);
  const int n = layout.head_dim;
  switch (layout.type) {
    case KvType::kF32:
      std::memcpy(rows, in, static_cast<size_t>(num_rows) * static_cast<size_t>(n) * sizeof(float));
      return;
    case KvType::kF16:  // consecutive rows are consecutive values
      load_half_row<L>(reinterpret_cast<const uint16_t *>(in), num_rows * n, rows);
      return;
    case KvType::kInt8:
      load_coded_rows<L, true>(layout, page, offset, num_rows, rows);
      return;
    case KvType::kInt4:
      load_coded_rows<L, false>(layout, page, offset, num_rows, rows);
      return;
  }
}

}  // namespace
}  // namespace xllm::cpu
