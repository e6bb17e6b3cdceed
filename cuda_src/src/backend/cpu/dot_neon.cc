// Products of quantised weights in the file's order with NEON dot products, for the types that are
// not interleaved: four weight rows at a time, one per 32-bit lane, so that a row's f32 terms are
// lanes of one fma. The codes of four rows are unpacked once for up to four tokens.
//
// Index symbols: r weight row of the four, t token, b quant block or super-block, s 32 elements of
// a super-block.
#include "backend/cpu/dot_neon.h"

#include <arm_neon.h>

#include <cstring>

#include "tensor/quant.h"

namespace xllm::cpu {
namespace {

constexpr int kRows = 4;
constexpr int kMaxTokens = 4;

// The same block of four rows.
template <typename Block>
struct RowBlocks {
  const Block *p[kRows];
};

// 32 codes of one row.
struct Codes {
  int8x16_t first, second;
};

inline Codes load_acts(const int8_t *q) { return {vld1q_s8(q), vld1q_s8(q + 16)}; }

inline int32x4_t add_neighbors(const int32x4_t x[kRows]) {
  return vpaddq_s32(vpaddq_s32(x[0], x[1]), vpaddq_s32(x[2], x[3]));
}

// The dots of four rows with one token's 32, row r in lane r.
inline int32x4_t dot_rows(const Codes w[kRows], const Codes &a) {
  int32x4_t sums[kRows];
  for (int r = 0; r < kRows; ++r) {
    sums[r] = vdotq_s32(vdotq_s32(vdupq_n_s32(0), w[r].first, a.first), w[r].second, a.second);
  }
  return add_neighbors(sums);
}

// The dots of four rows with 16 elements each of one token's.
inline void dot_rows_16(const Codes w[kRows], const Codes &a, int32x4_t out[2]) {
  int32x4_t first[kRows], second[kRows];
  for (int r = 0; r < kRows; ++r) {
    first[r] = vdotq_s32(vdupq_n_s32(0), w[r].first, a.first);
    second[r] = vdotq_s32(vdupq_n_s32(0), w[r].second, a.second);
  }
  out[0] = add_neighbors(first);
  out[1] = add_neighbors(second);
}

inline float32x4_t halves_to_float(uint16_t a, uint16_t b, uint16_t c, uint16_t d) {
  const uint16_t halves[kRows] = {a, b, c, d};
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
}

template <typename Block>
inline float32x4_t load_d(const RowBlocks<Block> &rows) {
  return halves_to_float(rows.p[0]->d, rows.p[1]->d, rows.p[2]->d, rows.p[3]->d);
}

// Bytes j of 16 as nibbles: the low ones are elements 0 to 15, the high ones 16 to 31.
inline Codes iq4_codes(const uint8_t *qs) {
  static constexpr int8_t kValues[16] = XLLM_IQ4_VALUES;
  const int8x16_t values = vld1q_s8(kValues);
  const uint8x16_t bytes = vld1q_u8(qs);
  return {vqtbl1q_s8(values, vandq_u8(bytes, vdupq_n_u8(15))),
          vqtbl1q_s8(values, vshrq_n_u8(bytes, 4))};
}

// ---- plain blocks ----

template <int T>
struct IQ4_NL {
  using Block = BlockIQ4_NL;
  static constexpr int kElements = kQuantBlock;
  float32x4_t acc[T];

