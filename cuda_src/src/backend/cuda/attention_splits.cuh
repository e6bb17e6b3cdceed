// Where the keys of a row are cut: a function of the row's own context alone.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

constexpr int kMinSplit = 256;  // what one CTA goes through in about two latencies of memory
constexpr int kMaxSplits = 64;

// 256 up to 16384 keys, then doubling.
XLLM_HOST_DEVICE int split_length(int context) {
  int length = kMinSplit;
  while (static_cast<int64_t>(length) * kMaxSplits < context) length *= 2;
  return length;
}
XLLM_HOST_DEVICE int num_splits(int context) {
  const int length = split_length(context);
  return (context + length - 1) / length;
}

}  // namespace cuda
}  // namespace xllm
