// How attention is cut into pieces of work. No effect on results: a (row, head) pair is computed on
// its own.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"

namespace xllm::cpu {

// Consecutive rows of a sequence that share a tile of keys once it is f32.
constexpr int kQueryRows = 8;

// f32 scratch of one thread: a tile of keys, one of values, and maximum and denominator of each
// (row, head) of its piece.
inline int64_t attention_scratch_floats(const ModelDims &dims) {
  const int64_t group = dims.num_heads / dims.num_kv_heads;
  return int64_t{2} * kKeyTile * dims.head_dim + 2 * kQueryRows * group;
}

}  // namespace xllm::cpu
