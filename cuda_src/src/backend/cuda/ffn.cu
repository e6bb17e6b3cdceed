// h = silu(act * Wg) * (act * Wu); x += Q(h) * Wd; act = Q(rms_norm(x) * the next norm).
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/repack.h"
#include "backend/cuda/swiglu_rows.cuh"

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
  const DeviceMatrix &gate = of.gate_up.parts[0], &up = of.gate_up.parts[1];
  if (!is_plain(gate.type) && !is_plain(up.type) && dims.intermediate_size % 32 == 0) {
    matmul_swiglu(launch(), gate, up, ws.act_hidden.view, &ws.hidden_norm, ws.num_rows,
                  ws.act_ffn.view);
  } else {
    Product product = {};
    product.matrix = &of.gate_up;
    product.act = &ws.act_hidden.view;
    product.norm_in = &ws.hidden_norm;
    product.num_tokens = ws.num_rows;
    product.out = ws.unfused_gate_up();
    product.out_stride = 2 * int64_t{dims.intermediate_size};
    product.partials = ws.partials.data<float>();
    matmul(launch(), product);
    launch_kernel(launch(), "swiglu_rows", swiglu_rows_kernel,
                  dim3(static_cast<unsigned>(ws.num_rows)), 256, 0,
                  static_cast<const float *>(product.out), dims.intermediate_size, ws.act_ffn.view);
  }
  add_and_normalize(ws, of.down, nullptr, ws.act_ffn,
                    index + 1 < weights.layers.size() ? weights.layers[index + 1].attn_norm
                                                      : weights.output_norm);
}

}  // namespace xllm::cuda
