// x += act * Wo.
#include "backend/cuda/cuda_backend.h"

namespace xllm::cuda {

void CudaBackend::o_proj(Workspace &ws_base, const WeightSet &weights_base, int layer,
                         const ForwardBatch & /*batch*/) {
  CudaWorkspace &ws = as_cuda(ws_base);
  if (records(ws, 4, layer)) return;
  const CudaWeights &weights = as_cuda(weights_base);
  if (is_f32(weights)) return f32_o_proj(ws, weights, layer);
  const CudaLayer &of = weights.layers[static_cast<size_t>(layer)];
  add_product(ws, of.o, of.o_bias, of.ffn_norm);
}

}  // namespace xllm::cuda
