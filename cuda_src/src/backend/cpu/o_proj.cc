// x += act * Wo; act = Q(rms_norm(x, ffn_norm)).
#include "backend/cpu/cpu_backend.h"

namespace xllm::cpu {

void CpuBackend::o_proj(Workspace &ws_base, const WeightSet &weights_base, int layer_index,
                        const ForwardBatch & /*batch*/) {
  CpuWorkspace &ws = as_cpu(ws_base);
  const CpuWeights &weights = as_cpu(weights_base);
  const Layer &layer = weights.layer(layer_index);
  add_product(ws, weights, layer.o, layer.o_bias, ws.attn_act(), Precision::kFine, layer.ffn_norm,
              Precision::kInt8);
}

}  // namespace xllm::cpu
