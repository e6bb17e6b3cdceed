#include "kvcache/kv_storage.h"

#include <string>

#include "base/checked.h"
#include "base/error.h"

namespace xllm {

const char *kv_type_name(KvType type) {
  switch (type) {
    case KvType::kF16:
      return "f16";
    case KvType::kInt8:
      return "int8";
    case KvType::kInt4:
      return "int4";
    case KvType::kF32:
      return "f32";
  }
  return "unknown";
}

void check_kv_layout(const KvLayout &layout) {
  XLLM_DCHECK(layout.num_layers > 0 && layout.num_kv_heads > 0 && layout.head_dim > 0);
  XLLM_DCHECK(layout.block_size > 0);
  if (layout.has_scales() && layout.head_dim % kKvGroup != 0) {
    throw Error(Status::kInvalidArgument,
                std::string("kv_type ") + kv_type_name(layout.type) +
                    ": expected a head size that is a multiple of " + std::to_string(kKvGroup) +
                    ", found " + std::to_string(layout.head_dim) +
                    "; use kv_type f16 with this model",
                {{"field", "kv_type"}});
  }
}

KvStorage::KvStorage(Allocator *allocator, const KvLayout &layout, int32_t num_blocks) {
  check_kv_layout(layout);
  XLLM_DCHECK(num_blocks > 0);
  uint64_t size_bytes = 0;
  if (!checked_mul(layout.block_bytes(), static_cast<uint64_t>(num_blocks), &size_bytes)) {
    throw Error(Status::kInvalidArgument, "kv_memory: the pool's size does not fit in 64 bits",
                {{"field", "kv_memory"}});
  }
  buffer_ = Buffer(allocator, size_bytes);
  view_.layout = layout;
  view_.base = buffer_.data<uint8_t>();
  view_.num_blocks = num_blocks;
}

}  // namespace xllm
