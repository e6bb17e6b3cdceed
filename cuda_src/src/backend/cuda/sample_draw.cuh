// From the best token of a row to a drawn one: top_k, top_p, min_p and the draw, without sorting
// the vocabulary.
//
// top_k and top_p keep a prefix of the ids in order of rank: the larger logit first, the lower id
// on a tie. So each is one rank, the last that it keeps, and finding it needs the order only near
// there: a histogram over the distance from the largest logit names the bin that holds it, and the
// ids of that bin alone are sorted. Weights are integers (sampling/weight.h), so sums are exact and
// no order of additions matters; the last rank, and with it the token, is that of the host's
// sampler.
#pragma once

#include "backend/cuda/sample.cuh"

namespace xllm {
namespace cuda {

constexpr int kBins = 2048;
// Per e-fold of weight: the last bin begins at e^-32, where weights are 0.
constexpr float kBinsPerFold = 64.0f;
constexpr int kSelectThreads = 1024;
constexpr int kAtOnce = 8;        // logits of a thread on their way
constexpr int kMaxSorted = 2048;  // ids of a bin that are sorted at once

__device__ __forceinline__ bool is_drawn(const SampleArgs &args, int row) {
  return args.best[row].id >= 0 && args.params[row].temperature != 0.0f;
}
__device__ __forceinline__ bool has_top_k(const SampleParams &params) {
  return params.top_k > 0 && params.top_k < params.num_choosable;
}
__device__ __forceinline__ bool is_selected(const SampleArgs &args, int row) {
  const SampleParams &params = args.params[row];
  return is_drawn(args, row) && (has_top_k(params) || params.top_p < 1.0f);
}

// Never falls as x does.
__device__ __forceinline__ int bin_of(float x, float largest, float scale) {
  const float distance = __fmul_rn(__fsub_rn(largest, x), scale);
  return distance < static_cast<float>(kBins - 1) ? static_cast<int>(distance) : kBins - 1;
}
__device__ __forceinline__ float bin_scale(const SampleParams &params) {
  return fminf(__fdiv_rn(kBinsPerFold, params.temperature), 3.402823466e38f);
}

__device__ __forceinline__ uint64_t shuffle_up(uint64_t v, int offset) {
  return __shfl_up_sync(0xffffffffu, static_cast<unsigned long long>(v), offset);
}

// The sum of the threads before this one; *total: of all. shared: 33 values.
template <int kThreads>
__device__ __forceinline__ uint64_t exclusive_sum(uint64_t v, uint64_t *shared, uint64_t *total) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  uint64_t inclusive = v;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint64_t other = shuffle_up(inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  __syncthreads();
  if (lane == kWarp - 1) shared[warp] = inclusive;
  __syncthreads();
  if (warp == 0) {
    const uint64_t own = lane < kThreads / kWarp ? shared[lane] : 0;
    uint64_t sum = own;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const uint64_t other = shuffle_up(sum, offset);
      if (lane >= offset) sum += other;
    }
    shared[lane] = sum - own;
    if (lane == kWarp - 1) shared[kWarp] = sum;
  }
  __syncthreads();
  *total = shared[kWarp];
  return shared[warp] + inclusive - v;
}

__device__ __forceinline__ void atomic_add(uint64_t *to, uint64_t v) {
  atomicAdd(reinterpret_cast<unsigned long long *>(to), static_cast<unsigned long long>(v));
}

// ---- where top_k and top_p end ----

// How many ids lie in each bin and how much they weigh. Grid: x parts, y rows.
__global__ void __launch_bounds__(kSampleThreads)
    bin_logits_kernel(const __grid_constant__ SampleArgs args) {
  __shared__ uint64_t sums[kBins];
  __shared__ uint32_t counts[kBins];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.y);
  if (!is_selected(args, row)) return;
  const SampleParams &params = args.params[row];
  const float *logits = row_logits(args, row);
  const float largest = args.best[row].logit, scale = bin_scale(params);
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kSampleThreads) {
    sums[i] = 0;
    counts[i] = 0;
  }
  __syncthreads();
  for (int id = static_cast<int>(blockIdx.x) * kSampleThreads + static_cast<int>(threadIdx.x);
       id < params.num_choosable; id += kSampleParts * kSampleThreads) {
    const float x = logits[id];
    if (x == negative_infinity()) continue;
    const int bin = bin_of(x, largest, scale);
    const uint64_t weight = weight_of(x, largest, params.temperature);
    atomicAdd(&counts[bin], 1u);
    if (weight != 0) atomic_add(&sums[bin], weight);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kSampleThreads) {
    if (counts[i] == 0) continue;
    atomicAdd(&args.bin_counts[row * kBins + i], counts[i]);
    if (sums[i] != 0) atomic_add(&args.bin_sums[row * kBins + i], sums[i]);
  }
}

