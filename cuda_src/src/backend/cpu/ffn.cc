// h = silu(act * Wg) * (act * Wu); x += Q(h) * Wd; act = Q(rms_norm(x, the next norm)).
#include <algorithm>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"

namespace xllm::cpu {

void CpuBackend::ffn(Workspace &ws_base, const WeightSet &weights_base, int layer_index,
                     const ForwardBatch &batch) {
  CpuWorkspace &ws = as_cpu(ws_base);
  const CpuWeights &weights = as_cpu(weights_base);
  const ModelDims &dims = weights.dims();
  const Layer &layer = weights.layer(layer_index);
  Activations &h = ws.ffn_act();
  const int num_tokens = batch.num_tokens();
  const bool is_raw = weights.form() == WeightForm::kRaw;

  // A chunk owns the same rows of gate and up, and turns them into one quantised block of h while
  // they are in the core's cache.
  const int64_t row_chunks = (dims.intermediate_size + kFfnRows - 1) / kFfnRows;
  const int64_t token_blocks = (num_tokens + kTokenBlock - 1) / kTokenBlock;
  pool_.parallel_for(row_chunks * token_blocks, [&](int64_t chunk, int thread) {
    const int first_row = static_cast<int>(chunk % row_chunks) * kFfnRows;
    const int num_rows = std::min(kFfnRows, dims.intermediate_size - first_row);
    const int first_token = static_cast<int>(chunk / row_chunks) * kTokenBlock;
    const int count = std::min(kTokenBlock, num_tokens - first_token);
    float *gate = ws.thread_scratch(thread), *up = gate + kFfnRows * kTokenBlock;
    multiply_chunk(*kernels_, layer.gate, first_row, num_rows, ws.hidden_act(), nullptr,
                   first_token, count, gate, kFfnRows);
    multiply_chunk(*kernels_, layer.up, first_row, num_rows, ws.hidden_act(), nullptr, first_token,
                   count, up, kFfnRows);
    for (int t = 0; t < count; ++t) {
      const int token = first_token + t;
      kernels_->silu_mul(gate + t * kFfnRows, up + t * kFfnRows, num_rows, h.f(token) + first_row);
      if (is_raw) h.quantize(*kernels_, token, first_row, num_rows);
    }
  });

  const bool is_last = layer_index + 1 == dims.num_layers;
  const Vector &next_norm =
      is_last ? weights.output_norm() : weights.layer(layer_index + 1).attn_norm;
  add_product(ws, weights, layer.down, {}, h, next_norm);
}

}  // namespace xllm::cpu
