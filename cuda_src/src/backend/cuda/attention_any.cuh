// Attention for head sizes that the tiled kernel does not take.
#pragma once

#include "backend/cuda/attention_args.cuh"
#include "backend/cuda/kv_codes.cuh"

namespace xllm {
namespace cuda {

constexpr int kAnyWarps = 4;
constexpr int kAnyThreads = kAnyWarps * kWarp;

// Any head_dim up to 256, without tensor cores: slow, for small and unusual models. Grid: x splits,
// y heads, z rows.
__global__ void __launch_bounds__(kAnyThreads)
    attention_any_kernel(const __grid_constant__ AttentionArgs args) {
  __shared__ float query[kMaxHeadDim];
  __shared__ float weights[kAnyThreads];
  __shared__ float reduced[kAnyWarps];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int local_row = static_cast<int>(blockIdx.z), row = args.first_row + local_row;
  const int position = args.positions[row];
  if (position < 0) return;
  const int split = static_cast<int>(blockIdx.x);
  const SplitRange range = split_range(args, position, split);
  if (split < range.first_split || split >= range.first_split + range.count) return;
  const int head = static_cast<int>(blockIdx.y), kv_head = head / args.group_size;
  const int dim = args.head_dim;
  const int32_t *table = args.tables + args.row_tables[row];
  for (int i = thread; i < dim; i += kAnyThreads) {
    query[i] = __half2float(args.q[(static_cast<int64_t>(row) * args.num_heads + head) * dim + i]);
  }
  __syncthreads();
  float m = negative_infinity(), sum = 0, out[2] = {0, 0};
  for (int key0 = range.begin; key0 < range.end; key0 += kAnyThreads) {
    const int key = key0 + thread;
    float x = negative_infinity();
    if (key >= range.start && key < range.end) {
      const uint8_t *page = args.kv.page(table[key / args.kv.block_size], kv_head);
      const int at = key % args.kv.block_size;
      float dot = 0;
      for (int i = 0; i < dim; ++i)
        dot = __fmaf_rn(query[i], load_kv(args.kv, page, at, dim, i), dot);
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
    for (int w = 0; w < kAnyWarps; ++w) new_m = fmaxf(new_m, reduced[w]);
    __syncthreads();
    const float base = new_m == negative_infinity() ? 0.0f : new_m;
    const float shrink = exp2_f32(__fsub_rn(m, base));
    m = new_m;
    const float e = exp2_f32(__fsub_rn(x, base));
    weights[thread] = e;
    sum = __fmaf_rn(sum, shrink, block_sum<kAnyThreads>(e, reduced));
    const int count = min(kAnyThreads, range.end - key0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = thread + i * kAnyThreads;
      if (channel >= dim) break;
      float acc = __fmul_rn(out[i], shrink);
      for (int n = 0; n < count; ++n) {
        if (key0 + n < range.start) continue;
        const int key = key0 + n;
        const uint8_t *page =
            args.kv.page(table[key / args.kv.block_size], args.kv.num_kv_heads + kv_head);
        acc = __fmaf_rn(weights[n], load_kv(args.kv, page, key % args.kv.block_size, dim, channel),
                        acc);
      }
      out[i] = acc;
    }
    __syncthreads();
  }
  const int64_t entry =
      (static_cast<int64_t>(local_row) * args.num_heads + head) * gridDim.x + split;
  const bool is_single = range.count == 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int channel = thread + i * kAnyThreads;
    if (channel >= dim) break;
    if (is_single) {
      args.out[(static_cast<int64_t>(row) * args.num_heads + head) * dim + channel] =
          __fdiv_rn(out[i], sum);
    } else {
      args.partial_out[entry * dim + channel] = out[i];
    }
  }
  if (is_single) return;
  if (thread == 0) args.partial_stats[entry] = make_float2(m, sum);
  if (!is_last_arriver(args.counters + static_cast<int64_t>(local_row) * gridDim.y + blockIdx.y,
                       range.count))
    return;
  merge_splits<kAnyThreads>(args, local_row, head, 1, range, weights);
}

}  // namespace cuda
}  // namespace xllm
