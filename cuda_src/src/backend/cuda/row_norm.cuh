// RMSNorm of a row, quantised on the way out.
//
// A block of 32 is quantised before the row's norm is known: the codes of x * weight do not depend
// on a factor of the whole row, and the scale takes it afterwards. So the product that finishes a
// row block by block (o_proj, down) can quantise it too, leaving each block's sum of squares beside
// it, and the next product turns those into the factor (stage_acts.cuh). This kernel, one CTA per
// row, does the same in one place.
#pragma once

#include "backend/cuda/act_quant.cuh"

namespace xllm {
namespace cuda {

constexpr int kRowThreads = 1024;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kMaxRowBlocks = kRowWarps * 16;

// 1 / rms of a row, by one warp, from the sums of squares of its blocks: block l, l + 32, ... in
// lane l, then over the lanes.
__device__ __forceinline__ float row_inverse(const float *squares, int num_blocks, int num_cols,
                                             float eps) {
  float sum = 0;
  for (int first = static_cast<int>(threadIdx.x) & 31; first < num_blocks; first += 4 * kWarp) {
    float v[4];  // on their way together: this is where a product waits
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = first + i * kWarp < num_blocks ? squares[first + i * kWarp] : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = __fadd_rn(sum, v[i]);
  }
  const float mean = __fdiv_rn(warp_sum(sum), static_cast<float>(num_cols));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

// The sum of squares of a block, lane k holding x[k].
__device__ __forceinline__ float block_squares(float x) { return warp_sum(__fmul_rn(x, x)); }

// act = Q(rms_norm(x) * weight). Warp w holds the row's blocks w, w + 32, ...: v[i] is element 32 *
// (w + 32 * i) + lane. shared: kMaxRowBlocks floats.
template <int kPerThread>
__device__ __forceinline__ void norm_and_quantize(const float (&v)[kPerThread],
                                                  const float (&weight)[kPerThread], int num_cols,
                                                  float eps, const ActView &act, int token,
                                                  float *shared) {
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  const int num_blocks = (num_cols + kActBlock - 1) / kActBlock;
  float2 raw[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int block = warp + kRowWarps * i;
    if (block >= num_blocks) break;
    const float squares = block_squares(v[i]);
    if (lane == 0) shared[block] = squares;
    raw[i] = quantize_codes(__fmul_rn(v[i], weight[i]), act, token, block);
  }
  __syncthreads();
  const float inverse = row_inverse(shared, num_blocks, num_cols, eps);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int block = warp + kRowWarps * i;
    if (block >= num_blocks) break;
    if (lane == 0) act.scales[act.entry(token, block)] = scaled_by(raw[i], inverse);
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
  __shared__ float shared[kMaxRowBlocks];
  float w[kPerThread], v[kPerThread];
  load_row(weight, num_cols, w);
  let_next_kernel_start();
  wait_for_previous_kernel();
  load_row(x + static_cast<int64_t>(blockIdx.x) * num_cols, num_cols, v);
  norm_and_quantize(v, w, num_cols, eps, act, static_cast<int>(blockIdx.x), shared);
}

}  // namespace cuda
}  // namespace xllm
