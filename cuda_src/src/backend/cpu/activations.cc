#include "backend/cpu/activations.h"

#include <algorithm>

#include "backend/cpu/act_pack.h"

namespace xllm::cpu {
namespace {

constexpr int kPlanes = 2;
// Columns whose remainder is held at a time.
constexpr int kRemainderCols = 256;

// f32 4, and for raw weights in each plane d and ds 8 per 32, sum 2 per 16, q 1, and all that
// packed; generous for widths that are no multiple of 32.
uint64_t bytes_per_token(WeightForm form, int cols) {
  const auto blocks = static_cast<uint64_t>(cols + 31) / 32;
  const uint64_t plane = 2 * sizeof(float) + 2 * sizeof(int16_t) + 32 + kPackedRowBytes;
  return blocks * (32 * sizeof(float) + (form == WeightForm::kRaw ? kPlanes * plane : 0));
}

}  // namespace

// A further token's planes are what a last group may have place for.
uint64_t Activations::plan_bytes(WeightForm form, int num_tokens, int cols) {
  static_assert(kPackedSpareRows <= kPlanes, "one token more");
  return bytes_per_token(form, cols) * (static_cast<uint64_t>(num_tokens) + 1);
}

void Activations::reserve(Allocator *allocator, WeightForm form, int num_tokens, int cols) {
  cols_ = cols;
  num_tokens_ = num_tokens;
  step_tokens_ = num_tokens;
  const uint64_t needed = plan_bytes(form, num_tokens, cols);
  if (memory_.size_bytes() < needed) memory_ = Buffer(allocator, needed);
  const int64_t tokens = num_tokens, blocks = (cols + 31) / 32, rows = kPlanes * tokens;
  f_ = memory_.data<float>();
  if (form != WeightForm::kRaw) return;
  d_ = f_ + tokens * blocks * 32;
  ds_ = d_ + rows * blocks;
  sum_ = reinterpret_cast<int16_t *>(ds_ + rows * blocks);
  q_ = reinterpret_cast<int8_t *>(sum_ + rows * blocks * 2);
  packed_ = reinterpret_cast<uint8_t *>(q_ + rows * blocks * 32);
}

ActRow Activations::row(int token, int plane) const {
  if (q_ == nullptr) return {f(token), nullptr, nullptr, nullptr, nullptr};
  const int64_t blocks = cols_ / 32, row = int64_t{plane} * num_tokens_ + token;
  return {f(token), q_ + row * cols_, d_ + row * blocks, ds_ + row * blocks,
          sum_ + row * blocks * 2};
}

const uint8_t *Activations::packed(int token, Precision precision) const {
  return packed_ + int64_t{token} * num_planes(precision) * (cols_ / 32) * kPackedRowBytes;
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
  const auto pack = [&](int plane) {
    const int planes = num_planes(precision);
    if (kernels.tile_rows != 0)
      pack_activations(row(token, plane), token * planes + plane, step_tokens_ * planes,
                       kernels.tile_rows, cols_, first, count, packed_);
  };
  pack(0);
  if (precision != Precision::kFine) return;
  const ActRow coarse = row(token);
  float left[kRemainderCols];
  for (int at = first; at < first + count; at += kRemainderCols) {
    const int cols = std::min(kRemainderCols, first + count - at);
    kernels.remainder(f(token) + at, cols, coarse.q + at, coarse.d + at / 32, left);
    quantize_plane(kernels, left, int64_t{num_tokens_} + token, at, cols);
  }
  pack(1);
}

}  // namespace xllm::cpu
