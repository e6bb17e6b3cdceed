// x = E[token].
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/embed.cuh"
#include "backend/cuda/repack.h"

namespace xllm::cuda {

void CudaBackend::embed(Workspace &ws_base, const WeightSet &weights_base,
                        const ForwardBatch &batch) {
  CudaWorkspace &ws = as_cuda(ws_base);
  const CudaWeights &weights = as_cuda(weights_base);
  if (records(ws, 1, &weights)) return;
  if (!in_step_) begin_step(ws, batch, batch.num_tokens());
  if (is_f32(weights)) return f32_embed(ws, weights);
  const ModelDims &dims = weights.dims;
  EmbedArgs args = {};
  args.table = weights.embedding.data;
  args.type = weights.embedding.type;
  args.tile_bytes =
      is_plain(args.type) ? 0 : static_cast<int64_t>(tile_bytes(args.type, weights.embedding.cols));
  args.num_cols = dims.hidden_size;
  args.token_ids = ws.batch.token_ids;
  args.sampler_rows = ws.batch.sampler_rows;
  args.sampled = ws.sampled.data<int32_t>();
  args.x = ws.x.data<float>();
  launch_kernel(launch(), "embed", embed_kernel, dim3(static_cast<unsigned>(ws.num_rows)),
                kEmbedThreads, 0, args);
  ws.set_input(hidden_rows(ws, weights.layers.front().attn_norm));
}

}  // namespace xllm::cuda
