// q, k, v = act * Wq|Wk|Wv; biases, head norms, RoPE; k and v go into the cache.
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/hadamard.h"
#include "backend/cpu/matmul.h"

namespace xllm::cpu {
namespace {

// Bias, norm per head and rotation of the heads of one row, in place; any of the three may be
// absent.
void finish_heads(const Kernels &kernels, const ModelDims &dims, const Vector &bias,
                  const Vector &norm, int num_heads, const float *cos_sin, float *row) {
  if (!bias.empty()) kernels.add(row, bias.data(), num_heads * dims.head_dim);
  for (int h = 0; h < num_heads; ++h, row += dims.head_dim) {
    if (!norm.empty()) kernels.rms_norm(row, norm.data(), dims.head_dim, dims.rms_eps, row);
    kernels.rope(row, cos_sin, dims.rope.rotary_dim, dims.rope.is_neighbor);
  }
}

void spread_heads(float *row, int num_heads, int head_dim) {
  for (int h = 0; h < num_heads; ++h) hadamard(row + h * head_dim, head_dim);
}

}  // namespace

void CpuBackend::qkv(Workspace &ws_base, const WeightSet &weights_base, int layer_index,
                     const KvView &kv, const ForwardBatch &batch) {
  CpuWorkspace &ws = as_cpu(ws_base);
  const CpuWeights &weights = as_cpu(weights_base);
  const ModelDims &dims = weights.dims();
  const Layer &layer = weights.layer(layer_index);
  const Product products[3] = {{&layer.q, ws.q(0), layer.q.rows},
                               {&layer.k, ws.k(0), layer.k.rows},
                               {&layer.v, ws.v(0), layer.v.rows}};
  multiply(pool_, *kernels_, products, 3, ws.hidden_act(), batch.num_tokens(), Precision::kFine,
           [](int, int, int, int, int) {});

  pool_.parallel_for(batch.num_tokens(), [&](int64_t t, int) {
    const int token = static_cast<int>(t);
    float *k = ws.k(token), *v = ws.v(token);
    finish_heads(*kernels_, dims, layer.q_bias, layer.q_norm, dims.num_heads, ws.cos_sin(token),
                 ws.q(token));
    finish_heads(*kernels_, dims, layer.k_bias, layer.k_norm, dims.num_kv_heads, ws.cos_sin(token),
                 k);
    if (!layer.v_bias.empty())
      kernels_->add(v, layer.v_bias.data(), dims.num_kv_heads * dims.head_dim);
    if (kv.layout.has_scales()) {  // spread large channels; attention() undoes that of v
      spread_heads(ws.q(token), dims.num_heads, dims.head_dim);
      spread_heads(k, dims.num_kv_heads, dims.head_dim);
      spread_heads(v, dims.num_kv_heads, dims.head_dim);
    }
    const int64_t kv_index = batch.kv_indices[static_cast<size_t>(t)];
    if (kv_index < 0) return;  // written nowhere
    const int block = static_cast<int>(kv_index / kv.layout.block_size);
    const int offset = static_cast<int>(kv_index % kv.layout.block_size);
    for (int h = 0; h < dims.num_kv_heads; ++h) {
      kernels_->store_kv(kv.layout, k + h * dims.head_dim, offset,
                         kv.k_page(layer_index, block, h));
      kernels_->store_kv(kv.layout, v + h * dims.head_dim, offset,
                         kv.v_page(layer_index, block, h));
    }
  });
}

}  // namespace xllm::cpu
