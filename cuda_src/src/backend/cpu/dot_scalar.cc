#include "backend/cpu/dot_scalar.h"

#include <cmath>

#include "backend/cpu/block_codes.h"

namespace xllm::cpu {
namespace {

int dot_codes(const int8_t *a, const int8_t *b, int count) {
  int sum = 0;
  for (int i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

template <typename Block, bool kHasMin>
void dot_plain(const uint8_t *weights, uint64_t row_bytes, int num_rows, const ActRow *acts,
               int num_tokens, int cols, float *out, int64_t out_stride) {
  for (int r = 0; r < num_rows; ++r) {
    const auto *blocks =
        reinterpret_cast<const Block *>(weights + static_cast<uint64_t>(r) * row_bytes);
    float acc[kTokenTile] = {};
    for (int b = 0; b < cols / kQuantBlock; ++b) {
      PlainCodes codes;
      decode(blocks[b], &codes);
      for (int t = 0; t < num_tokens; ++t) {
        const int sum = dot_codes(codes.q, acts[t].q + b * kQuantBlock, kQuantBlock);
        acc[t] = std::fma(codes.d * acts[t].d[b], static_cast<float>(sum), acc[t]);
        if (kHasMin) acc[t] = std::fma(codes.m, acts[t].ds[b], acc[t]);
      }
    }
    for (int t = 0; t < num_tokens; ++t) out[t * out_stride + r] = acc[t];
  }
}

enum class Min { kNone, kPer32, kPer16 };

template <typename Block, Min kMin>
void dot_super(const uint8_t *weights, uint64_t row_bytes, int num_rows, const ActRow *acts,
               int num_tokens, int cols, float *out, int64_t out_stride) {
  for (int r = 0; r < num_rows; ++r) {
    const auto *blocks =
        reinterpret_cast<const Block *>(weights + static_cast<uint64_t>(r) * row_bytes);
    float acc[kTokenTile] = {};
    for (int b = 0; b < cols / kSuperBlock; ++b) {
      SuperCodes codes;
      decode(blocks[b], &codes);
      for (int t = 0; t < num_tokens; ++t) {
        float inner = 0, least = 0;
        for (int s = 0; s < kSuperBlock / 32; ++s) {
          const int a = b * (kSuperBlock / 32) + s;  // the activations' block
          const int8_t *q = acts[t].q + 32 * a;
          const int sum = codes.scale[2 * s] * dot_codes(codes.q + 32 * s, q, 16) +
                          codes.scale[2 * s + 1] * dot_codes(codes.q + 32 * s + 16, q + 16, 16);
          inner = std::fma(acts[t].d[a], static_cast<float>(sum), inner);
          if (kMin == Min::kPer32)
            least = std::fma(acts[t].ds[a], static_cast<float>(codes.min[2 * s]), least);
          if (kMin == Min::kPer16) {
            const int mins = codes.min[2 * s] * acts[t].sum[2 * a] +
                             codes.min[2 * s + 1] * acts[t].sum[2 * a + 1];
            least = std::fma(acts[t].d[a], static_cast<float>(mins), least);
          }
        }
        acc[t] = std::fma(codes.d, inner, acc[t]);
        if (kMin != Min::kNone) acc[t] = std::fma(-codes.dmin, least, acc[t]);
      }
    }
    for (int t = 0; t < num_tokens; ++t) out[t * out_stride + r] = acc[t];
  }
}

}  // namespace

DotFn scalar_quant_dot(DType dtype) {
  switch (dtype) {
    case DType::kQ4_0:
      return dot_plain<BlockQ4_0, false>;
    case DType::kQ4_1:
      return dot_plain<BlockQ4_1, true>;
    case DType::kQ5_0:
      return dot_plain<BlockQ5_0, false>;
    case DType::kQ5_1:
      return dot_plain<BlockQ5_1, true>;
    case DType::kQ8_0:
      return dot_plain<BlockQ8_0, false>;
    case DType::kIQ4_NL:
      return dot_plain<BlockIQ4_NL, false>;
    case DType::kQ2_K:
      return dot_super<BlockQ2_K, Min::kPer16>;
    case DType::kQ3_K:
      return dot_super<BlockQ3_K, Min::kNone>;
    case DType::kQ4_K:
      return dot_super<BlockQ4_K, Min::kPer32>;
    case DType::kQ5_K:
      return dot_super<BlockQ5_K, Min::kPer32>;
    case DType::kQ6_K:
      return dot_super<BlockQ6_K, Min::kNone>;
    case DType::kIQ4_XS:
      return dot_super<BlockIQ4_XS, Min::kNone>;
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
      return nullptr;
  }
  return nullptr;
}

}  // namespace xllm::cpu
