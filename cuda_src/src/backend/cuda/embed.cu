// x = E[token]; act = Q(rms_norm(x) * attn_norm of layer 0).
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
  args.norm_weight = weights.layers.front().attn_norm;
  args.eps = dims.rms_eps;
  args.act = ws.act_hidden.view;
  const int per_thread = (dims.hidden_size + kRowThreads - 1) / kRowThreads;
  const auto kernel = per_thread <= 1   ? embed_kernel<1>
                      : per_thread <= 2 ? embed_kernel<2>
                      : per_thread <= 4 ? embed_kernel<4>
                      : per_thread <= 8 ? embed_kernel<8>
                                        : embed_kernel<16>;
  launch_kernel(launch(), "embed", kernel, dim3(static_cast<unsigned>(ws.num_rows)), kRowThreads, 0,
                args);
  ws.last_act = &ws.act_hidden;
}

}  // namespace xllm::cuda
