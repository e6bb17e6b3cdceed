// Activations of a step's tokens, as a product reads them.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"
#include "tensor/buffer.h"

namespace xllm::cpu {

// How activations enter a product with quantised weights. One plane of int8 rounds each to 1/254 of
// the largest of its 32 neighbours; kFine adds a second plane that holds what the first one left,
// and so costs a product twice the multiplications but no second reading of the weights. Which
// products are fine is fixed by the model alone (is_fine_layer, and the stages); docs/perf/cpu.md
// has the error budget behind the choice.
enum class Precision { kInt8, kFine };

inline int num_planes(Precision precision) { return precision == Precision::kFine ? 2 : 1; }

// Whether the last product of a layer is fine: in the first and the last eighth of the layers,
// whose errors all the others pass on or nothing evens out. In models of a few layers that is one
// at each end.
inline bool is_fine_layer(int layer, int num_layers) {
  const int eighth = num_layers / 8 > 1 ? num_layers / 8 : 1;
  return layer < eighth || layer >= num_layers - eighth;
}

// [num_tokens, cols] in f32 and, for raw weights and where cols is a multiple of 32, as int8 with
// scales in one plane or two. Both are kept: a file mixes tensor types.
class Activations {
 public:
  // Of num_tokens rows.
  static uint64_t plan_bytes(WeightForm form, int num_tokens, int cols);

  // Room for num_tokens rows; keeps what it has when that is enough, else contents are lost.
  void reserve(Allocator *allocator, WeightForm form, int num_tokens, int cols);
  // How many rows the step has, at most those there is room for: what is packed depends on it.
  void begin_step(int num_tokens) { step_tokens_ = num_tokens; }

  int cols() const { return cols_; }
  float *f(int token) const { return f_ + int64_t{token} * cols_; }
  // The row as plane 0 has it, and what that left as plane 1; f32 alone for dequantised weights.
  ActRow row(int token, int plane = 0) const;
  // The rows from `token` on, packed (act_pack.h) with as many planes as they were quantised to.
  const uint8_t *packed(int token, Precision precision) const;
  // Fills the int8 form of columns [first, first + count), multiples of 32, from the f32 form.
  // Nothing where cols is no multiple.
  void quantize(const Kernels &kernels, Precision precision, int token, int first, int count) const;
  void quantize(const Kernels &kernels, Precision precision, int token) const {
    quantize(kernels, precision, token, 0, cols_);
  }

  uint64_t size_bytes() const { return memory_.size_bytes(); }

 private:
  void quantize_plane(const Kernels &kernels, const float *f, int64_t row, int first,
                      int count) const;

  int cols_ = 0;
  int num_tokens_ = 0;  // there is room for
  int step_tokens_ = 0;
  Buffer memory_;
  float *f_ = nullptr;  // then, per plane and token:
  float *d_ = nullptr;
  float *ds_ = nullptr;
  int16_t *sum_ = nullptr;
  int8_t *q_ = nullptr;
  uint8_t *packed_ = nullptr;
};

}  // namespace xllm::cpu
