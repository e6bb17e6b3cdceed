// One sequence's blocks, in order of position.
#pragma once

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "base/span.h"

namespace xllm {

// Ids only; it owns no reference. Whoever fills it gives the blocks back
// (PrefixCache::release_all).
class BlockTable {
 public:
  explicit BlockTable(int block_size) : block_size_(block_size) { XLLM_DCHECK(block_size > 0); }

  void append(int32_t block) { blocks_.push_back(block); }
  void replace(int index, int32_t block) {
    blocks_[static_cast<size_t>(index)] = block;
  }  // copy on write
  void clear() { blocks_.clear(); }
  std::vector<int32_t> &ids() { return blocks_; }
  Span<const int32_t> ids() const { return blocks_; }

  int block_size() const { return block_size_; }
  int num_blocks() const { return static_cast<int>(blocks_.size()); }
  int64_t capacity() const {
    return static_cast<int64_t>(num_blocks()) * block_size_;
  }  // token positions
  // Blocks to add before positions 0 .. num_tokens - 1 all have a place; 0 when they do.
  int num_missing(int64_t num_tokens) const {
    const int64_t needed = (num_tokens + block_size_ - 1) / block_size_;
    return needed > num_blocks() ? static_cast<int>(needed - num_blocks()) : 0;
  }
  // Where position's K and V lie: block * block_size + offset. The position has a block.
  int64_t kv_index(int64_t position) const {
    XLLM_DCHECK(position >= 0 && position < capacity());
    return static_cast<int64_t>(blocks_[static_cast<size_t>(position / block_size_)]) *
               block_size_ +
           position % block_size_;
  }

 private:
  int block_size_;
  std::vector<int32_t> blocks_;
};

}  // namespace xllm
