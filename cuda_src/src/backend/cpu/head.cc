// logits = act * Wh, for the rows that want them.
#include <algorithm>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"

namespace xllm::cpu {

void CpuBackend::head(Workspace &ws_base, const WeightSet &weights_base,
                      const ForwardBatch &batch) {
  CpuWorkspace &ws = as_cpu(ws_base);
  const CpuWeights &weights = as_cpu(weights_base);
  // Where some rows want none, those that do are packed anew.
  const int num_logits = batch.num_logits();
  Activations *act = &ws.hidden_act();
  bool all = num_logits == batch.num_tokens();
  for (int i = 0; i < num_logits && all; ++i) all = batch.logit_rows[static_cast<size_t>(i)] == i;
  if (!all) {
    act = &ws.head_act();
    pool_.parallel_for(num_logits, [&](int64_t i, int) {
      const int row = batch.logit_rows[static_cast<size_t>(i)];
      std::copy_n(ws.hidden_act().f(row), act->cols(), act->f(static_cast<int>(i)));
      if (weights.form() == WeightForm::kRaw)
        act->quantize(*kernels_, Precision::kFine, static_cast<int>(i));
    });
  }
  const Product product = {&weights.head(), ws.logits(0), weights.head().rows};
  multiply(pool_, *kernels_, &product, 1, *act, num_logits, Precision::kFine,
           [](int, int, int, int, int) {});
}

}  // namespace xllm::cpu