struct SelectMemory {
  uint64_t sums[kBins];       // of the bins up to this one
  uint64_t keys[kMaxSorted];  // ranks
  uint32_t counts[kBins];
  uint64_t digit_sums[256];
  uint32_t digit_counts[256];
  uint64_t scan[kWarp + 1];
  uint64_t prefix, before_sum, last_rank, sum;
  uint32_t before_count;
  int num_keys, bin;
};

// The ids of bin memory.bin whose rank begins with the `num_bits` bits of memory.prefix:
// visit(rank, logit).
template <typename Visit>
__device__ __forceinline__ void for_each_in_bin(const SampleArgs &args, int row,
                                                const SelectMemory &memory, int num_bits,
                                                const Visit &visit) {
  const SampleParams &params = args.params[row];
  const float *logits = row_logits(args, row);
  const float largest = args.best[row].logit, scale = bin_scale(params);
  const int n = params.num_choosable;
  for (int first = static_cast<int>(threadIdx.x); first < n; first += kAtOnce * kSelectThreads) {
    float x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int id = first + i * kSelectThreads;
      x[i] = id < n ? logits[id] : negative_infinity();
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (x[i] == negative_infinity() || bin_of(x[i], largest, scale) != memory.bin) continue;
      const uint64_t rank = rank_key(x[i], first + i * kSelectThreads);
      if (num_bits > 0 && rank >> (64 - num_bits) != memory.prefix) continue;
      visit(rank, x[i]);
    }
  }
}

