// logits = act * Wh of the rows that want them.
#include "backend/cuda/act_rows.h"
#include "backend/cuda/cuda_backend.h"

namespace xllm::cuda {

void CudaBackend::head(Workspace &ws_base, const WeightSet &weights_base,
                       const ForwardBatch & /*batch*/) {
  CudaWorkspace &ws = as_cuda(ws_base);
  const CudaWeights &weights = as_cuda(weights_base);
  if (records(ws, 6, ws.num_logits)) return;
  if (is_f32(weights)) return f32_head(ws, weights);
  if (ws.num_logits == 0) return;
  if (!ws.is_identity) {
    const int hidden = weights.dims.hidden_size;
    float *rows = ws.head_rows.data<float>();
    gather_rows(launch(), ws.x.data<float>(), ws.batch.logit_rows, ws.num_logits, hidden, rows);
    ActRows input = hidden_rows(ws, weights.output_norm);
    input.x = rows;
    ws.set_input(input);
  }
  Product product = product_of(ws, weights.head, ws.num_logits);
  product.out = ws.logits.data<float>();
  product.out_stride = weights.dims.vocab_size;
  matmul(launch(), product);
}

}  // namespace xllm::cuda
