// The per-slot form's work on rows, all in f32: embedding, norms, head norms and RoPE. Kept
// plain: this form is the accuracy reference, one slot at a time.
#pragma once

#include "backend/cuda/head_rows.cuh"

namespace xllm {
namespace cuda {

constexpr int kF32Threads = 256;
constexpr int kF32Warps = kF32Threads / kWarp;

struct F32EmbedArgs {
  const float *table;        // [vocab, num_cols]
  const int32_t *token_ids;  // [num_tokens]; < 0: sampled[sampler_rows[row]]
  const int32_t *sampler_rows;
  const int32_t *sampled;
  int num_cols;
  float *x;  // [num_tokens, num_cols]
};

// x = E[token]; grid: tokens.
__global__ void __launch_bounds__(kF32Threads)
    f32_embed_kernel(const __grid_constant__ F32EmbedArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x);
  int token = args.token_ids[row];
  if (token < 0) token = args.sampled[args.sampler_rows[row]];
  if (token < 0) token = 0;  // the row that gave it was refused; nobody reads what follows
  for (int i = static_cast<int>(threadIdx.x); i < args.num_cols; i += kF32Threads) {
    args.x[static_cast<int64_t>(row) * args.num_cols + i] =
        args.table[static_cast<int64_t>(token) * args.num_cols + i];
  }
}

// out = rms_norm(x) * weight, both [num_tokens, num_cols]; bias, where there is one, goes onto x
// first. Grid: tokens.
__global__ void __launch_bounds__(kF32Threads)
    f32_norm_kernel(float *x, const float *bias, const float *weight, int num_cols, float eps,
                    float *out) {
  __shared__ float shared[kF32Warps];
  let_next_kernel_start();
  wait_for_previous_kernel();
  float *row = x + static_cast<int64_t>(blockIdx.x) * num_cols;
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < num_cols; i += kF32Threads) {
    float v = row[i];
    if (bias != nullptr) {
      v = __fadd_rn(v, bias[i]);
      row[i] = v;
    }
    sum = __fmaf_rn(v, v, sum);
  }
  const float mean = __fdiv_rn(block_sum<kF32Threads>(sum, shared), static_cast<float>(num_cols));
  const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
  float *to = out + static_cast<int64_t>(blockIdx.x) * num_cols;
  for (int i = static_cast<int>(threadIdx.x); i < num_cols; i += kF32Threads)
    to[i] = __fmul_rn(__fmul_rn(row[i], inverse), weight[i]);
}

struct F32QkvArgs {
  QkvArgs rows;       // its q is not used
  const float *bias;  // [(num_heads + 2 * num_kv_heads) * head_dim], or null
  float *q;           // [num_tokens, num_heads, head_dim]
};

// Bias, head norm and RoPE of one head per warp; q to its rows, k and v into the f32 cache. Grid: x
// heads / 8, y tokens.
__global__ void __launch_bounds__(kF32Threads)
    f32_qkv_rows_kernel(const __grid_constant__ F32QkvArgs args) {
  __shared__ float heads[kF32Warps][kMaxHeadDim];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const QkvArgs &rows = args.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int head = static_cast<int>(blockIdx.x) * kF32Warps + warp;
  const int row = static_cast<int>(blockIdx.y), dim = rows.head_dim;
  const int num_all = rows.num_heads + 2 * rows.kv.num_kv_heads;
  if (head >= num_all) return;
  float *x = heads[warp];
  const float *from = rows.qkv + (static_cast<int64_t>(row) * num_all + head) * dim;
  for (int i = lane; i < dim; i += kWarp) {
    x[i] = args.bias != nullptr ? __fadd_rn(from[i], args.bias[head * dim + i]) : from[i];
  }
  __syncwarp();
  const HeadKind kind = head < rows.num_heads                          ? HeadKind::kQuery
                        : head < rows.num_heads + rows.kv.num_kv_heads ? HeadKind::kKey
                                                                       : HeadKind::kValue;
  const auto factors = head_factors<kMaxHeadDim>(rows, dim, kind, rows.positions[row]);
  float v[kMaxHeadDim / 128][4];
  finish_head<kMaxHeadDim, false>(rows, dim, kind, factors, {x, nullptr, 1, 0}, v);
  float *to = nullptr;
  if (kind == HeadKind::kQuery) {
    to = args.q + (static_cast<int64_t>(row) * rows.num_heads + head) * dim;
  } else {
    const int64_t index = rows.kv_indices[row];
    uint8_t *page = rows.kv.page(index / rows.kv.block_size, head - rows.num_heads);
    to = reinterpret_cast<float *>(page) + index % rows.kv.block_size * dim;
  }
#pragma unroll
  for (int k = 0; k < kMaxHeadDim / 128; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * lane + 128 * k + j;
      if (i < dim) to[i] = v[k][j];
    }
  }
}

}  // namespace cuda
}  // namespace xllm
