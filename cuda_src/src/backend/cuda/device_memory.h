// Device memory of one engine: counted, limited, every failure with the bytes that were needed and
// free.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "tensor/buffer.h"

namespace xllm::cuda {

// cudaMalloc behind the Allocator interface. Thread-safe.
class DeviceAllocator : public Allocator {
 public:
  // memory_limit: bytes that this engine may take, 0 for all.
  DeviceAllocator(int device_index, uint64_t memory_limit);

  void *allocate(uint64_t size_bytes) override;
  void free(void *memory, uint64_t size_bytes) noexcept override;

  uint64_t total_bytes() const { return total_; }
  // What allocate can still give: the device's own free memory, and what is left of the limit.
  uint64_t free_bytes() const;

 private:
  int device_index_;
  uint64_t total_ = 0;
  std::mutex mutex_;
  std::atomic<uint64_t> used_{0};
};

// Page-locked host memory, which the device copies from and to without waiting for the host.
// Movable, not copyable.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(uint64_t size_bytes);
  PinnedBuffer(PinnedBuffer &&other) noexcept { swap(other); }
  PinnedBuffer &operator=(PinnedBuffer &&other) noexcept {
    PinnedBuffer(std::move(other)).swap(*this);
    return *this;
  }
  PinnedBuffer(const PinnedBuffer &) = delete;
  PinnedBuffer &operator=(const PinnedBuffer &) = delete;
  ~PinnedBuffer();

  template <typename T>
  T *data() const {
    return static_cast<T *>(data_);
  }
  uint64_t size_bytes() const { return size_bytes_; }
  void swap(PinnedBuffer &other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
  }

 private:
  void *data_ = nullptr;
  uint64_t size_bytes_ = 0;
};

}  // namespace xllm::cuda
