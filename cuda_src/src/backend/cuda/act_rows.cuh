// Rows between products (act_rows.h). A row is quantised by several warps, a warp per chunk; under
// a norm by a cluster of CTAs, which tell one another their chunks' squares, so that more than one
// SM takes in what there is to add up. Without clusters one CTA has all the warps.
#pragma once

#include "backend/cuda/act_quant.cuh"
#include "backend/cuda/partial_sums.cuh"

namespace xllm {
namespace cuda {

constexpr int kActRowWarps = 16;  // of a row under a norm
constexpr int kActRowParts = 4;   // CTAs of a cluster

struct ActRowsArgs {
  ActRows rows;
  float *x;  // rows.x, where partials are added to it
  PartialSums partials;
  ActView act;
  int num_parts;  // CTAs of a cluster, which are those of a row; 1: none
};

// ---- clusters (sm_90 and up; elsewhere a cluster is one CTA) ----

__device__ __forceinline__ void arrive_at_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// `to` of CTA `part` of the cluster = value.
__device__ __forceinline__ void store_in_cluster(float *to, int part, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(part));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#else
  *to = value;
#endif
}

// load_act_cols for rows of any length and alignment.
__device__ __forceinline__ void load_any_cols(const float *row, int first, int num_cols, int lane,
                                              float (&v)[kActLaneCols]) {
#pragma unroll
  for (int i = 0; i < kActLaneCols; ++i) {
    const int col = first + lane * kActLaneCols + i;
    v[i] = col < num_cols ? row[col] : 0.0f;
  }
}

// Grid: x tokens by parts, y as many CTAs as a row's chunks want, one under a norm. kPerWarp:
// chunks of a warp; kAdds: there are partials. Threads: kActRowWarps / num_parts warps.
template <int kPerWarp, bool kAdds>
__global__ void __launch_bounds__(kActRowWarps *kWarp)
    act_rows_kernel(const __grid_constant__ ActRowsArgs args) {
  __shared__ float squares[kActRowWarps * kPerWarp];
  let_next_kernel_start();
  const bool is_cluster = args.num_parts > 1;
  if (is_cluster) arrive_at_cluster();  // its shared memory is there
  const int lane = static_cast<int>(threadIdx.x) & 31, num_cols = args.rows.num_cols;
  const int token = static_cast<int>(blockIdx.x) / args.num_parts;
  const int part = static_cast<int>(blockIdx.x) % args.num_parts;
  const int cta_warps = static_cast<int>(blockDim.x) / kWarp;
  const int row_warps = cta_warps * args.num_parts;
  const int first = static_cast<int>(blockIdx.y) * row_warps * kPerWarp + part * cta_warps +
                    static_cast<int>(threadIdx.x) / kWarp;
  const bool has_norm = args.rows.norm_weight != nullptr;
  const bool is_aligned = num_cols % kActLaneCols == 0 && args.rows.stride % 4 == 0;
  const auto load = [&](const float *row, int chunk, float (&v)[kActLaneCols]) {
    if (is_aligned) {
      load_act_cols(row, chunk * kActCols, num_cols, lane, v);
    } else {
      load_any_cols(row, chunk * kActCols, num_cols, lane, v);
    }
  };
  float weight[kPerWarp][kActLaneCols], v[kPerWarp][kActLaneCols];
  if (has_norm) {
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      load(args.rows.norm_weight, first + i * row_warps, weight[i]);
  }
  if (is_cluster) wait_for_cluster();
  wait_for_previous_kernel();
  const float *row = args.rows.x + token * args.rows.stride;
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) load(row, first + i * row_warps, v[i]);
  float d[kPerWarp];
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
    const int chunk = first + i * row_warps;
    if (chunk >= args.act.num_chunks) break;
    if constexpr (kAdds) {
      const int col = chunk * kActCols + lane * kActLaneCols;
      float *x = args.x + token * args.rows.stride + col;
      if (is_aligned && col < num_cols) {
        args.partials.add8(token, col, v[i]);
#pragma unroll
        for (int k = 0; k < kActLaneCols; k += 4) {
          *reinterpret_cast<float4 *>(x + k) =
              make_float4(v[i][k], v[i][k + 1], v[i][k + 2], v[i][k + 3]);
        }
      } else {
#pragma unroll
        for (int k = 0; k < kActLaneCols; ++k) {
          if (col + k >= num_cols) continue;
          v[i][k] = __fadd_rn(v[i][k], args.partials.sum(token, col + k));
          x[k] = v[i][k];
        }
      }
    }
    if (has_norm) {
      const float sum = chunk_squares(v[i]);
      if (lane < args.num_parts) store_in_cluster(squares + chunk, lane, sum);
#pragma unroll
      for (int k = 0; k < kActLaneCols; ++k) v[i][k] = __fmul_rn(v[i][k], weight[i][k]);
    }
    const ActLane q = quantize_chunk(v[i]);
    uint8_t *to = args.act.chunk(token, chunk);
    store_act_codes<kActGroup>(q, token % kActGroup, lane, to);
    d[i] = q.d;
    if (!has_norm && lane == 0) store_act_scale<kActGroup>(q.d, token % kActGroup, to);
  }
  if (!has_norm) return;
  if (is_cluster) {
    arrive_at_cluster();
    wait_for_cluster();
  } else {
    __syncthreads();
  }
  const float inverse = row_inverse(squares, args.act.num_chunks, num_cols, args.rows.eps);
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
    const int chunk = first + i * row_warps;
    if (chunk >= args.act.num_chunks || lane != 0) break;
    store_act_scale<kActGroup>(__fmul_rn(d[i], inverse), token % kActGroup,
                               args.act.chunk(token, chunk));
  }
}