// The first rank of bin memory.bin, in ascending order, at which count ids or a weight of `need` is
// reached, those of the bins before counted in (the other of the two is 0): last_rank, and in `sum`
// the weight up to it.
__device__ __forceinline__ void find_last_rank(const SampleArgs &args, int row,
                                               SelectMemory &memory, uint32_t count,
                                               uint64_t need) {
  const int thread = static_cast<int>(threadIdx.x);
  const float largest = args.best[row].logit, temperature = args.params[row].temperature;
  const auto weight = [&](uint64_t rank) {
    return weight_of(logit_of_rank(rank), largest, temperature);
  };
  if (thread == 0) {
    memory.prefix = 0;
    memory.before_sum = memory.bin > 0 ? memory.sums[memory.bin - 1] : 0;
    memory.before_count = memory.bin > 0 ? memory.counts[memory.bin - 1] : 0;
  }
  int num_bits = 0;
  while (true) {
    __syncthreads();
    if (thread == 0) memory.num_keys = 0;
    for (int i = thread; i < kMaxSorted; i += kSelectThreads) memory.keys[i] = ~uint64_t{0};
    __syncthreads();
    for_each_in_bin(args, row, memory, num_bits, [&](uint64_t rank, float) {
      const int at = atomicAdd(&memory.num_keys, 1);
      if (at < kMaxSorted) memory.keys[at] = rank;
    });
    __syncthreads();
    if (memory.num_keys <= kMaxSorted) break;
    // Too many for that, as in a flat row: the next eight bits of the rank divide them.
    for (int i = thread; i < 256; i += kSelectThreads) {
      memory.digit_sums[i] = 0;
      memory.digit_counts[i] = 0;
    }
    __syncthreads();
    for_each_in_bin(args, row, memory, num_bits, [&](uint64_t rank, float) {
      const int digit = static_cast<int>(rank >> (56 - num_bits) & 255);
      atomicAdd(&memory.digit_counts[digit], 1u);
      atomic_add(&memory.digit_sums[digit], weight(rank));
    });
    __syncthreads();
    if (thread == 0) {
      int digit = 0;
      while (digit < 255) {
        const uint32_t num = memory.before_count + memory.digit_counts[digit];
        const uint64_t sum = memory.before_sum + memory.digit_sums[digit];
        if (memory.digit_counts[digit] != 0 && (count > 0 ? num >= count : sum >= need)) break;
        memory.before_count = num;
        memory.before_sum = sum;
        ++digit;
      }
      memory.prefix = memory.prefix << 8 | static_cast<uint64_t>(digit);
    }
    num_bits += 8;
  }
  // Bitonic sort of the keys and what fills them up to a power of two.
  int num_sorted = 2;
  while (num_sorted < memory.num_keys) num_sorted *= 2;
  for (int size = 2; size <= num_sorted; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int i = thread; i < num_sorted; i += kSelectThreads) {
        const int other = i ^ stride;
        if (other > i) {
          const uint64_t a = memory.keys[i], b = memory.keys[other];
          if ((a > b) == ((i & size) == 0)) {
            memory.keys[i] = b;
            memory.keys[other] = a;
          }
        }
      }
      __syncthreads();
    }
  }
  constexpr int kEach = kMaxSorted / kSelectThreads;
  uint64_t weights[kEach], own = 0, total = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread * kEach + i;
    weights[i] = at < memory.num_keys ? weight(memory.keys[at]) : 0;
    own += weights[i];
  }
  uint64_t sum = memory.before_sum + exclusive_sum<kSelectThreads>(own, memory.scan, &total);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread * kEach + i;
    const uint64_t before = sum;
    sum += weights[i];
    if (at >= memory.num_keys) continue;
    const bool is_last = count > 0 ? memory.before_count + static_cast<uint32_t>(at) + 1 == count
                                   : sum >= need && (at == 0 || before < need);
    if (is_last) {
      memory.last_rank = memory.keys[at];
      memory.sum = sum;
    }
  }
  __syncthreads();
}

// The last rank that top_k and top_p keep. Grid: rows.
__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const __grid_constant__ SampleArgs args) {
  extern __shared__ uint64_t select_shared[];
  SelectMemory &memory = *reinterpret_cast<SelectMemory *>(select_shared);
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (!is_selected(args, row)) {
    if (thread == 0) args.last_ranks[row] = ~uint64_t{0};
    return;
  }
  const SampleParams &params = args.params[row];
  constexpr int kEach = kBins / kSelectThreads;
  uint64_t sums[kEach], counts[kEach], sum = 0, count = 0, total = 0, num_all = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = row * kBins + thread * kEach + i;
    sum += sums[i] = args.bin_sums[at];
    count += counts[i] = args.bin_counts[at];
    args.bin_sums[at] = 0;
    args.bin_counts[at] = 0;
  }
  sum = exclusive_sum<kSelectThreads>(sum, memory.scan, &total);
  count = exclusive_sum<kSelectThreads>(count, memory.scan, &num_all);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    memory.sums[thread * kEach + i] = sum += sums[i];
    memory.counts[thread * kEach + i] = static_cast<uint32_t>(count += counts[i]);
  }
  if (thread == 0) memory.last_rank = ~uint64_t{0};
  __syncthreads();

  uint64_t kept = total;
  if (has_top_k(params) && static_cast<uint64_t>(params.top_k) < num_all) {
    const auto wanted = static_cast<uint32_t>(params.top_k);
    for (int bin = thread; bin < kBins; bin += kSelectThreads) {
      if (memory.counts[bin] >= wanted && (bin == 0 || memory.counts[bin - 1] < wanted))
        memory.bin = bin;
    }
    __syncthreads();
    find_last_rank(args, row, memory, wanted, 0);
    kept = memory.sum;
    __syncthreads();
  }
  if (params.top_p < 1.0f) {
    const uint64_t need =
        __double2ull_rz(__dmul_rn(static_cast<double>(params.top_p), __ull2double_rn(kept)));
    for (int bin = thread; bin < kBins; bin += kSelectThreads) {
      if (memory.sums[bin] >= need && (bin == 0 || memory.sums[bin - 1] < need)) memory.bin = bin;
    }
    __syncthreads();
    find_last_rank(args, row, memory, 0, need);
  }
  if (thread == 0) args.last_ranks[row] = memory.last_rank;
}

