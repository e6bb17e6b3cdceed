#include <algorithm>

#include "backend/cuda/act_rows.cuh"
#include "backend/cuda/act_rows.h"

namespace xllm {
namespace cuda {
namespace {

constexpr int kMaxGridY = 32768;

void run_rows(const Launch &launch, const ActRowsArgs &args, int num_tokens) {
  const int chunks = args.act.num_chunks;
  const bool has_norm = args.rows.norm_weight != nullptr;
  const int per_warp = has_norm ? (chunks + kActRowWarps - 1) / kActRowWarps : 1;
  const auto kernel = per_warp <= 1   ? act_rows_kernel<1>
                      : per_warp <= 2 ? act_rows_kernel<2>
                                      : act_rows_kernel<4>;
  const int groups = has_norm ? 1 : (chunks + kActRowWarps - 1) / kActRowWarps;
  launch_kernel(launch, "act_rows", kernel,
                dim3(static_cast<unsigned>(num_tokens), static_cast<unsigned>(groups)),
                kActRowThreads, 0, args);
}

}  // namespace

void prepare_rows() {
  for (const void *kernel : {reinterpret_cast<const void *>(act_rows_kernel<1>),
                             reinterpret_cast<const void *>(act_rows_kernel<2>),
                             reinterpret_cast<const void *>(act_rows_kernel<4>),
                             reinterpret_cast<const void *>(add_partials_kernel)}) {
    prefer_shared_memory(kernel);
  }
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
