#include <algorithm>

#include "backend/cuda/act_rows.cuh"
#include "backend/cuda/act_rows.h"

namespace xllm {
namespace cuda {
namespace {

constexpr int kMaxGridY = 32768;
constexpr int kMaxSpreadTokens = 16;
// From so many tokens on, CTAs are kept from gathering on the few SMs that a product leaves idle,
// where they would share what one SM can take in.
constexpr int kMinApartTokens = 33;
constexpr int kKept = 4096;  // of shared memory: what they use themselves, and the system

using RowsKernel = void (*)(ActRowsArgs);
constexpr int kRowsPerWarp[] = {1, 2, 4};

RowsKernel rows_kernel(int per_warp, bool adds) {
  if (per_warp <= 1) return adds ? act_rows_kernel<1, true> : act_rows_kernel<1, false>;
  if (per_warp <= 2) return adds ? act_rows_kernel<2, true> : act_rows_kernel<2, false>;
  return adds ? act_rows_kernel<4, true> : act_rows_kernel<4, false>;
}

void run_rows(const Launch &launch, ActRowsArgs args, int num_tokens) {
  const int chunks = args.act.num_chunks;
  const bool has_norm = args.rows.norm_weight != nullptr;
  // Many rows fill the SMs by themselves, and a CTA is cheaper than a cluster.
  const bool is_spread = num_tokens <= kMaxSpreadTokens && launch.device->has_clusters;
  args.num_parts = is_spread && has_norm ? kActRowParts : 1;
  const int cta_warps = is_spread ? kActRowWarps / kActRowParts : kActRowWarps;
  const int per_warp = has_norm ? (chunks + kActRowWarps - 1) / kActRowWarps : 1;
  const int groups = has_norm ? 1 : (chunks + cta_warps - 1) / cta_warps;
  size_t claimed = 0;
  if (num_tokens >= kMinApartTokens) {
    const Device &device = *launch.device;
    const int per_sm = 2 * ((num_tokens * groups + device.num_sms - 1) / device.num_sms);
    claimed = static_cast<size_t>(std::max(
        0, std::min(device.max_shared_bytes, device.shared_bytes_per_sm / per_sm) - kKept));
  }
  launch_clusters(
      launch, "act_rows", rows_kernel(per_warp, args.partials.data != nullptr),
      dim3(static_cast<unsigned>(num_tokens * args.num_parts), static_cast<unsigned>(groups)),
      static_cast<unsigned>(args.num_parts), static_cast<unsigned>(cta_warps * kWarp), claimed,
      args);
}

void prepare_rows_kernel(const void *kernel, int shared_bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "opt in to shared memory");
  prefer_shared_memory(kernel);
}

}  // namespace

void prepare_rows(const Device &device) {
  for (const int per_warp : kRowsPerWarp) {
    for (const bool adds : {false, true})
      prepare_rows_kernel(reinterpret_cast<const void *>(rows_kernel(per_warp, adds)),
                          device.max_shared_bytes - kKept);
  }
  prefer_shared_memory(reinterpret_cast<const void *>(add_partials_kernel));
}

void add_partials(const Launch &launch, const Partials &partials, int num_tokens, const float *bias,
                  bool is_added, float *out, int64_t out_stride) {
  for (int first = 0; first < num_tokens; first += kMaxGridY) {
    const int count = std::min(kMaxGridY, num_tokens - first);
    PartialSums sums = {partials.data, partials.num_slices, num_tokens, partials.num_rows, bias};
    sums.data += static_cast<int64_t>(first) * partials.num_rows;
    launch_kernel(
        launch, "add_partials", add_partials_kernel,
        dim3(static_cast<unsigned>((partials.num_rows + 255) / 256), static_cast<unsigned>(count)),
        256, 0, sums, out + first * out_stride, out_stride, is_added);
  }
}

void quantize_rows(const Launch &launch, const ActRows &rows, int num_tokens, const ActView &act) {
  ActRowsArgs args = {};
  args.rows = rows;
  args.act = act;
  run_rows(launch, args, num_tokens);
}

void add_and_quantize_rows(const Launch &launch, const Partials &partials, const float *bias,
                           float *x, const ActRows &rows, int num_tokens, const ActView &act) {
  ActRowsArgs args = {};
  args.rows = rows;
  args.x = x;
  args.partials = {partials.data, partials.num_slices, num_tokens, partials.num_rows, bias};
  args.act = act;
  run_rows(launch, args, num_tokens);
}

void swiglu_rows(const Launch &launch, float *gate_up, int num_tokens, int num_cols) {
  launch_kernel(launch, "swiglu_rows", swiglu_rows_kernel, dim3(static_cast<unsigned>(num_tokens)),
                kCopyThreads, 0, gate_up, num_cols);
}

void gather_rows(const Launch &launch, const float *x, const int32_t *rows, int num_rows,
                 int num_cols, float *out) {
  launch_kernel(launch, "gather_rows", gather_rows_kernel, dim3(static_cast<unsigned>(num_rows)),
                kCopyThreads, 0, x, rows, num_cols, out);
}

void expand_acts(const Launch &launch, const ActView &act, int num_tokens, int num_cols,
                 float *out) {
  launch_kernel(launch, "expand_acts", expand_acts_kernel, dim3(static_cast<unsigned>(num_tokens)),
                kCopyThreads, 0, act, num_cols, out);
}

cudaError_t kernel_attributes(cudaFuncAttributes *attributes) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void *>(add_partials_kernel));
}

}  // namespace cuda
}  // namespace xllm
