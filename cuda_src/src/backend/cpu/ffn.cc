// h = silu(act * Wg) * (act * Wu); x += Q(h) * Wd; act = Q(rms_norm(x, the next norm)).
#include <algorithm>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"

namespace xllm::cpu {
namespace {

// Rows of a chunk: 32 to 256, a multiple of 32, about eight chunks per thread.
int ffn_chunk_rows(int num_tokens, int num_rows, int num_threads) {
  const int wanted = num_rows / (8 * num_threads) / 32 * 32;
  const int fitting = kFfnValues / std::min(num_tokens, kFfnTokens) / 32 * 32;
  return std::max(32, std::min({wanted, fitting, 256}));
}

}  // namespace

void CpuBackend::ffn(Workspace &ws_base, const WeightSet &weights_base, int layer_index,
                     const ForwardBatch &batch) {
  CpuWorkspace &ws = as_cpu(ws_base);
  const CpuWeights &weights = as_cpu(weights_base);
  const ModelDims &dims = weights.dims();
  const Layer &layer = weights.layer(layer_index);
  Activations &h = ws.ffn_act();
  const int num_tokens = batch.num_tokens();
  const Precision precision =
      is_fine_layer(layer_index, dims.num_layers) ? Precision::kFine : Precision::kInt8;
  const bool is_raw = weights.form() == WeightForm::kRaw;

  // A chunk owns the same rows of gate and up, whole quantised blocks of h, and finishes them while
  // they are in the core's cache.
  const int chunk_rows = ffn_chunk_rows(num_tokens, dims.intermediate_size, pool_.num_threads());
  const int chunk_tokens = kFfnValues / chunk_rows / kTokenStep * kTokenStep;
  const int64_t row_chunks = (dims.intermediate_size + chunk_rows - 1) / chunk_rows;
  const int64_t token_blocks = (num_tokens + chunk_tokens - 1) / chunk_tokens;
  pool_.parallel_for(row_chunks * token_blocks, [&](int64_t chunk, int thread) {
    const int first_row = static_cast<int>(chunk % row_chunks) * chunk_rows;
    const int num_rows = std::min(chunk_rows, dims.intermediate_size - first_row);
    const int first_token = static_cast<int>(chunk / row_chunks) * chunk_tokens;
    const int count = std::min(chunk_tokens, num_tokens - first_token);
    float *gate = ws.thread_scratch(thread), *up = gate + kFfnValues;
    multiply_chunk(*kernels_, layer.gate, first_row, num_rows, ws.hidden_act(), first_token, count,
                   Precision::kInt8, gate, chunk_rows);
    multiply_chunk(*kernels_, layer.up, first_row, num_rows, ws.hidden_act(), first_token, count,
                   Precision::kInt8, up, chunk_rows);
    for (int t = 0; t < count; ++t) {
      const int token = first_token + t, at = t * chunk_rows;
      kernels_->silu_mul(gate + at, up + at, num_rows, h.f(token) + first_row);
      if (is_raw) h.quantize(*kernels_, precision, token, first_row, num_rows);
    }
  });

  const bool is_last = layer_index + 1 == dims.num_layers;
  const Vector &next_norm =
      is_last ? weights.output_norm() : weights.layer(layer_index + 1).attn_norm;
  add_product(ws, weights, layer.down, {}, h, precision, next_norm, Precision::kFine);
}

}  // namespace xllm::cpu
