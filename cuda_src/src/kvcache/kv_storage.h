// The memory behind the block ids.
#pragma once

#include <cstdint>

#include "tensor/buffer.h"
#include "tensor/kv.h"

namespace xllm {

// Throws Error(kInvalidArgument, field kv_type) when this head size cannot be stored in this type:
// int8 and int4 keep one scale per 32 channels, so head_dim is a multiple of 32. Says which types
// can.
void check_kv_layout(const KvLayout &layout);

// "f16", "int8", "int4" or "f32".
const char *kv_type_name(KvType type);

// `num_blocks` blocks of `layout` from the backend's allocator, which outlives this. Not cleared:
// what was not written is never read. Movable.
class KvStorage {
 public:
  // Throws what check_kv_layout throws, and Error(kMemory).
  KvStorage(Allocator *allocator, const KvLayout &layout, int32_t num_blocks);

  const KvView &view() const { return view_; }
  uint64_t size_bytes() const { return buffer_.size_bytes(); }

 private:
  Buffer buffer_;
  KvView view_;
};

}  // namespace xllm
