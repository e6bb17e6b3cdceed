#include "backend/cpu/activations.h"

#include <algorithm>

namespace xllm::cpu {
namespace {

constexpr int kPlanes = 2;
// Columns whose remainder is held at a time.
constexpr int kRemainderCols = 256;

}  // namespace

// f32 4, and in each plane d and ds 8 per 32, sum 2 per 16, q 1; generous for widths that are no
// multiple of 32.
uint64_t Activations::bytes_per_token(int cols) {
  const auto blocks = static_cast<uint64_t>(cols + 31) / 32;
  return blocks * (32 * sizeof(float) + kPlanes * (2 * sizeof(float) + 2 * sizeof(int16_t) + 32));
}

void Activations::reserve(Allocator *allocator, int num_tokens, int cols) {
  cols_ = cols;
  num_tokens_ = num_tokens;
  const uint64_t needed = bytes_per_token(cols) * static_cast<uint64_t>(num_tokens);
  if (memory_.size_bytes() < needed) memory_ = Buffer(allocator, needed);
  const int64_t tokens = num_tokens, blocks = (cols + 31) / 32, rows = kPlanes * tokens;
  f_ = memory_.data<float>();
  d_ = f_ + tokens * blocks * 32;
  ds_ = d_ + rows * blocks;
  sum_ = reinterpret_cast<int16_t *>(ds_ + rows * blocks);
  q_ = reinterpret_cast<int8_t *>(sum_ + rows * blocks * 2);
}

ActRow Activations::row(int token, int plane) const {
  const int64_t blocks = cols_ / 32, row = int64_t{plane} * num_tokens_ + token;
  return {f(token), q_ + row * cols_, d_ + row * blocks, ds_ + row * blocks,
          sum_ + row * blocks * 2};
}

void Activations::quantize_plane(const Kernels &kernels, const float *f, int64_t row, int first,
                                 int count) const {
  const int64_t b = row * (cols_ / 32) + first / 32;
  kernels.quantize(f, count, q_ + row * cols_ + first, d_ + b, ds_ + b, sum_ + 2 * b);
}

void Activations::quantize(const Kernels &kernels, Precision precision, int token, int first,
                           int count) const {
  if (cols_ % 32 != 0) return;
  quantize_plane(kernels, f(token) + first, token, first, count);
  if (precision != Precision::kFine) return;
  const ActRow coarse = row(token);
  float left[kRemainderCols];
  for (int at = first; at < first + count; at += kRemainderCols) {
    const int cols = std::min(kRemainderCols, first + count - at);
    kernels.remainder(f(token) + at, cols, coarse.q + at, coarse.d + at / 32, left);
    quantize_plane(kernels, left, int64_t{num_tokens_} + token, at, cols);
  }
}

}  // namespace xllm::cpu
