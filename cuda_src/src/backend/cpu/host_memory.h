// Host memory as the backends' Allocator hands it out.
#pragma once

#include <atomic>
#include <cstdint>

#include "tensor/buffer.h"

namespace xllm::cpu {

// Blocks of whole pages, large ones where the system has them, come from the system untouched and
// unreserved, so that a large pool costs nothing until it is used; small ones from the heap. All
// aligned to 256. Counts what it has handed out and keeps it below a limit.
class HostAllocator : public Allocator {
 public:
  // limit_bytes 0: none of its own.
  explicit HostAllocator(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Throws Error(kMemory) with bytes_needed and bytes_free.
  void *allocate(uint64_t size_bytes) override;
  void free(void *memory, uint64_t size_bytes) noexcept override;

  uint64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }

 private:
  const uint64_t limit_bytes_;
  std::atomic<uint64_t> used_bytes_{0};
};

}  // namespace xllm::cpu
