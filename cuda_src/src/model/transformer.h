// The forward pass of a decoder-only transformer, the same for every device and family.
#pragma once

#include "backend/backend.h"

namespace xllm {

// Keeps references: the backend and the weights outlive it. Holds no state between steps.
class Transformer {
 public:
  Transformer(Backend *backend, const ModelDims &dims, const WeightSet *weights)
      : backend_(backend), weights_(weights), dims_(dims) {}

  // One step over the batch: computes every row, writes its K and V where kv_indices say, and
  // leaves the logits of batch.logit_rows in the workspace. Throws Error(kInternal) for a batch
  // that breaks its invariants, and what the stages throw.
  void forward(Workspace *workspace, const KvView &kv, const ForwardBatch &batch) const;

  const ModelDims &dims() const { return dims_; }

 private:
  Backend *backend_;
  const WeightSet *weights_;
  ModelDims dims_;
};

}  // namespace xllm
