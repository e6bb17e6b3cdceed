// The stages in the per-slot form: f32 weights, activations and cache, products by cuBLAS. As the
// other form's files of the stages' names, without graphs and without fusing anything.
#include "backend/cuda/act_rows.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/f32_attention.cuh"
#include "backend/cuda/f32_rows.cuh"
#include "backend/cuda/kv_pages.h"

namespace xllm::cuda {
namespace {

dim3 grid_of(int rows) { return dim3(static_cast<unsigned>(rows)); }

// The parts of `matrix` side by side in out.
void multiply(const F32Scratch &f32, const FusedMatrix &matrix, const float *x, int64_t x_stride,
              int num_tokens, float *out, bool is_added) {
  int64_t column = 0;
  for (const DeviceMatrix &part : matrix.parts) {
    f32.sgemm->multiply(reinterpret_cast<const float *>(part.data), part.rows, part.cols, x,
                        x_stride, num_tokens, out + column, matrix.rows(), is_added);
    column += part.rows;
  }
}

}  // namespace

// act = rms_norm(x + bias) * weight, and x += bias.
void CudaBackend::f32_normalize(CudaWorkspace &ws, const float *bias, const float *weight) {
  const ModelDims &dims = ws.weights->dims;
  launch_kernel(launch(), "f32_norm", f32_norm_kernel, grid_of(ws.num_rows), kF32Threads, 0,
                ws.x.data<float>(), bias, weight, dims.hidden_size, dims.rms_eps,
                ws.f32.act.data<float>());
  ws.f32.last_act = {ws.f32.act.data<float>(), dims.hidden_size};
}

void CudaBackend::f32_embed(CudaWorkspace &ws, const CudaWeights &weights) {
  F32EmbedArgs args = {};
  args.table = reinterpret_cast<const float *>(weights.embedding.data);
  args.token_ids = ws.batch.token_ids;
  args.sampler_rows = ws.batch.sampler_rows;
  args.sampled = ws.sampled.data<int32_t>();
  args.num_cols = weights.dims.hidden_size;
  args.x = ws.x.data<float>();
  launch_kernel(launch(), "f32_embed", f32_embed_kernel, grid_of(ws.num_rows), kF32Threads, 0,
                args);
  f32_normalize(ws, nullptr, weights.layers.front().attn_norm);
}

void CudaBackend::f32_qkv(CudaWorkspace &ws, const CudaWeights &weights, int layer,
                          const KvView &kv) {
  const ModelDims &dims = weights.dims;
  const CudaLayer &of = weights.layers[static_cast<size_t>(layer)];
  multiply(ws.f32, of.qkv, ws.f32.act.data<float>(), dims.hidden_size, ws.num_rows,
           ws.qkv.data<float>(), false);
  F32QkvArgs args = {};
  args.rows = qkv_args(ws, weights, layer, kv);
  args.bias = of.qkv_bias;
  args.q = ws.f32.q.data<float>();
  const int heads = dims.num_heads + 2 * dims.num_kv_heads;
  launch_kernel(launch(), "f32_qkv_rows", f32_qkv_rows_kernel,
                dim3(static_cast<unsigned>((heads + kF32Warps - 1) / kF32Warps),
                     static_cast<unsigned>(ws.num_rows)),
                kF32Threads, 0, args);
}

void CudaBackend::f32_attention(CudaWorkspace &ws, const CudaWeights &weights, int layer,
                                const KvView &kv) {
  const ModelDims &dims = weights.dims;
  F32AttentionArgs args = {};
  args.q = ws.f32.q.data<float>();
  args.kv = kv_pages(kv, layer);
  args.positions = ws.batch.positions;
  args.row_tables = ws.batch.row_tables;
  args.tables = ws.batch.tables;
  args.num_heads = dims.num_heads;
  args.group_size = dims.num_heads / dims.num_kv_heads;
  args.head_dim = dims.head_dim;
  args.scale = dims.attention_scale;
  args.window = dims.sliding_window;
  args.out = ws.attention_out.data<float>();
  launch_kernel(launch(), "f32_attention", f32_attention_kernel,
                dim3(static_cast<unsigned>(dims.num_heads), static_cast<unsigned>(ws.num_rows)),
                kF32Threads, 0, args);
  const int cols = dims.num_heads * dims.head_dim;
  ws.f32.last_act = {args.out, cols};
}

void CudaBackend::f32_o_proj(CudaWorkspace &ws, const CudaWeights &weights, int layer) {
  const ModelDims &dims = weights.dims;
  const CudaLayer &of = weights.layers[static_cast<size_t>(layer)];
  multiply(ws.f32, of.o, ws.attention_out.data<float>(), int64_t{dims.num_heads} * dims.head_dim,
           ws.num_rows, ws.x.data<float>(), true);
  f32_normalize(ws, of.o_bias, of.ffn_norm);
}

void CudaBackend::f32_ffn(CudaWorkspace &ws, const CudaWeights &weights, int layer) {
  const ModelDims &dims = weights.dims;
  const auto index = static_cast<size_t>(layer);
  const CudaLayer &of = weights.layers[index];
  float *gate_up = ws.ffn.data<float>();
  multiply(ws.f32, of.gate_up, ws.f32.act.data<float>(), dims.hidden_size, ws.num_rows, gate_up,
           false);
  swiglu_rows(launch(), gate_up, ws.num_rows, dims.intermediate_size);
  multiply(ws.f32, of.down, gate_up, 2 * int64_t{dims.intermediate_size}, ws.num_rows,
           ws.x.data<float>(), true);
  f32_normalize(ws, nullptr,
                index + 1 < weights.layers.size() ? weights.layers[index + 1].attn_norm
                                                  : weights.output_norm);
}

void CudaBackend::f32_head(CudaWorkspace &ws, const CudaWeights &weights) {
  if (ws.num_logits == 0) return;
  const int hidden = weights.dims.hidden_size;
  float *rows = ws.head_rows.data<float>();
  gather_rows(launch(), ws.f32.act.data<float>(), ws.batch.logit_rows, ws.num_logits, hidden, rows);
  multiply(ws.f32, weights.head, rows, hidden, ws.num_logits, ws.logits.data<float>(), false);
}

}  // namespace xllm::cuda
