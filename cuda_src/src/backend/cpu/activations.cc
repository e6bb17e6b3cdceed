#include "backend/cpu/activations.h"

namespace xllm::cpu {

// f32 4, d and ds 8 per 32, sum 2 per 16, q 1; generous for widths that are no multiple of 32.
uint64_t Activations::bytes_per_token(int cols) {
  const auto blocks = static_cast<uint64_t>(cols + 31) / 32;
  return blocks * (32 * sizeof(float) + 2 * sizeof(float) + 2 * sizeof(int16_t) + 32);
}

void Activations::reserve(Allocator *allocator, int num_tokens, int cols) {
  cols_ = cols;
  const uint64_t needed = bytes_per_token(cols) * static_cast<uint64_t>(num_tokens);
  if (memory_.size_bytes() < needed) memory_ = Buffer(allocator, needed);
  const int64_t tokens = num_tokens, blocks = (cols + 31) / 32;
  f_ = memory_.data<float>();
  d_ = f_ + tokens * blocks * 32;
  ds_ = d_ + tokens * blocks;
  sum_ = reinterpret_cast<int16_t *>(ds_ + tokens * blocks);
  q_ = reinterpret_cast<int8_t *>(sum_ + tokens * blocks * 2);
}

ActRow Activations::row(int token) const {
  const int64_t blocks = cols_ / 32;
  return {f(token), q_ + int64_t{token} * cols_, d_ + token * blocks, ds_ + token * blocks,
          sum_ + token * blocks * 2};
}

void Activations::quantize(const Kernels &kernels, int token, int first, int count) const {
  if (cols_ % 32 != 0) return;
  const int64_t blocks = cols_ / 32, b = first / 32;
  kernels.quantize(f(token) + first, count, q_ + int64_t{token} * cols_ + first,
                   d_ + token * blocks + b, ds_ + token * blocks + b,
                   sum_ + (token * blocks + b) * 2);
}

}  // namespace xllm::cpu
