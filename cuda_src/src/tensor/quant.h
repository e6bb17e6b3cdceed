// GGUF's quantised block formats: the one description that CPU, CUDA and the dequantisers read.
// x[i] is element i of a block; all multi-byte fields are little endian; f16 fields hold IEEE
// binary16 bits. Formats: github.com/ggml-org/ggml docs/gguf.md and the block layouts of the files
// themselves.
#pragma once

// note: device code compiles this header without the host's library headers (NVRTC has none).
#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using int8_t = signed char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
#else
#include <cstdint>
#endif

namespace xllm {

constexpr int kQuantBlock = 32;   // elements of a plain quant block
constexpr int kSuperBlock = 256;  // elements of a K-quant super-block

// x[i] = d * (q[i] - 8). Byte j holds q[j] in its low and q[j + 16] in its high nibble.
struct BlockQ4_0 {
  uint16_t d;
  uint8_t qs[16];
};
static_assert(sizeof(BlockQ4_0) == 18, "q4_0 block size");

// x[i] = d * q[i] + m. Nibbles as in q4_0.
struct BlockQ4_1 {
  uint16_t d;
  uint16_t m;
  uint8_t qs[16];
};
static_assert(sizeof(BlockQ4_1) == 20, "q4_1 block size");

// x[i] = d * (q[i] - 16). Low four bits as in q4_0; the fifth bit of q[i] is bit i of qh, read as a
// 32-bit number.
struct BlockQ5_0 {
  uint16_t d;
  uint8_t qh[4];
  uint8_t qs[16];
};
static_assert(sizeof(BlockQ5_0) == 22, "q5_0 block size");

// x[i] = d * q[i] + m. Bits as in q5_0.
struct BlockQ5_1 {
  uint16_t d;
  uint16_t m;
  uint8_t qh[4];
  uint8_t qs[16];
};
static_assert(sizeof(BlockQ5_1) == 24, "q5_1 block size");

// x[i] = d * q[i].
struct BlockQ8_0 {
  uint16_t d;
  int8_t qs[32];
};
static_assert(sizeof(BlockQ8_0) == 34, "q8_0 block size");

// 16 sub-blocks of 16: x = d * (scales[s] & 15) * q - dmin * (scales[s] >> 4), q in 0..3.
// Each half of 128 elements uses 32 bytes of qs: element 32 * k + l of the half is bits 2k, 2k + 1
// of byte l.
struct BlockQ2_K {
  uint8_t scales[16];
  uint8_t qs[64];
  uint16_t d;
  uint16_t dmin;
};
static_assert(sizeof(BlockQ2_K) == 84, "q2_k block size");

// 16 sub-blocks of 16: x = d * (scale[s] - 32) * (q - (high bit ? 0 : 4)), q the two bits laid out
// as in q2_k. High bit of element e: bit e / 32 of hmask[e % 32]. scale[s] has 6 bits: the low four
// in scales[0..7] (low nibbles s = 0..7, high nibbles s = 8..15), the top two in scales[8 + s % 4],
// at bits 2 * (s / 4).
struct BlockQ3_K {
  uint8_t hmask[32];
  uint8_t qs[64];
  uint8_t scales[12];
  uint16_t d;
};
static_assert(sizeof(BlockQ3_K) == 110, "q3_k block size");

// 8 sub-blocks of 32: x = d * scale[s] * q - dmin * min[s], q in 0..15.
// Each pair of sub-blocks uses 32 bytes of qs: even s in the low, odd s in the high nibbles.
// scale and min have 6 bits. s < 4: scale = scales[s] & 63, min = scales[s + 4] & 63.
// s >= 4: scale = (scales[s + 4] & 15) | (scales[s - 4] >> 6) << 4, min = (scales[s + 4] >> 4) |
// (scales[s] >> 6) << 4.
struct BlockQ4_K {
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];
  uint8_t qs[128];
};
static_assert(sizeof(BlockQ4_K) == 144, "q4_k block size");

// As q4_k with q in 0..31: the fifth bit of element 32 * s + l is bit s of qh[l].
struct BlockQ5_K {
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];
  uint8_t qh[32];
  uint8_t qs[128];
};
static_assert(sizeof(BlockQ5_K) == 176, "q5_k block size");

// 16 sub-blocks of 16: x = d * scales[s] * (q - 32), q in 0..63.
// Each half of 128 elements uses 64 bytes of ql and 32 of qh: element 32 * k + l of the half takes
// its low four bits from ql[32 * (k % 2) + l] (low nibble for k < 2, else high) and its top two
// from bits 2k, 2k + 1 of qh[l].
struct BlockQ6_K {
  uint8_t ql[128];
  uint8_t qh[64];
  int8_t scales[16];
  uint16_t d;
};
static_assert(sizeof(BlockQ6_K) == 210, "q6_k block size");

// x[i] = d * kIq4Values[q[i]]. Nibbles as in q4_0.
struct BlockIQ4_NL {
  uint16_t d;
  uint8_t qs[16];
};
static_assert(sizeof(BlockIQ4_NL) == 18, "iq4_nl block size");

// 8 sub-blocks of 32: x = d * (scale[s] - 32) * kIq4Values[q]. scale[s]: low four bits in nibble s
// of scales_l, top two at bits 2s of scales_h. Sub-block s uses 16 bytes of qs, nibbles as in q4_0.
struct BlockIQ4_XS {
  uint16_t d;
  uint16_t scales_h;
  uint8_t scales_l[4];
  uint8_t qs[128];
};
static_assert(sizeof(BlockIQ4_XS) == 136, "iq4_xs block size");

// The non-linear code book of iq4_nl and iq4_xs. A macro so that host and device code can each
// place it where it is fast.
#define XLLM_IQ4_VALUES {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}

}  // namespace xllm
