// Attention of the per-slot form: f32 queries, keys and values, one CTA per head and row.
#pragma once

#include "backend/cuda/f32_rows.cuh"

namespace xllm {
namespace cuda {

struct F32AttentionArgs {
  const float *q;  // [num_tokens, num_heads, head_dim]
  KvPages kv;
  const int32_t *positions;   // [num_tokens]
  const int32_t *row_tables;  // [num_tokens] where the row's block table begins in `tables`
  const int32_t *tables;      // block ids
  int num_heads, group_size, head_dim;
  float scale;
  int window;  // 0: all
  float *out;  // [num_tokens, num_heads * head_dim]
};

// Keys 256 at a time, ascending, the weights so far shrunk as the maximum grows. Where a head is
// narrower than the CTA, groups of threads take every second (fourth, ...) key of the values and
// add up at the end. The order follows from the row's position alone. Grid: x heads, y tokens.
__global__ void __launch_bounds__(kF32Threads)
    f32_attention_kernel(const __grid_constant__ F32AttentionArgs args) {
  __shared__ float query[kMaxHeadDim];
  __shared__ float weights[kF32Threads];
  __shared__ float reduced[kF32Warps];
  __shared__ float parts[kF32Threads];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int head = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y);
  const int dim = args.head_dim, kv_head = head / args.group_size;
  const int context = args.positions[row] + 1;
  const int start = args.window > 0 ? max(0, context - args.window) : 0;
  const int32_t *table = args.tables + args.row_tables[row];
  const auto key_row = [&](int key, int index) {
    const uint8_t *page = args.kv.page(table[key / args.kv.block_size], index);
    return reinterpret_cast<const float *>(page) +
           static_cast<int64_t>(key % args.kv.block_size) * dim;
  };
  for (int i = thread; i < dim; i += kF32Threads)
    query[i] = args.q[(static_cast<int64_t>(row) * args.num_heads + head) * dim + i];
  __syncthreads();

  const int num_groups = kF32Threads / dim;  // head_dim <= 256
  const int group = thread / dim, channel = thread % dim;
  float m = negative_infinity(), sum = 0, acc = 0;
  for (int key0 = start; key0 < context; key0 += kF32Threads) {
    const int key = key0 + thread;
    float x = negative_infinity();
    if (key < context) {
      const float *k = key_row(key, kv_head);
      float dot = 0;
      for (int i = 0; i < dim; ++i) dot = __fmaf_rn(query[i], k[i], dot);
      x = __fmul_rn(dot, args.scale);
    }
    float largest = x;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    if (lane == 0) reduced[warp] = largest;
    __syncthreads();
    float new_m = m;
#pragma unroll
    for (int w = 0; w < kF32Warps; ++w) new_m = fmaxf(new_m, reduced[w]);
    __syncthreads();
    const float base = new_m == negative_infinity() ? 0.0f : new_m;
    const float shrink = exp_f32(__fsub_rn(m, base));
    m = new_m;
    const float e = key < context ? exp_f32(__fsub_rn(x, base)) : 0.0f;
    weights[thread] = e;
    sum = __fmaf_rn(sum, shrink, block_sum<kF32Threads>(e, reduced));
    acc = __fmul_rn(acc, shrink);
    const int count = min(kF32Threads, context - key0);
    if (group < num_groups) {
      for (int n = group; n < count; n += num_groups)
        acc =
            __fmaf_rn(weights[n], key_row(key0 + n, args.kv.num_kv_heads + kv_head)[channel], acc);
    }
    __syncthreads();
  }
  parts[thread] = acc;
  __syncthreads();
  if (thread >= dim) return;
  float total = parts[thread];
  for (int g = 1; g < num_groups; ++g) total = __fadd_rn(total, parts[g * dim + thread]);
  args.out[(static_cast<int64_t>(row) * args.num_heads + head) * dim + thread] =
      __fdiv_rn(total, sum);
}

}  // namespace cuda
}  // namespace xllm