  void add_block(const RowBlocks<Block> &rows, const ActRow *acts, int b) {
    Codes w[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = iq4_codes(rows.p[r]->qs);
    const float32x4_t d = load_d(rows);
    for (int t = 0; t < T; ++t) {
      const int32x4_t sum = dot_rows(w, load_acts(acts[t].q + b * kQuantBlock));
      acc[t] = vfmaq_f32(acc[t], vmulq_n_f32(d, acts[t].d[b]), vcvtq_f32_s32(sum));
    }
  }
};

// ---- super-blocks ----
// Each type: how its codes are unpacked, and its scales per 16 elements. A product of scales and
// codes is exact in i32.

// Sixteen bytes of each row as [16] vectors of four rows.
inline void transpose_bytes(const int8x16_t rows[kRows], int32x4_t out[16]) {
  const int8x16_t even[2] = {vzip1q_s8(rows[0], rows[2]), vzip2q_s8(rows[0], rows[2])};
  const int8x16_t odd[2] = {vzip1q_s8(rows[1], rows[3]), vzip2q_s8(rows[1], rows[3])};
  for (int i = 0; i < 2; ++i) {
    const int8x16_t fours[2] = {vzip1q_s8(even[i], odd[i]), vzip2q_s8(even[i], odd[i])};
    for (int j = 0; j < 2; ++j) {
      const int16x8_t low = vmovl_s8(vget_low_s8(fours[j])), high = vmovl_high_s8(fours[j]);
      int32x4_t *to = out + 8 * i + 4 * j;
      to[0] = vmovl_s16(vget_low_s16(low));
      to[1] = vmovl_high_s16(low);
      to[2] = vmovl_s16(vget_low_s16(high));
      to[3] = vmovl_high_s16(high);
    }
  }
}

// Two-bit codes of q2_k and q3_k, sub-block s: bits 2 * (s % 4) of 32 bytes.
inline uint8x16_t pairs_k(const uint8_t *qs, int s) {
  const int8x16_t shift = vdupq_n_s8(static_cast<int8_t>(-2 * (s % 4)));
  return vandq_u8(vshlq_u8(vld1q_u8(qs + 32 * (s / 4)), shift), vdupq_n_u8(3));
}

struct Q2_K {
  using Block = BlockQ2_K;
  static constexpr bool kHasMin = true;
  static Codes codes(const Block &block, int s) {
    return {vreinterpretq_s8_u8(pairs_k(block.qs, s)),
            vreinterpretq_s8_u8(pairs_k(block.qs + 16, s))};
  }
  static int8x16_t scales(const Block &block) {
    return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(block.scales), vdupq_n_u8(15)));
  }
  static int8x16_t mins(const Block &block) {
    return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(block.scales), 4));
  }
  static float32x4_t load_dmin(const RowBlocks<Block> &rows) {
    return halves_to_float(rows.p[0]->dmin, rows.p[1]->dmin, rows.p[2]->dmin, rows.p[3]->dmin);
  }
};

struct Q3_K {
  using Block = BlockQ3_K;
  static constexpr bool kHasMin = false;
  static int8x16_t half_codes(const uint8_t *qs, const uint8_t *hmask, int s) {
    const uint8x16_t bit = vdupq_n_u8(static_cast<uint8_t>(1 << s));
    const uint8x16_t high = vandq_u8(vtstq_u8(vld1q_u8(hmask), bit), vdupq_n_u8(4));
    return vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(pairs_k(qs, s), high)), vdupq_n_s8(4));
  }
  static Codes codes(const Block &block, int s) {
    return {half_codes(block.qs, block.hmask, s), half_codes(block.qs + 16, block.hmask + 16, s)};
  }
  static int8x16_t scales(const Block &block) {
    uint32_t packed[3];
    std::memcpy(packed, block.scales, sizeof packed);
    uint32_t six_bits[4];
    for (int i = 0; i < 4; ++i) {  // scales 4i to 4i + 3
      six_bits[i] = ((i < 2 ? packed[i] : packed[i - 2] >> 4) & 0x0f0f0f0fu) |
                    ((packed[2] >> (2 * i)) & 0x03030303u) << 4;
    }
    return vsubq_s8(vreinterpretq_s8_u32(vld1q_u32(six_bits)), vdupq_n_s8(32));
  }
};

struct IQ4_XS {
  using Block = BlockIQ4_XS;
  static constexpr bool kHasMin = false;
  static Codes codes(const Block &block, int s) { return iq4_codes(block.qs + 16 * s); }
  // One scale per 32 elements, given twice.
  static int8x16_t scales(const Block &block) {
    int8_t out[16];
    for (int s = 0; s < 8; ++s) {
      const int low = (block.scales_l[s / 2] >> (4 * (s % 2))) & 15;
      const int high = (block.scales_h >> (2 * s)) & 3;
      out[2 * s] = out[2 * s + 1] = static_cast<int8_t>((low | high << 4) - 32);
    }
    return vld1q_s8(out);
  }
};

template <typename Type, int T>
struct SuperProduct {
  using Block = typename Type::Block;
  static constexpr int kElements = kSuperBlock;
  float32x4_t acc[T];