// out = or += the sums; one output per thread, grid: x rows / 256, y tokens.
__global__ void __launch_bounds__(256)
    add_partials_kernel(PartialSums partials, float *out, int64_t out_stride, bool is_added) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x);
  const int token = static_cast<int>(blockIdx.y);
  if (row >= partials.num_rows) return;
  const float y = partials.sum(token, row);
  float *to = out + token * out_stride + row;
  *to = is_added ? __fadd_rn(*to, y) : y;
}

constexpr int kCopyThreads = 256;

// gate = silu(gate) * up, in rows [num_tokens, 2 * num_cols] of gate, then up; grid: tokens.
__global__ void __launch_bounds__(kCopyThreads) swiglu_rows_kernel(float *gate_up, int num_cols) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  float *row = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * num_cols;
  for (int i = static_cast<int>(threadIdx.x); i < num_cols; i += kCopyThreads)
    row[i] = __fmul_rn(silu(row[i]), row[num_cols + i]);
}

// out[i] = x[rows[i]], rows of num_cols; grid: rows.
__global__ void __launch_bounds__(kCopyThreads)
    gather_rows_kernel(const float *x, const int32_t *rows, int num_cols, float *out) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const float *from = x + static_cast<int64_t>(rows[blockIdx.x]) * num_cols;
  for (int i = static_cast<int>(threadIdx.x); i < num_cols; i += kCopyThreads)
    out[static_cast<int64_t>(blockIdx.x) * num_cols + i] = from[i];
}

// For tests: act as f32 [num_tokens, num_cols]; grid: tokens.
__global__ void __launch_bounds__(kCopyThreads)
    expand_acts_kernel(ActView act, int num_cols, float *out) {
  wait_for_previous_kernel();
  const int token = static_cast<int>(blockIdx.x), in_group = token % kActGroup;
  for (int col = static_cast<int>(threadIdx.x); col < num_cols; col += kCopyThreads) {
    const uint8_t *chunk = act.chunk(token, col / kActCols);
    const auto plane = [&](int which) {
      return static_cast<int>(
          static_cast<int8_t>(chunk[act_code_offset(kActGroup, in_group, col % kActCols, which)]));
    };
    const float scale =
        reinterpret_cast<const float *>(chunk + act_codes_bytes(kActGroup))[in_group];
    out[static_cast<int64_t>(token) * num_cols + col] =
        __fmul_rn(static_cast<float>(8 * plane(0) + plane(1)), scale);
  }
}

}  // namespace cuda
}  // namespace xllm
