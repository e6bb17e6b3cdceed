#include "kvcache/block_pool.h"

#include <algorithm>

#include "base/error.h"

namespace xllm {

BlockPool::BlockPool(int32_t num_blocks) {
  XLLM_DCHECK(num_blocks >= 0);
  reference_counts_.assign(static_cast<size_t>(num_blocks), 0);
  free_.resize(static_cast<size_t>(num_blocks));
  for (int32_t i = 0; i < num_blocks; ++i) free_[static_cast<size_t>(i)] = num_blocks - 1 - i;
}

int32_t BlockPool::allocate() {
  if (free_.empty()) return kNoBlock;
  const int32_t block = free_.back();
  free_.pop_back();
  XLLM_DCHECK(reference_counts_[static_cast<size_t>(block)] == 0);
  reference_counts_[static_cast<size_t>(block)] = 1;
  ++num_allocations_;
  peak_used_ = std::max(peak_used_, num_used());
  return block;
}

void BlockPool::add_reference(int32_t block) {
  XLLM_DCHECK(block >= 0 && block < num_blocks());
  XLLM_DCHECK(reference_counts_[static_cast<size_t>(block)] > 0);
  ++reference_counts_[static_cast<size_t>(block)];
}

bool BlockPool::release(int32_t block) {
  XLLM_DCHECK(block >= 0 && block < num_blocks());
  int32_t &count = reference_counts_[static_cast<size_t>(block)];
  XLLM_DCHECK(count > 0);
  if (--count > 0) return false;
  free_.push_back(block);
  return true;
}

int32_t BlockPool::reference_count(int32_t block) const {
  XLLM_DCHECK(block >= 0 && block < num_blocks());
  return reference_counts_[static_cast<size_t>(block)];
}

}  // namespace xllm
