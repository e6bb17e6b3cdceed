// Where the keys of a row are cut: a function of the row's own context alone.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

constexpr int kMaxSplits = 64;

// log2 of the length: 256 up to 16384 keys, then doubling.
XLLM_HOST_DEVICE int split_shift(int context) {
  int shift = 8;
  while (static_cast<int64_t>(kMaxSplits) << shift < context) ++shift;
  return shift;
}
XLLM_HOST_DEVICE int num_splits(int context) {
  const int shift = split_shift(context);
  return (context + (1 << shift) - 1) >> shift;
}

}  // namespace cuda
}  // namespace xllm
