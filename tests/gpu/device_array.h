// Device memory of a check: checked, poisoned, freed at the end.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <vector>

#include "backend/cuda/cuda_check.h"

namespace xllm::check {

template <typename T>
class DeviceArray {
 public:
  // Bytes of 0xff: NaN as f32 and f16, -1 as int.
  explicit DeviceArray(size_t count) : count_(count) {
    cuda::check(cudaMalloc(&data_, count * sizeof(T) + 16), "allocate");
    poison();
  }
  explicit DeviceArray(const std::vector<T> &values) : DeviceArray(values.size()) { fill(values); }
  DeviceArray(const DeviceArray &) = delete;
  DeviceArray &operator=(const DeviceArray &) = delete;
  ~DeviceArray() { (void)cudaFree(data_); }

  // note: waits, because a copy from pageable memory may return before it has arrived, and the
  // checks' stream waits for no other.
  void fill(const std::vector<T> &values) {
    cuda::check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
                "copy to the device");
    cuda::check(cudaDeviceSynchronize(), "copy to the device");
  }
  void poison() {
    cuda::check(cudaMemset(data_, 0xff, count_ * sizeof(T)), "poison");
    cuda::check(cudaDeviceSynchronize(), "poison");
  }
  void zero() {
    cuda::check(cudaMemset(data_, 0, count_ * sizeof(T)), "clear");
    cuda::check(cudaDeviceSynchronize(), "clear");
  }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    cuda::check(cudaDeviceSynchronize(), "finish");
    cuda::check(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
                "copy from the device");
    return values;
  }
  T *data() const { return data_; }

 private:
  T *data_ = nullptr;
  size_t count_;
};

}  // namespace xllm::check
