// softmax(q k^T * scale) v of every row over its own keys, f32. Rows of a prompt go together where
// they can; each gets the bytes that it would get by itself.
#include <algorithm>

#include "backend/cuda/attention.cuh"
#include "backend/cuda/attention_any.cuh"
#include "backend/cuda/attention_codes.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/kv_pages.h"
#include "backend/cuda/prompt_attention.h"
#include "backend/cuda/spread_rows.cuh"

namespace xllm::cuda {
namespace {

constexpr int kTiledHeadDims[] = {64, 80, 96, 128, 256};

// Null: there is none for these.
template <int kHeadDim, int kGroups>
AttentionKernel tiled_kernel_of(int depth, bool finishes) {
  if (depth == 1) {
    return finishes ? attention_kernel<kHeadDim, kGroups, 1, true>
                    : attention_kernel<kHeadDim, kGroups, 1, false>;
  }
  if (!finishes) return nullptr;
  if (depth == 2) return attention_kernel<kHeadDim, kGroups, 2, true>;
  if constexpr (kHeadDim <= 128) {
    if (depth == 4) return attention_kernel<kHeadDim, kGroups, 4, true>;
  }
  return nullptr;
}

AttentionKernel tiled_kernel(int head_dim, int groups, int depth, bool finishes) {
  switch (10 * head_dim + groups) {
    case 641:
      return tiled_kernel_of<64, 1>(depth, finishes);
    case 642:
      return tiled_kernel_of<64, 2>(depth, finishes);
    case 801:
      return tiled_kernel_of<80, 1>(depth, finishes);
    case 802:
      return tiled_kernel_of<80, 2>(depth, finishes);
    case 961:
      return tiled_kernel_of<96, 1>(depth, finishes);
    case 962:
      return tiled_kernel_of<96, 2>(depth, finishes);
    case 1281:
      return tiled_kernel_of<128, 1>(depth, finishes);
    case 1282:
      return tiled_kernel_of<128, 2>(depth, finishes);
    case 2561:
      return tiled_kernel_of<256, 1>(depth, finishes);
    case 2562:
      return tiled_kernel_of<256, 2>(depth, finishes);
    default:
      return nullptr;
  }
}

int groups_of(const ModelDims &dims) { return dims.num_heads / dims.num_kv_heads > 8 ? 2 : 1; }

bool has_room(const Device &device, int head_dim, int groups, int depth) {
  return attention_static_bytes(head_dim, groups) +
             attention_shared_bytes(head_dim, groups, depth) <=
         device.max_shared_bytes;
}

bool is_tiled_attention(const Device &device, const ModelDims &dims, const KvView &kv) {
  const int block_size = kv.layout.block_size, bits = kv_bits(kv.layout);
  if (block_size < kKeyTile || (block_size & (block_size - 1)) != 0) return false;
  if (bits != 16)
    return code_attention(device, dims.head_dim, groups_of(dims), bits).kernel != nullptr;
  return tiled_kernel(dims.head_dim, 1, 1, false) != nullptr &&
         has_room(device, dims.head_dim, groups_of(dims), 1);
}

// How deep the rings of kv_stream.cuh are: as much in flight as there is room for where a CTA has
// an SM to itself, else more CTAs. Speed only.
int ring_depth(const Device &device, const ModelDims &dims, bool finishes, int64_t num_ctas) {
  int depth = num_ctas <= device.num_sms ? 4 : num_ctas <= 3 * int64_t{device.num_sms} ? 2 : 1;
  if (device.attention_depth > 0) depth = device.attention_depth;
  const int groups = groups_of(dims);
  while (depth > 1 && (tiled_kernel(dims.head_dim, groups, depth, finishes) == nullptr ||
                       !has_room(device, dims.head_dim, groups, depth))) {
    depth /= 2;
  }
  return depth;
}

// Rows from first_row to the end of a tile.
int rows_to(const PromptTile &tile, int first_row) {
  return tile.first_row + tile.num_rows - first_row;
}

}  // namespace

void prepare_attention(const Device &device) {
  for (const int head_dim : kTiledHeadDims) {
    for (const int groups : {1, 2}) {
      for (const int depth : {1, 2, 4}) {
        for (const bool finishes : {false, true}) {
          const AttentionKernel kernel = tiled_kernel(head_dim, groups, depth, finishes);
          if (kernel == nullptr || !has_room(device, head_dim, groups, depth)) continue;
          const void *function = reinterpret_cast<const void *>(kernel);
          check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     attention_shared_bytes(head_dim, groups, depth)),
                "set shared memory size");
          prefer_shared_memory(function);
        }
      }
    }
  }
  prefer_shared_memory(reinterpret_cast<const void *>(attention_any_kernel));
  prepare_prompt_attention(device);
  prepare_code_attention(device);
  prefer_shared_memory(reinterpret_cast<const void *>(spread_rows_kernel));
}

