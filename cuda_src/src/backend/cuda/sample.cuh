// The largest logit of each row, the lowest id on a tie, in two steps; -1 for a row that holds NaN
// or infinity.
#pragma once

#include "backend/cuda/device_utils.cuh"

namespace xllm {
namespace cuda {

constexpr int kArgmaxParts = 64;
constexpr int kArgmaxThreads = 256;

struct Candidate {
  float logit;
  int32_t id;  // -1: a logit was not finite
};

__device__ __forceinline__ Candidate better(const Candidate &a, const Candidate &b) {
  if (a.id < 0 || b.id < 0) return {0.0f, -1};
  if (a.logit != b.logit) return a.logit > b.logit ? a : b;
  return a.id < b.id ? a : b;
}

__device__ __forceinline__ Candidate warp_best(Candidate c) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    const Candidate other = {__shfl_xor_sync(0xffffffffu, c.logit, offset),
                             __shfl_xor_sync(0xffffffffu, c.id, offset)};
    c = better(c, other);
  }
  return c;
}

// logits [rows, vocab]; ids below num_choosable compete. Grid: x parts, y rows.
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_parts_kernel(const float *logits, int vocab, int num_choosable, Candidate *parts) {
  __shared__ Candidate shared[kArgmaxThreads / kWarp];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const float *row = logits + static_cast<int64_t>(blockIdx.y) * vocab;
  Candidate best = {-3.402823466e38f, 0x7fffffff};
  for (int id = static_cast<int>(blockIdx.x) * kArgmaxThreads + static_cast<int>(threadIdx.x);
       id < num_choosable; id += kArgmaxParts * kArgmaxThreads) {
    const float x = row[id];
    const bool is_finite = fabsf(x) <= 3.402823466e38f;
    best = better(best, {x, is_finite ? id : -1});
  }
  best = warp_best(best);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kArgmaxThreads / kWarp; ++i) best = better(best, shared[i]);
    parts[blockIdx.y * kArgmaxParts + blockIdx.x] = best;
  }
}

// One warp per row; grid: rows. Also leaves the id where the next embed of that sampler row looks
// for it.
__global__ void __launch_bounds__(kWarp)
    argmax_rows_kernel(const Candidate *parts, const int32_t *logit_rows,
                       const int32_t *sampler_rows, int32_t *chosen, int32_t *sampled) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Candidate *row = parts + blockIdx.x * kArgmaxParts;
  Candidate best = better(row[threadIdx.x], row[threadIdx.x + kWarp]);
  best = warp_best(best);
  if (threadIdx.x == 0) {
    chosen[blockIdx.x] = best.id;
    sampled[sampler_rows[logit_rows[blockIdx.x]]] = best.id;
  }
}

}  // namespace cuda
}  // namespace xllm
