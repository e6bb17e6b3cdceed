#include "model/transformer.h"

namespace xllm {

void Transformer::forward(Workspace *workspace, const KvView &kv, const ForwardBatch &batch) const {
  check_batch(batch, dims_, kv);
  backend_->run_step(*workspace, batch, [&] {
    Workspace &ws = *workspace;
    backend_->embed(ws, *weights_, batch);
    for (int layer = 0; layer < dims_.num_layers; ++layer) {
      backend_->qkv(ws, *weights_, layer, kv, batch);
      backend_->attention(ws, *weights_, layer, kv, batch);
      backend_->o_proj(ws, *weights_, layer, batch);
      backend_->ffn(ws, *weights_, layer, batch);
    }
    if (batch.num_logits() > 0) backend_->head(ws, *weights_, batch);
  });
}

}  // namespace xllm
