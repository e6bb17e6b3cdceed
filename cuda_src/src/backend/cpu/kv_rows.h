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

template <typename L>
inline void load_kv_row(const KvLayout &layout, const uint8_t *page, int offset, float *row) {
  const uint8_t *in = page + layout.row_bytes() * static_cast<uint64_t>(offset);
  const int n = layout.head_dim;
  if (layout.type == KvType::kF32) {
    std::memcpy(row, in, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  if (layout.type == KvType::kF16) {
    load_half_row<L>(reinterpret_cast<const uint16_t *>(in), n, row);
    return;
  }
  const auto *halves = reinterpret_cast<const uint16_t *>(
      page + layout.scales_offset() + layout.scale_row_bytes() * static_cast<uint64_t>(offset));
  for (int g = 0; g < n / kKvGroup; ++g) {
    uint16_t half[8];
    for (uint16_t &h : half) h = halves[g];
    const typename L::F scale = L::load_half(half);
    int8_t codes[kKvGroup];
    if (layout.type == KvType::kInt8) {
      std::memcpy(codes, in + g * kKvGroup, kKvGroup);
    } else {
      for (int i = 0; i < kKvGroup / 2; ++i) {
        const int byte = in[g * kKvGroup / 2 + i];
        codes[2 * i] = static_cast<int8_t>((byte & 15) - 8);
        codes[2 * i + 1] = static_cast<int8_t>((byte >> 4) - 8);
      }
    }
    for (int i = 0; i < kKvGroup; i += 8) {
      L::store(row + g * kKvGroup + i, L::mul(scale, L::load_int8(codes + i)));
    }
  }
}

}  // namespace
}  // namespace xllm::cpu
