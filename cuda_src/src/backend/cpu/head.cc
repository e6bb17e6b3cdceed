// logits = act * Wh, for the rows that want them.
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"

namespace xllm::cpu {

void CpuBackend::head(Workspace &ws_base, const WeightSet &weights_base,
                      const ForwardBatch &batch) {
  CpuWorkspace &ws = as_cpu(ws_base);
  const CpuWeights &weights = as_cpu(weights_base);
  const Product product = {&weights.head(), ws.logits(0), weights.head().rows};
  multiply(pool_, *kernels_, &product, 1, ws.hidden_act(), batch.logit_rows.data(),
           batch.num_logits(), Precision::kFine, [](int, int, int, int, int) {});
}

}  // namespace xllm::cpu
