// q, k, v = act * (Wq|Wk|Wv) + bias; head norms, RoPE; q to the workspace, k and v into the cache.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/kv_pages.h"
#include "backend/cuda/qkv_rows.cuh"

namespace xllm::cuda {

void prepare_qkv() { prefer_shared_memory(reinterpret_cast<const void *>(qkv_rows_kernel)); }

QkvArgs CudaBackend::qkv_args(const CudaWorkspace &ws, const CudaWeights &weights, int layer,
                              const KvView &kv) {
  const ModelDims &dims = weights.dims;
  const CudaLayer &of = weights.layers[static_cast<size_t>(layer)];
  QkvArgs args = {};
  const Partials &left = ws.qkv_left;
  const bool is_left = left.data != nullptr;
  args.qkv = is_left ? left.data : ws.qkv.data<float>();
  args.num_slices = is_left ? left.num_slices : 1;
  args.slice_stride = int64_t{ws.num_rows} * left.num_rows;
  args.bias = is_left ? of.qkv_bias : nullptr;
  args.q_norm = of.q_norm;
  args.k_norm = of.k_norm;
  args.eps = dims.rms_eps;
  args.num_heads = dims.num_heads;
  args.head_dim = dims.head_dim;
  args.rope.coarse = reinterpret_cast<const float2 *>(weights.rope_coarse);
  args.rope.fine = reinterpret_cast<const float2 *>(weights.rope_fine);
  args.rope.rotary_dim = dims.rope.rotary_dim;
  args.rope.is_neighbor = dims.rope.is_neighbor;
  args.positions = ws.batch.positions;
  args.kv_indices = ws.batch.kv_indices;
  args.kv = kv_pages(kv, layer);
  args.q = ws.q.data<__half>();
  return args;
}

void CudaBackend::qkv(Workspace &ws_base, const WeightSet &weights_base, int layer,
                      const KvView &kv, const ForwardBatch & /*batch*/) {
  CudaWorkspace &ws = as_cuda(ws_base);
  const CudaWeights &weights = as_cuda(weights_base);
  if (records(ws, 2, layer, kv.base, kv.layout.block_bytes(), kv.layout.block_size)) return;
  if (is_f32(weights)) return f32_qkv(ws, weights, layer, kv);
  const ModelDims &dims = weights.dims;
  const CudaLayer &of = weights.layers[static_cast<size_t>(layer)];

  Product product = product_of(ws, of.qkv, ws.num_rows);
  product.out = ws.qkv.data<float>();
  product.out_stride = of.qkv.rows();
  product.bias = of.qkv_bias;
  matmul(launch(), product, &ws.qkv_left);

  if (finishes_rows(ws, kv)) return;
  const QkvArgs args = qkv_args(ws, weights, layer, kv);
  const int heads = dims.num_heads + 2 * dims.num_kv_heads;
  constexpr int kMaxGridY = 32768;
  for (int first = 0; first < ws.num_rows; first += kMaxGridY) {
    const int count = ws.num_rows - first < kMaxGridY ? ws.num_rows - first : kMaxGridY;
    QkvArgs part = args;
    part.qkv += static_cast<int64_t>(first) * product.out_stride;
    part.positions += first;
    part.kv_indices += first;
    part.q += static_cast<int64_t>(first) * dims.num_heads * dims.head_dim;
    launch_kernel(launch(), "qkv_rows", qkv_rows_kernel,
                  dim3(static_cast<unsigned>((heads + kQkvWarps - 1) / kQkvWarps),
                       static_cast<unsigned>(count)),
                  kQkvWarps * kWarp, 0, part);
  }
}

}  // namespace xllm::cuda
