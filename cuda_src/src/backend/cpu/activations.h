// Activations of a step's tokens, as a product reads them.
#pragma once

#include <cstdint>

#include "backend/cpu/kernels.h"
#include "tensor/buffer.h"

namespace xllm::cpu {

// [num_tokens, cols] in f32 and, where cols is a multiple of 32, as int8 with scales. Both are
// kept: a file mixes tensor types.
class Activations {
 public:
  static uint64_t bytes_per_token(int cols);

  // Room for num_tokens rows; keeps what it has when that is enough, else contents are lost.
  void reserve(Allocator *allocator, int num_tokens, int cols);

  int cols() const { return cols_; }
  float *f(int token) const { return f_ + int64_t{token} * cols_; }
  ActRow row(int token) const;
  // Fills the int8 form of columns [first, first + count), multiples of 32, from the f32 form.
  // Nothing where cols is no multiple.
  void quantize(const Kernels &kernels, int token, int first, int count) const;
  void quantize(const Kernels &kernels, int token) const { quantize(kernels, token, 0, cols_); }

  uint64_t size_bytes() const { return memory_.size_bytes(); }

 private:
  int cols_ = 0;
  Buffer memory_;
  float *f_ = nullptr;
  float *d_ = nullptr;
  float *ds_ = nullptr;
  int16_t *sum_ = nullptr;
  int8_t *q_ = nullptr;
};

}  // namespace xllm::cpu
