// logits = act * Wh of the rows that want them.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/gather_acts.cuh"

namespace xllm::cuda {

void CudaBackend::head(Workspace &ws_base, const WeightSet &weights_base,
                       const ForwardBatch & /*batch*/) {
  CudaWorkspace &ws = as_cuda(ws_base);
  const CudaWeights &weights = as_cuda(weights_base);
  if (records(ws, 6, ws.num_logits)) return;
  if (is_f32(weights)) return f32_head(ws, weights);
  if (ws.num_logits == 0) return;
  const ActView *act = &ws.act_hidden.view;
  if (!ws.is_identity) {
    launch_kernel(launch(), "gather_acts", gather_acts_kernel,
                  dim3(static_cast<unsigned>(ws.num_logits)), 256, 0, ws.act_hidden.view,
                  static_cast<const int32_t *>(ws.batch.logit_rows),
                  (weights.dims.hidden_size + kActBlock - 1) / kActBlock, ws.act_head.view);
    act = &ws.act_head.view;
  }
  Product product = {};
  product.matrix = &weights.head;
  product.act = act;
  product.norm_in = &ws.hidden_norm;
  product.num_tokens = ws.num_logits;
  product.out = ws.logits.data<float>();
  product.out_stride = weights.dims.vocab_size;
  product.partials = ws.partials.data<float>();
  matmul(launch(), product);
}

}  // namespace xllm::cuda
