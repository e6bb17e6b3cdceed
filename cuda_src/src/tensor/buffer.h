// Owned memory, on whichever device the allocator stands for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace xllm {

// Where memory comes from; each backend implements it. Thread-safe.
class Allocator {
 public:
  virtual ~Allocator() = default;
  // `size_bytes` bytes aligned to 256, contents undefined. Pages of a host allocation are not
  // touched (so a large pool costs nothing until it is used). Throws Error(kMemory) with
  // bytes_needed and bytes_free.
  virtual void *allocate(uint64_t size_bytes) = 0;
  // Takes back what allocate returned; null is allowed.
  virtual void free(void *memory, uint64_t size_bytes) noexcept = 0;
};

// A block of memory that frees itself. Movable, not copyable. The allocator outlives it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Allocator *allocator, uint64_t size_bytes)
      : allocator_(allocator), data_(allocator->allocate(size_bytes)), size_bytes_(size_bytes) {}
  Buffer(Buffer &&other) noexcept { swap(other); }
  Buffer &operator=(Buffer &&other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() {
    if (data_ != nullptr) allocator_->free(data_, size_bytes_);
  }

  template <typename T = void>
  T *data() const {
    return static_cast<T *>(data_);
  }
  uint64_t size_bytes() const { return size_bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

  void swap(Buffer &other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
  }

 private:
  Allocator *allocator_ = nullptr;
  void *data_ = nullptr;
  uint64_t size_bytes_ = 0;
};

}  // namespace xllm