bool CudaBackend::finishes_rows(const CudaWorkspace &ws, const KvView &kv) const {
  const ModelDims &dims = ws.weights->dims;
  return ws.is_decode && uses_graphs_ && !kv.layout.has_scales() &&
         is_tiled_attention(device_, dims, kv) &&
         rope_is_vector(dims.head_dim, dims.rope.rotary_dim, dims.rope.is_neighbor);
}

void CudaBackend::attention(Workspace &ws_base, const WeightSet &weights_base, int layer,
                            const KvView &kv, const ForwardBatch &batch) {
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
  args.tiles = ws.batch.tiles;
  args.num_heads = dims.num_heads;
  args.group_size = dims.num_heads / dims.num_kv_heads;
  args.head_dim = dims.head_dim;
  args.scale = dims.attention_scale * kLog2E;
  args.window = dims.sliding_window;
  args.partial_out = ws.split_out.data<float>();
  args.partial_stats = ws.split_stats.data<float2>();
  args.counters = ws.split_counters.data<int>();
  args.out = ws.attention_out.data<float>();
  args.max_splits = ws.max_splits;

  const bool is_tiled = is_tiled_attention(device_, dims, kv);
  const int head_groups = (args.group_size + 15) / 16;
  const int grid_y = is_tiled ? dims.num_kv_heads * head_groups : dims.num_heads;
  const bool finishes = finishes_rows(ws, kv);
  if (finishes) args.rows = qkv_args(ws, weights, layer, kv);
  const int depth =
      ring_depth(device_, dims, finishes, int64_t{ws.num_rows} * grid_y * ws.max_splits);
  AttentionKernel kernel = attention_any_kernel;
  unsigned threads = kAnyThreads;
  int shared = 0;
  if (is_tiled) {
    threads = kAttentionThreads;
    if (args.kv.bits != 16) {
      const CodeKernel found =
          code_attention(device_, dims.head_dim, groups_of(dims), args.kv.bits);
      kernel = found.kernel;
      shared = found.shared_bytes;
    } else {
      kernel = tiled_kernel(dims.head_dim, groups_of(dims), depth, finishes);
      shared = attention_shared_bytes(dims.head_dim, groups_of(dims), depth);
    }
  }
  // Rows take turns where the partial results of all of them would not fit.
  const int64_t per_row = int64_t{dims.num_heads} * ws.max_splits;
  const int rows_at_once =
      static_cast<int>(std::min<int64_t>(std::max<int64_t>(ws.split_entries / per_row, 1), 32768));
  const auto attend_rows = [&](int begin, int end) {
    for (int first = begin; first < end; first += rows_at_once) {
      args.first_row = first;
      const int count = std::min(rows_at_once, end - first);
      launch_kernel(launch(), "attention", kernel,
                    dim3(static_cast<unsigned>(ws.max_splits), static_cast<unsigned>(grid_y),
                         static_cast<unsigned>(count)),
                    threads, static_cast<size_t>(shared), args);
    }
  };
  const auto attend_tiles = [&](int begin, int end) {
    for (int first = begin; first < end;) {
      args.first_tile = first;
      args.first_row = ws.prompt.tiles[static_cast<size_t>(first)].first_row;
      int past = first + 1;
      while (past < end &&
             rows_to(ws.prompt.tiles[static_cast<size_t>(past)], args.first_row) <= rows_at_once) {
        ++past;
      }
      // Of the longest context among them.
      int splits = 1;
      for (int tile = first; tile < past; ++tile) {
        const PromptTile &of = ws.prompt.tiles[static_cast<size_t>(tile)];
        const int last_row = of.first_row + of.num_rows - 1;
        splits = std::max(splits, num_splits(batch.positions[static_cast<size_t>(last_row)] + 1));
      }
      prompt_attention(launch(), args, splits, past - first,
                       rows_to(ws.prompt.tiles[static_cast<size_t>(past - 1)], args.first_row));
      first = past;
    }
  };
  const bool has_tiles =
      is_tiled && rows_at_once >= prompt_tile_rows(args.group_size) &&
      has_prompt_attention(device_, dims.head_dim, args.group_size, args.kv.bits) &&
      !device_.has_plain_rows;
  for (const RowRun &run : ws.prompt.runs) {
    if (has_tiles && run.num_tiles > 0) {
      attend_tiles(run.first_tile, run.first_tile + run.num_tiles);
    } else {
      attend_rows(run.first_row, run.first_row + run.num_rows);
    }
  }
  if (args.kv.bits != 16) {
    const int heads = ws.num_rows * dims.num_heads;
    launch_kernel(launch(), "spread_rows", spread_rows_kernel,
                  dim3(static_cast<unsigned>((heads + kSpreadWarps - 1) / kSpreadWarps)),
                  kSpreadWarps * kWarp, 0, args.out, heads, dims.head_dim);
  }
  const int num_cols = dims.num_heads * dims.head_dim;
  ws.set_input({ws.attention_out.data<float>(), num_cols, num_cols, nullptr, 0.0f});
}

}  // namespace xllm::cuda
