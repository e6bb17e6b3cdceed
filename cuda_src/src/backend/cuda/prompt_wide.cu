#include <cstdint>

#include "backend/cuda/prompt_attention.h"
#include "backend/cuda/prompt_wide.cuh"

namespace xllm::cuda {
namespace {

using WideKernel = void (*)(AttentionArgs);

WideKernel kernel_of(int head_dim) {
  return head_dim == 64    ? wide_attention_kernel<64>
         : head_dim == 128 ? wide_attention_kernel<128>
                           : nullptr;
}

// Static shared memory, and what aligns the rest.
constexpr int kKept = 2048;

// note: built for another architecture than sm_90a, the kernel has no body.
bool has_wide(const Device &device) {
  return device.has_wgmma && device.max_shared_bytes >= wide_shared_bytes() + kKept;
}

// How many splits a CTA goes through, so that the last one is done soonest. Speed only.
int splits_per_cta(const Device &device, int num_splits, int64_t num_tiles) {
  int best = num_splits;
  double least = 1e300;
  for (int each = 1; each <= num_splits; ++each) {
    const int64_t ctas = (num_splits + each - 1) / each * num_tiles;
    const int64_t rounds = (ctas + device.num_sms - 1) / device.num_sms;
    const double time = static_cast<double>(rounds) * (each + 0.5);
    if (time < least) {
      least = time;
      best = each;
    }
  }
  return best;
}

}  // namespace

void prepare_wide_attention(const Device &device) {
  if (!has_wide(device)) return;
  for (const int head_dim : {64, 128}) {
    const void *function = reinterpret_cast<const void *>(kernel_of(head_dim));
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               wide_shared_bytes()),
          "set shared memory size");
    prefer_shared_memory(function);
  }
  prefer_shared_memory(reinterpret_cast<const void *>(merge_rows_kernel));
}

bool has_wide_attention(const Device &device, int head_dim, int group_size, int bits) {
  return bits == 16 && kernel_of(head_dim) != nullptr && has_wide(device) &&
         prompt_tile_rows(group_size) >= 2 && !device.has_narrow_tiles;
}

void wide_attention(const Launch &launch, AttentionArgs args, int num_splits, int num_tiles,
                    int num_rows) {
  const auto kv_heads = static_cast<unsigned>(args.kv.num_kv_heads);
  args.splits_per_cta =
      splits_per_cta(*launch.device, num_splits, int64_t{num_tiles} * args.kv.num_kv_heads);
  const int ctas = (num_splits + args.splits_per_cta - 1) / args.splits_per_cta;
  launch_kernel(launch, "prompt_attention", kernel_of(args.head_dim),
                dim3(static_cast<unsigned>(num_tiles), kv_heads, static_cast<unsigned>(ctas)),
                kWideThreads, static_cast<size_t>(wide_shared_bytes()), args);
  if (num_splits == 1) return;
  launch_kernel(launch, "merge_rows", merge_rows_kernel,
                dim3(static_cast<unsigned>(num_rows), kv_heads), kMergeThreads,
                static_cast<size_t>(args.group_size * kMaxSplits) * sizeof(float), args);
}

}  // namespace xllm::cuda
