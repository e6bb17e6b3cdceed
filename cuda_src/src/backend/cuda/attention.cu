// softmax(q k^T * scale) v of every row over its own keys, f32. A row of a prompt is worked on as a
// decode row is.
#include <algorithm>

#include "backend/cuda/attention.cuh"
#include "backend/cuda/attention_any.cuh"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/kv_pages.h"

namespace xllm::cuda {
namespace {

using AttentionKernel = void (*)(AttentionArgs);

template <int kHeadDim, int kGroups>
AttentionKernel tiled_kernel_of(bool finishes) {
  return finishes ? attention_kernel<kHeadDim, kGroups, true>
                  : attention_kernel<kHeadDim, kGroups, false>;
}

AttentionKernel tiled_kernel(int head_dim, int groups, bool finishes) {
  if (head_dim == 64)
    return groups == 1 ? tiled_kernel_of<64, 1>(finishes) : tiled_kernel_of<64, 2>(finishes);
  return groups == 1 ? tiled_kernel_of<128, 1>(finishes) : tiled_kernel_of<128, 2>(finishes);
}

bool is_tiled_attention(const ModelDims &dims, const KvView &kv) {
  return (dims.head_dim == 64 || dims.head_dim == 128) && kv.layout.block_size % kKeyTile == 0;
}

}  // namespace

void prepare_attention() {
  for (const int head_dim : {64, 128}) {
    for (const int groups : {1, 2}) {
      for (const bool finishes : {false, true}) {
        const auto function =
            reinterpret_cast<const void *>(tiled_kernel(head_dim, groups, finishes));
        check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   attention_shared_bytes(head_dim, groups, kMaxKeyStages)),
              "set shared memory size");
        prefer_shared_memory(function);
      }
    }
  }
}

bool CudaBackend::finishes_rows(const CudaWorkspace &ws, const KvView &kv) const {
  return ws.is_decode && uses_graphs_ && is_tiled_attention(ws.weights->dims, kv);
}

void CudaBackend::attention(Workspace &ws_base, const WeightSet &weights_base, int layer,
                            const KvView &kv, const ForwardBatch & /*batch*/) {
  CudaWorkspace &ws = as_cuda(ws_base);
  const CudaWeights &weights = as_cuda(weights_base);
  if (records(ws, 3, layer, kv.base)) return;
  if (is_f32(weights)) return f32_attention(ws, weights, layer, kv);
  const ModelDims &dims = weights.dims;
  AttentionArgs args = {};
  args.q = ws.q.data<__half>();
  args.kv = kv_pages(kv, layer);
  args.positions = ws.batch.positions;
  args.row_tables = ws.batch.row_tables;
  args.tables = ws.batch.tables;
  args.num_heads = dims.num_heads;
  args.group_size = dims.num_heads / dims.num_kv_heads;
  args.head_dim = dims.head_dim;
  args.scale = dims.attention_scale;
  args.window = dims.sliding_window;
  args.partial_out = ws.split_out.data<float>();
  args.partial_stats = ws.split_stats.data<float2>();
  args.counters = ws.split_counters.data<int>();
  args.out = ws.attention_out.data<float>();

  const bool is_tiled = is_tiled_attention(dims, kv);
  const int head_groups = (args.group_size + 15) / 16;
  const int grid_y = is_tiled ? dims.num_kv_heads * head_groups : dims.num_heads;
  const int groups = args.group_size > 8 ? 2 : 1;
  const bool finishes = finishes_rows(ws, kv);
  if (finishes) args.rows = qkv_args(ws, weights, layer, kv);
  const AttentionKernel kernel =
      is_tiled ? tiled_kernel(dims.head_dim, groups, finishes) : attention_any_kernel;
  const int threads = is_tiled ? attention_warps(groups) * kWarp : kAnyThreads;
  const int block_size = kv.layout.block_size;
  args.block_shift = -1;
  for (int shift = 0; shift < 20; ++shift) {
    if (block_size == 1 << shift) args.block_shift = shift;
  }
  args.num_stages = device_.attention_stages;
  if (args.num_stages == 0) {
    // As much in flight as there is room for where a CTA has an SM to itself; else more CTAs.
    const int64_t num_ctas = int64_t{ws.num_rows} * grid_y * ws.max_splits;
    args.num_stages = num_ctas <= device_.num_sms ? 2 : 1;
  }
  const int shared = is_tiled ? attention_shared_bytes(dims.head_dim, groups, args.num_stages) : 0;
  // Rows take turns where the partial results of all of them would not fit.
  const int64_t per_row = int64_t{dims.num_heads} * ws.max_splits;
  const int rows_at_once =
      static_cast<int>(std::min<int64_t>(std::max<int64_t>(ws.split_entries / per_row, 1), 32768));
  for (int first = 0; first < ws.num_rows; first += rows_at_once) {
    args.first_row = first;
    const int count = std::min(rows_at_once, ws.num_rows - first);
    launch_kernel(launch(), "attention", kernel,
                  dim3(static_cast<unsigned>(ws.max_splits), static_cast<unsigned>(grid_y),
                       static_cast<unsigned>(count)),
                  static_cast<unsigned>(threads), static_cast<size_t>(shared), args);
  }
  const int num_cols = dims.num_heads * dims.head_dim;
  ws.set_input({ws.attention_out.data<float>(), num_cols, num_cols, nullptr, 0.0f});
}

}  // namespace xllm::cuda
