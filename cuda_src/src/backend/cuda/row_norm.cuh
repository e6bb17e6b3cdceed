// RMSNorm of a row, quantised on the way out: one CTA per token row.
#pragma once

#include "backend/cuda/act_quant.cuh"

namespace xllm {
namespace cuda {

constexpr int kRowThreads =
    1024;  // constant: the tree of a row's sum must not depend on anything but the row
constexpr int kRowWarps = kRowThreads / kWarp;

// act = Q(rms_norm(x) * weight). Warp w holds the row's blocks w, w + 32, ...: v[i] is element 32 *
// (w + 32 * i) + lane.
template <int kPerThread>
__device__ __forceinline__ void norm_and_quantize(const float (&v)[kPerThread],
                                                  const float (&weight)[kPerThread], int num_cols,
                                                  float eps, const ActView &act, int token,
                                                  float *shared) {
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) sum = __fmaf_rn(v[i], v[i], sum);
  sum = block_sum<kRowThreads>(sum, shared);
  const float mean = __fdiv_rn(sum, static_cast<float>(num_cols));
  const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int block = warp + kRowWarps * i;
    if (block * kActBlock >= num_cols) break;
    quantize_block(__fmul_rn(__fmul_rn(v[i], inverse), weight[i]), act, token, block);
  }
}

template <int kPerThread>
__device__ __forceinline__ void load_row(const float *row, int num_cols, float (&v)[kPerThread]) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int col = (static_cast<int>(threadIdx.x >> 5) + kRowWarps * i) * kActBlock +
                    static_cast<int>(threadIdx.x & 31);
    v[i] = col < num_cols ? row[col] : 0.0f;
  }
}

// x [num_tokens, num_cols] f32, weight [num_cols]; grid: tokens.
template <int kPerThread>
__global__ void __launch_bounds__(kRowThreads)
    rms_norm_kernel(const float *x, const float *weight, int num_cols, float eps, ActView act) {
  __shared__ float shared[kRowWarps];
  float w[kPerThread], v[kPerThread];
  load_row(weight, num_cols, w);
  let_next_kernel_start();
  wait_for_previous_kernel();
  load_row(x + static_cast<int64_t>(blockIdx.x) * num_cols, num_cols, v);
  norm_and_quantize(v, w, num_cols, eps, act, static_cast<int>(blockIdx.x), shared);
}

}  // namespace cuda
}  // namespace xllm
