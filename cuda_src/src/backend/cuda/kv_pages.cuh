// Pages of the KV cache as kernels address them.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

// Pages of one layer (tensor/kv.h), f16, int8 or int4.
struct KvPages {
  uint8_t *base;        // of block 0, this layer
  int64_t block_bytes;  // from block to block
  int64_t page_bytes;
  int block_size;
  int block_shift;  // log2 of it, or -1
  int num_kv_heads;
  int bits;               // of a value: 16, 8 or 4
  int64_t scales_offset;  // within a page, where bits < 16

  __device__ __forceinline__ uint8_t *page(int64_t block, int index) const {
    return base + block * block_bytes + index * page_bytes;
  }
  // Of a position: its block, and its row there.
  __device__ __forceinline__ int64_t block_of(int64_t at) const {
    return block_shift >= 0 ? at >> block_shift : at / block_size;
  }
  __device__ __forceinline__ int row_of(int64_t at) const {
    return block_shift >= 0 ? static_cast<int>(at) & (block_size - 1)
                            : static_cast<int>(at % block_size);
  }
};

constexpr int kMaxHeadDim = 256;

}  // namespace cuda
}  // namespace xllm
