// Rows of the cache in 8 or 4 bits: what is done to a head before it is rounded, how it is stored
// (tensor/kv.h), and its codes as f16 again.
//
// Heads are spread by a normalised Hadamard transform first, q like k so that their dot stays what
// it was, and v so that the output of attention needs the same transform once more, which undoes it
// (QuaRot, arXiv:2404.00456).
#pragma once

#include "backend/cuda/kv_pages.cuh"

namespace xllm {
namespace cuda {

constexpr int kKvGroupChannels = 32;  // that share a scale

// Of a head's channels, lane l holds 4l.. + 128k; all lanes of the warp. In stretches of the
// largest power of two that divides dim, at most 256. Channels from dim on are left alone where
// they hold zeros.
template <int kQuads>
__device__ __forceinline__ void spread_head(int dim, float (&v)[kQuads][4]) {
  int size = dim & -dim;
  if (size > 256) size = 256;
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    if (distance >= size) break;
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if ((j & distance) != 0) continue;
        const float sum = __fadd_rn(v[k][j], v[k][j + distance]);
        v[k][j + distance] = __fsub_rn(v[k][j], v[k][j + distance]);
        v[k][j] = sum;
      }
    }
  }
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    if (4 * offset >= size) break;
    const bool is_second = (lane & offset) != 0;
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float other = __shfl_xor_sync(0xffffffffu, v[k][j], offset);
        v[k][j] = is_second ? __fsub_rn(other, v[k][j]) : __fadd_rn(v[k][j], other);
      }
    }
  }
  if (kQuads == 2 && size == 256) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float sum = __fadd_rn(v[0][j], v[kQuads - 1][j]);
      v[kQuads - 1][j] = __fsub_rn(v[0][j], v[kQuads - 1][j]);
      v[0][j] = sum;
    }
  }
  const float norm = __fsqrt_rn(__fdiv_rn(1.0f, static_cast<float>(size)));
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[k][j] = __fmul_rn(v[k][j], norm);
  }
}

// Four channels of a group whose scale is `scale`, as codes of -limit..limit.
__device__ __forceinline__ void round_to_codes(const float (&v)[4], float scale, float limit,
                                               int (&codes)[4]) {
  const float inverse = scale == 0.0f ? 0.0f : __fdiv_rn(1.0f, scale);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float x = __fmul_rn(v[j], inverse);
    codes[j] = static_cast<int>(rintf(fminf(fmaxf(x, -limit), limit)));
  }
}

// Row `row` of a page = the head that the warp holds, as spread_head left it.
template <int kQuads>
__device__ __forceinline__ void store_codes(const KvPages &kv, uint8_t *page, int row, int dim,
                                            const float (&v)[kQuads][4]) {
  const bool is_int8 = kv.bits == 8;
  const float limit = is_int8 ? 127.0f : 7.0f;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int row_bytes = dim * kv.bits / 8, scale_row_bytes = dim / kKvGroupChannels * 2;
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    // Magnitudes compare as their bits do, with infinity and NaN on top. A group is eight lanes.
    uint32_t top = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) top = max(top, __float_as_uint(v[k][j]) & 0x7fffffffu);
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2)
      top = max(top, __shfl_xor_sync(0xffffffffu, top, offset));
    const bool is_finite = top < 0x7f800000u;
    const float wanted = __fdiv_rn(__uint_as_float(is_finite ? top : 0u), limit);
    const __half half = __float2half_rn(fminf(wanted, 65504.0f));
    int codes[4];
    round_to_codes(v[k], __half2float(half), limit, codes);
    const int channel = 4 * lane + 128 * k;
    if (channel >= dim) continue;
    uint8_t *to = page + static_cast<int64_t>(row) * row_bytes;
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j] = is_finite ? codes[j] : 0;
    if (is_int8) {
      uint32_t packed = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) packed |= (static_cast<uint32_t>(codes[j]) & 255u) << (8 * j);
      *reinterpret_cast<uint32_t *>(to + channel) = packed;
    } else {
      uint32_t packed = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) packed |= static_cast<uint32_t>(codes[j] + 8) << (4 * j);
      *reinterpret_cast<unsigned short *>(to + channel / 2) = static_cast<unsigned short>(packed);
    }
    if (lane % 8 == 0) {
      __half *scales = reinterpret_cast<__half *>(page + kv.scales_offset +
                                                  static_cast<int64_t>(row) * scale_row_bytes);
      // NaN where a value was not finite, so that the scores show it.
      scales[channel / kKvGroupChannels] =
          is_finite ? half : __float2half_rn(__uint_as_float(0x7fc00000u));
    }
  }
}

// Eight channels as f16: scale * code, rounded once. codes: 8 bytes of int8, or 4 of int4.
template <int kBits>
__device__ __forceinline__ uint4 expand_codes(const uint8_t *codes, __half scale) {
  const float factor = __half2float(scale);
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low, high;
    if (kBits == 8) {
      // 2^23 + 128 + code, by its low bits; exact.
      const uint32_t word = reinterpret_cast<const uint32_t *>(codes)[i / 2] ^ 0x80808080u;
      low = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + 2 * (i % 2)));
      high = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441 + 2 * (i % 2)));
      low = __fsub_rn(low, 8388736.0f);
      high = __fsub_rn(high, 8388736.0f);
    } else {
      const uint32_t word = *reinterpret_cast<const uint32_t *>(codes) >> (8 * i);
      low = __fsub_rn(__uint_as_float(0x4b000000u | (word & 15u)), 8388616.0f);
      high = __fsub_rn(__uint_as_float(0x4b000000u | (word >> 4 & 15u)), 8388616.0f);
    }
    const __half2 pair = __floats2half2_rn(__fmul_rn(factor, low), __fmul_rn(factor, high));
    out[i] = *reinterpret_cast<const uint32_t *>(&pair);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// One channel of a row.
__device__ __forceinline__ float load_kv(const KvPages &kv, const uint8_t *page, int row, int dim,
                                         int channel) {
  if (kv.bits == 16) {
    return __half2float(
        reinterpret_cast<const __half *>(page)[static_cast<int64_t>(row) * dim + channel]);
  }
  const uint8_t *codes = page + static_cast<int64_t>(row) * (dim * kv.bits / 8);
  const __half *scales = reinterpret_cast<const __half *>(page + kv.scales_offset) +
                         static_cast<int64_t>(row) * (dim / kKvGroupChannels);
  const int code = kv.bits == 8 ? static_cast<int>(static_cast<signed char>(codes[channel]))
                                : (codes[channel / 2] >> (channel % 2 * 4) & 15) - 8;
  return __fmul_rn(__half2float(scales[channel / kKvGroupChannels]), static_cast<float>(code));
}

}  // namespace cuda
}  // namespace xllm
