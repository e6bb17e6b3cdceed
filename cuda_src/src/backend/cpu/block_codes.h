// What a quant block says, type by type, as integers and scales: the one place of the CPU backend
// that takes bits apart. The dequantiser and the scalar dot products read these; the vector kernels
// are held to them byte by byte.
//
// A plain block of 32 is x = d * q + m. A super-block of 256 is x = (d * scale) * q - (dmin * min),
// with scale and min per 16 elements (types that share them between 32 repeat them).
#pragma once

#include <cstdint>

#include "base/half.h"
#include "tensor/quant.h"

namespace xllm::cpu {

struct PlainCodes {
  float d;
  float m;  // 0 for types without
  int8_t q[kQuantBlock];
};

constexpr int kSubBlocks = kSuperBlock / 16;

struct SuperCodes {
  float d;
  float dmin;  // 0 for types without
  int8_t q[kSuperBlock];
  int16_t scale[kSubBlocks];
  int16_t min[kSubBlocks];
};

constexpr int8_t kIq4Values[16] = XLLM_IQ4_VALUES;

inline void unpack_nibbles(const uint8_t qs[16], int8_t q[32]) {
  for (int j = 0; j < 16; ++j) {
    q[j] = static_cast<int8_t>(qs[j] & 15);
    q[j + 16] = static_cast<int8_t>(qs[j] >> 4);
  }
}

// Adds the fifth bits: bit i of the 32-bit little-endian number in qh.
inline void add_fifth_bits(const uint8_t qh[4], int8_t q[32]) {
  for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(q[i] | ((qh[i / 8] >> (i % 8)) & 1) << 4);
}

inline void shift_codes(int offset, int8_t *q, int count) {
  for (int i = 0; i < count; ++i) q[i] = static_cast<int8_t>(q[i] - offset);
}

inline void decode(const BlockQ4_0 &b, PlainCodes *out) {
  out->d = half_to_float(b.d);
  out->m = 0;
  unpack_nibbles(b.qs, out->q);
  shift_codes(8, out->q, kQuantBlock);
}

inline void decode(const BlockQ4_1 &b, PlainCodes *out) {
  out->d = half_to_float(b.d);
  out->m = half_to_float(b.m);
  unpack_nibbles(b.qs, out->q);
}

inline void decode(const BlockQ5_0 &b, PlainCodes *out) {
  out->d = half_to_float(b.d);
  out->m = 0;
  unpack_nibbles(b.qs, out->q);
  add_fifth_bits(b.qh, out->q);
  shift_codes(16, out->q, kQuantBlock);
}

inline void decode(const BlockQ5_1 &b, PlainCodes *out) {
  out->d = half_to_float(b.d);
  out->m = half_to_float(b.m);
  unpack_nibbles(b.qs, out->q);
  add_fifth_bits(b.qh, out->q);
}

inline void decode(const BlockQ8_0 &b, PlainCodes *out) {
  out->d = half_to_float(b.d);
  out->m = 0;
  for (int i = 0; i < kQuantBlock; ++i) out->q[i] = b.qs[i];
}

inline void decode(const BlockIQ4_NL &b, PlainCodes *out) {
  out->d = half_to_float(b.d);
  out->m = 0;
  unpack_nibbles(b.qs, out->q);
  for (int8_t &q : out->q) q = kIq4Values[q];
}

// Two-bit codes of q2_k and q3_k: halves of 128, element 32 * k + l at bits 2k of byte l.
inline void unpack_pairs(const uint8_t qs[64], int8_t q[256]) {
  for (int e = 0; e < kSuperBlock; ++e) {
    const int half = e / 128, k = e % 128 / 32, l = e % 32;
    q[e] = static_cast<int8_t>((qs[32 * half + l] >> (2 * k)) & 3);
  }
}

inline void decode(const BlockQ2_K &b, SuperCodes *out) {
  out->d = half_to_float(b.d);
  out->dmin = half_to_float(b.dmin);
  unpack_pairs(b.qs, out->q);
  for (int s = 0; s < kSubBlocks; ++s) {
    out->scale[s] = static_cast<int16_t>(b.scales[s] & 15);
    out->min[s] = static_cast<int16_t>(b.scales[s] >> 4);
  }
}

inline void decode(const BlockQ3_K &b, SuperCodes *out) {
  out->d = half_to_float(b.d);
  out->dmin = 0;
  unpack_pairs(b.qs, out->q);
  for (int e = 0; e < kSuperBlock; ++e) {
    const bool is_high = ((b.hmask[e % 32] >> (e / 32)) & 1) != 0;
    out->q[e] = static_cast<int8_t>(out->q[e] - (is_high ? 0 : 4));
  }
  for (int s = 0; s < kSubBlocks; ++s) {
    const int low = s < 8 ? b.scales[s] & 15 : b.scales[s - 8] >> 4;
    const int high = (b.scales[8 + s % 4] >> (2 * (s / 4))) & 3;
    out->scale[s] = static_cast<int16_t>((low | high << 4) - 32);
    out->min[s] = 0;
  }
}

// The 6-bit scales and mins of q4_k and q5_k, eight of each.
inline void unpack_scales_k4(const uint8_t packed[12], uint8_t scale[8], uint8_t min[8]) {
  for (int s = 0; s < 4; ++s) {
    scale[s] = packed[s] & 63;
    min[s] = packed[s + 4] & 63;
  }
  for (int s = 4; s < 8; ++s) {
    scale[s] = static_cast<uint8_t>((packed[s + 4] & 15) | (packed[s - 4] >> 6) << 4);
    min[s] = static_cast<uint8_t>((packed[s + 4] >> 4) | (packed[s] >> 6) << 4);
  }
}

inline void decode_scales_k4(const uint8_t packed[12], SuperCodes *out) {
  uint8_t scale[8], min[8];
  unpack_scales_k4(packed, scale, min);
  for (int s = 0; s < kSubBlocks; ++s) {
    out->scale[s] = scale[s / 2];
    out->min[s] = min[s / 2];
  }
}

// Four-bit codes of q4_k and q5_k: 32 bytes hold sub-block 2p in the low and 2p + 1 in the high
// nibbles.
inline void unpack_nibbles_k4(const uint8_t qs[128], int8_t q[256]) {
  for (int e = 0; e < kSuperBlock; ++e) {
    const int byte = qs[e / 64 * 32 + e % 32];
    q[e] = static_cast<int8_t>(e % 64 < 32 ? byte & 15 : byte >> 4);
  }
}

inline void decode(const BlockQ4_K &b, SuperCodes *out) {
  out->d = half_to_float(b.d);
  out->dmin = half_to_float(b.dmin);
  decode_scales_k4(b.scales, out);
  unpack_nibbles_k4(b.qs, out->q);
}

inline void decode(const BlockQ5_K &b, SuperCodes *out) {
  out->d = half_to_float(b.d);
  out->dmin = half_to_float(b.dmin);
  decode_scales_k4(b.scales, out);
  unpack_nibbles_k4(b.qs, out->q);
  for (int e = 0; e < kSuperBlock; ++e) {
    out->q[e] = static_cast<int8_t>(out->q[e] | ((b.qh[e % 32] >> (e / 32)) & 1) << 4);
  }
}

inline void decode(const BlockQ6_K &b, SuperCodes *out) {
  out->d = half_to_float(b.d);
  out->dmin = 0;
  for (int e = 0; e < kSuperBlock; ++e) {
    const int half = e / 128, k = e % 128 / 32, l = e % 32;
    const int byte = b.ql[64 * half + 32 * (k % 2) + l];
    const int low = k < 2 ? byte & 15 : byte >> 4;
    const int high = (b.qh[32 * half + l] >> (2 * k)) & 3;
    out->q[e] = static_cast<int8_t>((low | high << 4) - 32);
  }
  for (int s = 0; s < kSubBlocks; ++s) {
    out->scale[s] = b.scales[s];
    out->min[s] = 0;
  }
}

inline void decode(const BlockIQ4_XS &b, SuperCodes *out) {
  out->d = half_to_float(b.d);
  out->dmin = 0;
  for (int s = 0; s < 8; ++s) {
    unpack_nibbles(b.qs + 16 * s, out->q + 32 * s);
    const int low = (b.scales_l[s / 2] >> (4 * (s % 2))) & 15;
    const int high = (b.scales_h >> (2 * s)) & 3;
    out->scale[2 * s] = out->scale[2 * s + 1] = static_cast<int16_t>((low | high << 4) - 32);
    out->min[2 * s] = out->min[2 * s + 1] = 0;
  }
  for (int8_t &q : out->q) q = kIq4Values[q];
}

}  // namespace xllm::cpu
