// x = E[token]; act = Q(rms_norm(x)). Also the rotation of each row's position, which all layers
// share.
#include <cmath>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/dequant.h"
#include "base/error.h"

namespace xllm::cpu {
namespace {

// cos and sin of a position [rotary_dim / 2, 2]: the coarse angle plus the fine one, as a product
// of complex numbers.
void combine_tables(const RopeTables &rope, int position, float *cos_sin) {
  const int64_t width = rope.rotary_dim;
  const float *coarse = rope.coarse.data() + position / RopeTables::kFine * width;
  const float *fine = rope.fine.data() + position % RopeTables::kFine * width;
  for (int64_t i = 0; i < width; i += 2) {
    cos_sin[i] = std::fma(coarse[i], fine[i], -(coarse[i + 1] * fine[i + 1]));
    cos_sin[i + 1] = std::fma(coarse[i + 1], fine[i], coarse[i] * fine[i + 1]);
  }
}

}  // namespace

void CpuBackend::embed(Workspace &ws_base, const WeightSet &weights_base,
                       const ForwardBatch &batch) {
  CpuWorkspace &ws = as_cpu(ws_base);
  const CpuWeights &weights = as_cpu(weights_base);
  ws.reserve(batch.num_tokens(), batch.num_logits());
  const MatrixView &embedding = weights.embedding();
  for (const int32_t id : batch.token_ids) {
    if (id < 0)
      throw Error(Status::kInternal,
                  "batch: the CPU samples on the host, a token id was left to the device");
  }
  pool_.parallel_for(batch.num_tokens(), [&](int64_t t, int) {
    const auto row = static_cast<size_t>(t);
    const int token = static_cast<int>(t);
    dequantize_row(embedding.dtype, embedding.row(batch.token_ids[row]), embedding.cols,
                   ws.x(token));
    combine_tables(weights.dims().rope, batch.positions[row], ws.cos_sin(token));
  });
  normalize(ws, weights, weights.layer(0).attn_norm, Precision::kFine);
}

}  // namespace xllm::cpu
