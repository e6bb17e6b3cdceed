#include <algorithm>
#include <string>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_memory.h"

namespace xllm::cuda {

DeviceAllocator::DeviceAllocator(int device_index, uint64_t memory_limit)
    : device_index_(device_index) {
  check(cudaSetDevice(device_index), "select the device");
  size_t free_now = 0, total = 0;
  check(cudaMemGetInfo(&free_now, &total), "ask for the device's memory");
  total_ = memory_limit > 0 ? std::min<uint64_t>(memory_limit, total) : total;
}

uint64_t DeviceAllocator::free_bytes() const {
  size_t free_now = 0, total = 0;
  check(cudaSetDevice(device_index_), "select the device");
  check(cudaMemGetInfo(&free_now, &total), "ask for the device's memory");
  const uint64_t used = used_.load();
  return std::min<uint64_t>(free_now, total_ > used ? total_ - used : 0);
}

void *DeviceAllocator::allocate(uint64_t size_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t free_now = free_bytes();
  void *memory = nullptr;
  cudaError_t result = cudaErrorMemoryAllocation;
  if (size_bytes <= free_now) result = cudaMalloc(&memory, std::max<uint64_t>(size_bytes, 1));
  if (result == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw Error(
        Status::kMemory,
        "CUDA: " + std::to_string(size_bytes) + " bytes of device memory needed, " +
            std::to_string(free_now) +
            " free; use a smaller KV pool, fewer slots or a smaller model file, or raise the "
            "memory limit",
        {{"bytes_needed", std::to_string(size_bytes)}, {"bytes_free", std::to_string(free_now)}});
  }
  check(result, "allocate device memory");
  used_ += size_bytes;
  return memory;
}

void DeviceAllocator::free(void *memory, uint64_t size_bytes) noexcept {
  if (memory == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  (void)cudaSetDevice(device_index_);
  (void)cudaFree(
      memory);  // note: fails only after a device fault, which the next call on the stream reports
  used_ -= size_bytes;
}

PinnedBuffer::PinnedBuffer(uint64_t size_bytes) : size_bytes_(size_bytes) {
  const cudaError_t result = cudaMallocHost(&data_, std::max<uint64_t>(size_bytes, 1));
  if (result == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw Error(Status::kMemory,
                "CUDA: " + std::to_string(size_bytes) +
                    " bytes of page-locked host memory needed and not granted",
                {{"bytes_needed", std::to_string(size_bytes)}});
  }
  check(result, "allocate page-locked memory");
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) (void)cudaFreeHost(data_);
}

}  // namespace xllm::cuda
