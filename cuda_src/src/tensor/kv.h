// Where keys and values lie in memory: the layout that the pool allocates and every backend reads
// and writes.
//
// The cache is a pool of blocks of `block_size` token positions. A block is contiguous and holds
//   all layers: block = layers x { K, V } x kv_heads x page
//   page  = codes [block_size, head_dim], then scales [block_size, head_dim / 32] f16 (int8 and
//         int4 only)
// so that a block can be copied, swapped or shared as one piece. A page is the unit that attention
// streams. Types: f32 and f16 store the value. int8: x = scale * q, q in -127..127, one scale per
// token and 32 channels. int4: x = scale * q, q in -7..7 stored as q + 8, channel 2i in the low and
// 2i + 1 in the high nibble. A backend may rotate what it quantises (cpu/hadamard.h): nobody else
// reads it.
#pragma once

#include <cstdint>

namespace xllm {

// Numbers are those of xllm_kv_type in xllm.h; f32 belongs to the per-slot path and cannot be asked
// for.
enum class KvType : int { kF16 = 0, kInt8 = 1, kInt4 = 2, kF32 = 3 };

constexpr int kKvGroup = 32;  // channels that share a scale

struct KvLayout {
  KvType type = KvType::kF16;
  int num_layers = 0;
  int num_kv_heads = 0;
  int head_dim = 0;    // a multiple of 32 for int8 and int4
  int block_size = 0;  // token positions per block

  // Bytes of one token's codes for one head.
  uint64_t row_bytes() const {
    const uint64_t dim = static_cast<uint64_t>(head_dim);
    switch (type) {
      case KvType::kF32:
        return dim * 4;
      case KvType::kF16:
        return dim * 2;
      case KvType::kInt8:
        return dim;
      case KvType::kInt4:
        return dim / 2;
    }
    return 0;
  }
  bool has_scales() const { return type == KvType::kInt8 || type == KvType::kInt4; }
  // Bytes of one token's scales for one head.
  uint64_t scale_row_bytes() const {
    return has_scales() ? static_cast<uint64_t>(head_dim / kKvGroup) * 2 : 0;
  }
  // Offset of the scales within a page.
  uint64_t scales_offset() const { return row_bytes() * static_cast<uint64_t>(block_size); }
  uint64_t page_bytes() const {
    return (row_bytes() + scale_row_bytes()) * static_cast<uint64_t>(block_size);
  }
  // Bytes of K and V of one layer within a block.
  uint64_t layer_bytes() const { return 2 * static_cast<uint64_t>(num_kv_heads) * page_bytes(); }
  uint64_t block_bytes() const { return layer_bytes() * static_cast<uint64_t>(num_layers); }
  uint64_t bytes_per_token() const { return block_bytes() / static_cast<uint64_t>(block_size); }
};

// The memory behind the block ids: num_blocks blocks from `base`, on the backend's device. Not
// owned.
struct KvView {
  KvLayout layout;
  uint8_t *base = nullptr;
  int num_blocks = 0;

  // First byte of the page of K (V) of `kv_head` in layer `layer` of block `block`.
  uint8_t *k_page(int layer, int block, int kv_head) const { return page(layer, block, kv_head); }
  uint8_t *v_page(int layer, int block, int kv_head) const {
    return page(layer, block, layout.num_kv_heads + kv_head);
  }

 private:
  uint8_t *page(int layer, int block, int index) const {
    return base + static_cast<uint64_t>(block) * layout.block_bytes() +
           static_cast<uint64_t>(layer) * layout.layer_bytes() +
           static_cast<uint64_t>(index) * layout.page_bytes();
  }
};

}  // namespace xllm
