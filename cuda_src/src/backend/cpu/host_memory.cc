#include "backend/cpu/host_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <string>

#include "base/error.h"

namespace xllm::cpu {
namespace {

constexpr uint64_t kAlignment = 256;
// From here on memory comes as pages of its own: it can be large, and goes back to the system when
// freed.
constexpr uint64_t kMapFrom = uint64_t{1} << 20;

uint64_t padded(uint64_t size_bytes) {
  return (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

[[noreturn]] void refuse(uint64_t needed, uint64_t free_bytes, const char *remedy) {
  throw Error(
      Status::kMemory,
      "host memory: " + std::to_string(needed) + " bytes needed, " + std::to_string(free_bytes) +
          " free; " + remedy,
      {{"bytes_needed", std::to_string(needed)}, {"bytes_free", std::to_string(free_bytes)}});
}

}  // namespace

void *HostAllocator::allocate(uint64_t size_bytes) {
  const uint64_t used = used_bytes_.fetch_add(size_bytes) + size_bytes;
  if (limit_bytes_ != 0 && (used > limit_bytes_ || used < size_bytes)) {
    used_bytes_.fetch_sub(size_bytes);
    const uint64_t before = used - size_bytes;
    refuse(size_bytes, before < limit_bytes_ ? limit_bytes_ - before : 0,
           "raise the memory limit, or ask for less");
  }
  void *memory = nullptr;
  if (size_bytes >= kMapFrom) {
    memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) memory = nullptr;
    // Weights, keys and values are read in streams, which small pages make wait for address
    // translation. No effect where the system has no large ones.
    if (memory != nullptr) madvise(memory, size_bytes, MADV_HUGEPAGE);
  } else {
    memory = std::aligned_alloc(kAlignment, padded(size_bytes == 0 ? 1 : size_bytes));
  }
  if (memory == nullptr) {
    used_bytes_.fetch_sub(size_bytes);
    refuse(size_bytes, 0, "the system refused them; ask for less, or free memory");
  }
  return memory;
}

void HostAllocator::free(void *memory, uint64_t size_bytes) noexcept {
  if (memory == nullptr) return;
  if (size_bytes >= kMapFrom) {
    munmap(memory, size_bytes);
  } else {
    std::free(memory);
  }
  used_bytes_.fetch_sub(size_bytes);
}

}  // namespace xllm::cpu
