// What a product left to the kernel after it: the sums of its slices.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

constexpr int kMaxPartials = 8;

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

  // v += the same of rows `row` to row + 7, a multiple of 4, as num_rows is: all slices at once on
  // their way.
  __device__ __forceinline__ void add8(int token, int row, float (&v)[8]) const {
    const float *p = data + static_cast<int64_t>(token) * num_rows + row;
    float4 parts[kMaxPartials][2], onto[2] = {};
#pragma unroll
    for (int i = 0; i < kMaxPartials; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (i < num_slices)
          parts[i][k] = __ldcg(reinterpret_cast<const float4 *>(p + i * slice_stride() + 4 * k));
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (bias != nullptr) onto[k] = *reinterpret_cast<const float4 *>(bias + row + 4 * k);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float4 y = parts[0][k];
#pragma unroll
      for (int i = 1; i < kMaxPartials; ++i) {
        if (i < num_slices) y = plus(y, parts[i][k]);
      }
      if (bias != nullptr) y = plus(y, onto[k]);
      v[4 * k] = __fadd_rn(v[4 * k], y.x);
      v[4 * k + 1] = __fadd_rn(v[4 * k + 1], y.y);
      v[4 * k + 2] = __fadd_rn(v[4 * k + 2], y.z);
      v[4 * k + 3] = __fadd_rn(v[4 * k + 3], y.w);
    }
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
