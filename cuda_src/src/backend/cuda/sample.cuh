// From logits to the best token of a row: bias, mask and penalties where a row has them, and the
// largest logit, the lowest id on a tie. A greedy row is done then; others go on in
// sample_draw.cuh. What each value means: SampleRow in backend.h.
#pragma once

#include "backend/cuda/sample_math.cuh"

namespace xllm {
namespace cuda {

constexpr int kSampleParts = 64;  // CTAs that share a row
constexpr int kSampleThreads = 256;
constexpr int kNotFinite = -1, kAllForbidden = -2;  // in place of a chosen id
constexpr int kNoId = 0x7fffffff;

struct Candidate {
  float logit;
  int32_t id;  // kNotFinite: a logit was NaN or infinite; kNoId: none is allowed
};

// As TokenCount and TokenBias in backend.h.
struct DeviceCount {
  int32_t id, num_prompt, num_generated;
};
struct DeviceBias {
  int32_t id;
  float bias;
};

// One row's wishes.
struct SampleParams {
  uint64_t random;  // 64 random bits of (seed, position)
  float temperature, top_p, min_p;
  float repetition_penalty, frequency_penalty, presence_penalty;
  int32_t top_k;  // 0: off
  int32_t num_choosable;
  int32_t adjusted;  // its row of `adjusted`; < 0: the logits as they are
  int32_t mask;      // its row of `masks`; < 0: none
  int32_t first_bias, num_biases, first_count, num_counts;
};

struct SampleArgs {
  const float *logits;  // [rows, vocab]
  int vocab;
  const SampleParams *params;  // [rows]
  const DeviceBias *biases;
  const DeviceCount *counts;
  const uint32_t *masks;  // [., ceil(vocab / 32)]
  float *adjusted;        // [., vocab]
  Candidate *parts;       // [rows, kSampleParts]
  Candidate *best;        // [rows]
  // sample_draw.cuh; zero before and after
  uint32_t *bin_counts;  // [rows, kBins]
  uint64_t *bin_sums;    // [rows, kBins]
  uint64_t *last_ranks;  // [rows]
  uint64_t *part_sums;   // [rows, kSampleParts]
  const int32_t *logit_rows, *sampler_rows;
  int32_t *chosen;   // [rows]
  int32_t *sampled;  // by sampler row: where the next embed looks for the id
};

__device__ __forceinline__ const float *row_logits(const SampleArgs &args, int row) {
  const int adjusted = args.params[row].adjusted;
  return adjusted < 0 ? args.logits + static_cast<int64_t>(row) * args.vocab
                      : args.adjusted + static_cast<int64_t>(adjusted) * args.vocab;
}

__device__ __forceinline__ void choose(const SampleArgs &args, int row, int id) {
  args.chosen[row] = id;
  args.sampled[args.sampler_rows[args.logit_rows[row]]] = id;
}

// ---- bias, mask, penalties ----

// A copy of the row, what the mask forbids at -infinity. Grid: x parts, y rows.
__global__ void __launch_bounds__(kSampleThreads)
    copy_logits_kernel(const __grid_constant__ SampleArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.y);
  const SampleParams &params = args.params[row];
  if (params.adjusted < 0) return;
  const float *from = args.logits + static_cast<int64_t>(row) * args.vocab;
  float *to = args.adjusted + static_cast<int64_t>(params.adjusted) * args.vocab;
  const uint32_t *mask =
      params.mask < 0 ? nullptr
                      : args.masks + static_cast<int64_t>(params.mask) * ((args.vocab + 31) / 32);
  for (int id = static_cast<int>(blockIdx.x) * kSampleThreads + static_cast<int>(threadIdx.x);
       id < params.num_choosable; id += kSampleParts * kSampleThreads) {
    const bool is_allowed = mask == nullptr || (mask[id / 32] >> (id % 32) & 1) != 0;
    to[id] = is_allowed ? from[id] : negative_infinity();
  }
}

// Biases, then penalties, of the few ids that have them. Grid: rows.
__global__ void __launch_bounds__(kSampleThreads)
    adjust_logits_kernel(const __grid_constant__ SampleArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const SampleParams &params = args.params[blockIdx.x];
  if (params.adjusted < 0) return;
  float *logits = args.adjusted + static_cast<int64_t>(params.adjusted) * args.vocab;
  for (int i = static_cast<int>(threadIdx.x); i < params.num_biases; i += kSampleThreads) {
    const DeviceBias bias = args.biases[params.first_bias + i];
    if (bias.id >= params.num_choosable || logits[bias.id] == negative_infinity()) continue;
    logits[bias.id] = bias.bias == negative_infinity()
                          ? bias.bias
                          : clamp_logit(__fadd_rn(logits[bias.id], bias.bias));
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < params.num_counts; i += kSampleThreads) {
    const DeviceCount count = args.counts[params.first_count + i];
    if (count.id >= params.num_choosable) continue;
    float x = logits[count.id];
    if (x == negative_infinity()) continue;
    const float penalty = params.repetition_penalty;
    x = x > 0 ? __fdiv_rn(x, penalty) : __fmul_rn(x, penalty);
    if (count.num_generated > 0) {
      x = __fsub_rn(x,
                    __fmul_rn(params.frequency_penalty, static_cast<float>(count.num_generated)));
      x = __fsub_rn(x, params.presence_penalty);
    }
    logits[count.id] = clamp_logit(x);
  }
}

// ---- the largest ----

__device__ __forceinline__ Candidate better(const Candidate &a, const Candidate &b) {
  if (a.id < 0 || b.id < 0) return {0.0f, kNotFinite};
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

// What the model gave must be finite; what competes is what bias, mask and penalties left. Grid: x
// parts, y rows.
__global__ void __launch_bounds__(kSampleThreads)
    best_parts_kernel(const __grid_constant__ SampleArgs args) {
  __shared__ Candidate shared[kSampleThreads / kWarp];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.y);
  const float *raw = args.logits + static_cast<int64_t>(row) * args.vocab;
  const float *logits = row_logits(args, row);
  const int n = args.params[row].num_choosable;
  Candidate best = {negative_largest(), kNoId};
  for (int id = static_cast<int>(blockIdx.x) * kSampleThreads + static_cast<int>(threadIdx.x);
       id < n; id += kSampleParts * kSampleThreads) {
    const bool is_finite = fabsf(raw[id]) <= 3.402823466e38f;
    best = better(best, {logits[id], is_finite ? id : kNotFinite});
  }
  best = warp_best(best);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kSampleThreads / kWarp; ++i) best = better(best, shared[i]);
    args.parts[row * kSampleParts + static_cast<int>(blockIdx.x)] = best;
  }
}

// One warp per row; grid: rows. Greedy rows, and those without a token, end here.
__global__ void __launch_bounds__(kWarp) best_rows_kernel(const __grid_constant__ SampleArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x);
  const Candidate *parts = args.parts + row * kSampleParts;
  Candidate best = better(parts[threadIdx.x], parts[threadIdx.x + kWarp]);
  best = warp_best(best);
  if (best.id == kNoId) best.id = kAllForbidden;
  if (threadIdx.x != 0) return;
  args.best[row] = best;
  if (best.id < 0 || args.params[row].temperature == 0.0f) choose(args, row, best.id);
}

}  // namespace cuda
}  // namespace xllm