// ---- the draw ----

// The weight with which an id takes part; 0: it does not.
__device__ __forceinline__ uint64_t drawn_weight(const SampleParams &params, float x, int id,
                                                 float largest, uint64_t last_rank,
                                                 uint64_t min_weight) {
  if (x == negative_infinity() || rank_key(x, id) > last_rank) return 0;
  if (params.min_p == 1.0f && x != largest) return 0;
  const uint64_t weight = weight_of(x, largest, params.temperature);
  return weight < min_weight ? 0 : weight;
}

__device__ __forceinline__ int part_length(int num_choosable) {
  return (num_choosable + kSampleParts - 1) / kSampleParts;
}

// What the ids of each part, consecutive ones, weigh. Grid: x parts, y rows.
__global__ void __launch_bounds__(kSampleThreads)
    weigh_parts_kernel(const __grid_constant__ SampleArgs args) {
  __shared__ uint64_t shared[kWarp + 1];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.y), part = static_cast<int>(blockIdx.x);
  if (!is_drawn(args, row)) return;
  const SampleParams &params = args.params[row];
  const float *logits = row_logits(args, row);
  const float largest = args.best[row].logit;
  const uint64_t last_rank = args.last_ranks[row];
  const uint64_t min_weight = fixed_weight(static_cast<double>(params.min_p));
  const int length = part_length(params.num_choosable), first = part * length;
  const int end = min(first + length, params.num_choosable);
  uint64_t sum = 0, total = 0;
  for (int id = first + static_cast<int>(threadIdx.x); id < end; id += kSampleThreads)
    sum += drawn_weight(params, logits[id], id, largest, last_rank, min_weight);
  (void)exclusive_sum<kSampleThreads>(sum, shared, &total);
  if (threadIdx.x == 0) args.part_sums[row * kSampleParts + part] = total;
}

// The first id whose running sum of weights, ascending, exceeds random * the whole sum. Grid: rows.
__global__ void __launch_bounds__(kSelectThreads)
    draw_kernel(const __grid_constant__ SampleArgs args) {
  __shared__ uint64_t shared[kWarp + 1];
  __shared__ uint64_t sums[kSampleParts];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (!is_drawn(args, row)) return;
  const SampleParams &params = args.params[row];
  if (thread < kSampleParts) sums[thread] = args.part_sums[row * kSampleParts + thread];
  __syncthreads();
  uint64_t total = 0;
  for (int i = 0; i < kSampleParts; ++i) total += sums[i];
  const uint64_t target = __umul64hi(params.random, total);
  int part = 0;
  uint64_t sum = 0;
  while (part < kSampleParts - 1 && sum + sums[part] <= target) sum += sums[part++];

  const float *logits = row_logits(args, row);
  const float largest = args.best[row].logit;
  const uint64_t last_rank = args.last_ranks[row];
  const uint64_t min_weight = fixed_weight(static_cast<double>(params.min_p));
  const int length = part_length(params.num_choosable);
  const int each = (length + kSelectThreads - 1) / kSelectThreads;
  const int first = part * length + thread * each;
  const int end = min(min(first + each, (part + 1) * length), params.num_choosable);
  uint64_t own = 0, all = 0;
  for (int id = first; id < end; ++id)
    own += drawn_weight(params, logits[id], id, largest, last_rank, min_weight);
  sum += exclusive_sum<kSelectThreads>(own, shared, &all);
  if (target < sum || target >= sum + own) return;
  for (int id = first; id < end; ++id) {
    sum += drawn_weight(params, logits[id], id, largest, last_rank, min_weight);
    if (sum > target) return choose(args, row, id);
  }
}

}  // namespace cuda
}  // namespace xllm
