// The KV cache's blocks as integers: which are free, and how many users each of the others has. The
// memory behind the ids is kv_storage's; which of them hold a reusable prefix is prefix_cache's.
#pragma once

#include <cstdint>
#include <vector>

namespace xllm {

constexpr int32_t kNoBlock = -1;

// Ids 0 .. num_blocks - 1. A block is free, or in use with a reference count >= 1 (shared prefixes
// count once per user). Not thread-safe: it belongs to the step loop's thread.
class BlockPool {
 public:
  // Takes 8 bytes per block. num_blocks >= 0.
  explicit BlockPool(int32_t num_blocks);

  // A free block with one reference, or kNoBlock when there is none. A fresh pool hands out 0, 1,
  // 2, ...; later the block that was freed last comes first, because its memory is warm.
  int32_t allocate();
  // One more user of a block in use.
  void add_reference(int32_t block);
  // One user less. True when that was the last one: the block is free again.
  bool release(int32_t block);

  int32_t reference_count(int32_t block) const;  // 0: free
  int32_t num_blocks() const { return static_cast<int32_t>(reference_counts_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_used() const { return num_blocks() - num_free(); }
  int32_t peak_used() const { return peak_used_; }
  uint64_t num_allocations() const { return num_allocations_; }

 private:
  std::vector<int32_t> reference_counts_;
  std::vector<int32_t> free_;  // a stack; the next block to hand out is its last
  int32_t peak_used_ = 0;
  uint64_t num_allocations_ = 0;
};

}  // namespace xllm