  void add_block(const RowBlocks<Block> &rows, const ActRow *acts, int b) {
    int32x4_t scale[16], min[16];
    int8x16_t bytes[kRows];
    for (int r = 0; r < kRows; ++r) bytes[r] = Type::scales(*rows.p[r]);
    transpose_bytes(bytes, scale);
    if constexpr (Type::kHasMin) {
      for (int r = 0; r < kRows; ++r) bytes[r] = Type::mins(*rows.p[r]);
      transpose_bytes(bytes, min);
    }
    float32x4_t inner[T], least[T];
    for (int t = 0; t < T; ++t) inner[t] = least[t] = vdupq_n_f32(0);
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      const int a = 8 * b + s;  // the activations' block
      Codes w[kRows];
      for (int r = 0; r < kRows; ++r) w[r] = Type::codes(*rows.p[r], s);
      for (int t = 0; t < T; ++t) {
        int32x4_t dots[2];
        dot_rows_16(w, load_acts(acts[t].q + 32 * a), dots);
        const int32x4_t sum =
            vmlaq_s32(vmulq_s32(dots[0], scale[2 * s]), dots[1], scale[2 * s + 1]);
        inner[t] = vfmaq_n_f32(inner[t], vcvtq_f32_s32(sum), acts[t].d[a]);
        if constexpr (Type::kHasMin) {
          const int32x4_t mins = vmlaq_n_s32(vmulq_n_s32(min[2 * s], acts[t].sum[2 * a]),
                                             min[2 * s + 1], acts[t].sum[2 * a + 1]);
          least[t] = vfmaq_n_f32(least[t], vcvtq_f32_s32(mins), acts[t].d[a]);
        }
      }
    }
    const float32x4_t d = load_d(rows);
    for (int t = 0; t < T; ++t) acc[t] = vfmaq_f32(acc[t], d, inner[t]);
    if constexpr (Type::kHasMin) {
      const float32x4_t dmin = Type::load_dmin(rows);
      for (int t = 0; t < T; ++t) acc[t] = vfmsq_f32(acc[t], dmin, least[t]);
    }
  }
};

// ---- rows and tokens ----

// Four rows (num_rows of them wanted) by T tokens.
template <typename Product, int T>
void multiply_rows(RowBlocks<typename Product::Block> rows, int num_rows, const ActRow *acts,
                   int cols, float *out, int64_t out_stride) {
  Product product;
  for (int t = 0; t < T; ++t) product.acc[t] = vdupq_n_f32(0);
  for (int b = 0; b < cols / Product::kElements; ++b) {
    product.add_block(rows, acts, b);
    for (int r = 0; r < kRows; ++r) ++rows.p[r];
  }
  for (int t = 0; t < T; ++t) {
    float whole[kRows];
    vst1q_f32(whole, product.acc[t]);
    std::memcpy(out + t * out_stride, whole, static_cast<size_t>(num_rows) * sizeof(float));
  }
}

// DotFn of a type: P<T> is its product for T tokens.
template <template <int> class P>
void dot(const uint8_t *weights, uint64_t row_bytes, int num_rows, const ActRow *acts,
         int num_tokens, int cols, float *out, int64_t out_stride) {
  using Block = typename P<1>::Block;
  for (int r = 0; r < num_rows; r += kRows) {
    const int count = num_rows - r < kRows ? num_rows - r : kRows;
    RowBlocks<Block> rows;
    // Lanes beyond the last row compute it again.
    for (int i = 0; i < kRows; ++i) {
      const auto row = static_cast<uint64_t>(r + (i < count ? i : count - 1));
      rows.p[i] = reinterpret_cast<const Block *>(weights + row * row_bytes);
    }
    for (int t = 0; t < num_tokens; t += kMaxTokens) {
      float *to = out + t * out_stride + r;
      switch (num_tokens - t) {
        case 1:
          multiply_rows<P<1>, 1>(rows, count, acts + t, cols, to, out_stride);
          break;
        case 2:
          multiply_rows<P<2>, 2>(rows, count, acts + t, cols, to, out_stride);
          break;
        case 3:
          multiply_rows<P<3>, 3>(rows, count, acts + t, cols, to, out_stride);
          break;
        default:
          multiply_rows<P<kMaxTokens>, kMaxTokens>(rows, count, acts + t, cols, to, out_stride);
          break;
      }
    }
  }
}

template <int T>
using ProductQ2_K = SuperProduct<Q2_K, T>;
template <int T>
using ProductQ3_K = SuperProduct<Q3_K, T>;
template <int T>
using ProductIQ4_XS = SuperProduct<IQ4_XS, T>;

}  // namespace

DotFn neon_quant_dot(DType dtype) {
  switch (dtype) {
    case DType::kIQ4_NL:
      return dot<IQ4_NL>;
    case DType::kQ2_K:
      return dot<ProductQ2_K>;
    case DType::kQ3_K:
      return dot<ProductQ3_K>;
    case DType::kIQ4_XS:
      return dot<ProductIQ4_XS>;
    default:
      return nullptr;
  }
}

}  // namespace xllm::cpu
