// A layer's pages of the KV pool, as the kernels address them.
#pragma once

#include "backend/cuda/kv_pages.cuh"
#include "tensor/kv.h"

namespace xllm::cuda {

// Of a stored value.
inline int kv_bits(const KvLayout &layout) {
  return layout.type == KvType::kInt8 ? 8 : layout.type == KvType::kInt4 ? 4 : 16;
}

inline KvPages kv_pages(const KvView &kv, int layer) {
  KvPages pages = {};
  pages.base = kv.base + static_cast<uint64_t>(layer) * kv.layout.layer_bytes();
  pages.block_bytes = static_cast<int64_t>(kv.layout.block_bytes());
  pages.page_bytes = static_cast<int64_t>(kv.layout.page_bytes());
  pages.block_size = kv.layout.block_size;
  pages.block_shift = -1;
  for (int shift = 0; shift < 30; ++shift) {
    if (pages.block_size == 1 << shift) pages.block_shift = shift;
  }
  pages.num_kv_heads = kv.layout.num_kv_heads;
  pages.bits = kv_bits(kv.layout);
  pages.scales_offset = static_cast<int64_t>(kv.layout.scales_offset());
  return pages;
}

}  // namespace xllm::cuda
