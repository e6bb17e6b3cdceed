// What a product left to the kernel after it: the sums of its slices.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

// Sums of slices [num_slices][num_tokens][num_rows]; data null: none.
struct PartialSums {
  const float *data;
  int num_slices, num_tokens, num_rows;
  const float *bias;  // [num_rows], or null

  // ((p_0 + p_1) + ...) + bias.
  __device__ __forceinline__ float sum(int token, int row) const {
    const float *p = data + static_cast<int64_t>(token) * num_rows + row;
    float y = p[0];
    for (int i = 1; i < num_slices; ++i) y = __fadd_rn(y, p[i * slice_stride()]);
    return bias != nullptr ? __fadd_rn(y, bias[row]) : y;
  }

  // The same of rows `row` to row + 3, a multiple of 4, as num_rows is.
  __device__ __forceinline__ float4 sum4(int token, int row) const {
    const float *p = data + static_cast<int64_t>(token) * num_rows + row;
    float4 y = *reinterpret_cast<const float4 *>(p);
#pragma unroll 8
    for (int i = 1; i < num_slices; ++i)
      y = plus(y, *reinterpret_cast<const float4 *>(p + i * slice_stride()));
    return bias != nullptr ? plus(y, *reinterpret_cast<const float4 *>(bias + row)) : y;
  }

  __device__ __forceinline__ int64_t slice_stride() const {
    return static_cast<int64_t>(num_tokens) * num_rows;
  }
  static __device__ __forceinline__ float4 plus(const float4 &a, const float4 &b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                       __fadd_rn(a.w, b.w));
  }
};

}  // namespace cuda
}  // namespace xllm
