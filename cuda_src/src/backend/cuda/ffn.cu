// h = silu(act * Wg) * (act * Wu); x += Q(h) * Wd.
#include "backend/cuda/act_rows.h"
#include "backend/cuda/cuda_backend.h"

namespace xllm::cuda {

void CudaBackend::ffn(Workspace &ws_base, const WeightSet &weights_base, int layer,
                      const ForwardBatch & /*batch*/) {
  CudaWorkspace &ws = as_cuda(ws_base);
  const CudaWeights &weights = as_cuda(weights_base);
  if (records(ws, 5, layer)) return;
  if (is_f32(weights)) return f32_ffn(ws, weights, layer);
  const ModelDims &dims = weights.dims;
  const auto index = static_cast<size_t>(layer);
  const CudaLayer &of = weights.layers[index];
  const bool is_fused = !of.gate_up.has_plain_part();
  Product product = product_of(ws, of.gate_up, ws.num_rows);
  product.out = ws.ffn.data<float>();
  product.out_stride = (is_fused ? 1 : 2) * int64_t{dims.intermediate_size};
  product.finish = is_fused ? Finish::kSwiGlu : Finish::kStore;
  matmul(launch(), product);
  if (!is_fused) swiglu_rows(launch(), product.out, ws.num_rows, dims.intermediate_size);
  ws.set_input({product.out, product.out_stride, dims.intermediate_size, nullptr, 0.0f});
  add_product(ws, of.down, nullptr,
              index + 1 < weights.layers.size() ? weights.layers[index + 1].attn_norm
                                                : weights.output_norm);
}

}  // namespace xllm::cuda
