// How attention is cut into pieces of work, and where its parts are kept. No effect on results: a
// row's parts (kKeySplit) and their order are the same however they are spread.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"

namespace xllm::cpu {

// Consecutive rows of a sequence that share a tile of keys once it is f32.
constexpr int kQueryRows = 8;

// Heads of a group that a kernel sees at once.
constexpr int kQueryGroup = 8;

// A part of a (row, head): the weighted sum of values [head_dim], then maximum and denominator.
inline int64_t part_floats(const ModelDims &dims) { return dims.head_dim + 2; }

// f32 scratch of one thread: a tile of keys, one of values, and for each (row, head) of a piece the
// part of this split and what the splits before it came to.
inline int64_t attention_scratch_floats(const ModelDims &dims) {
  const int64_t group = dims.num_heads / dims.num_kv_heads;
  return int64_t{2} * kKeyTile * dims.head_dim + 2 * kQueryRows * group * part_floats(dims);
}

// A step of few rows over long contexts gives the splits to different threads and keeps their parts
// in the workspace, at most this many floats (16 MB); they are a hundredth of the keys they stand
// for. What needs more has rows enough to go round.
constexpr int64_t kMaxPartFloats = int64_t{1} << 22;

}  // namespace xllm::cpu
