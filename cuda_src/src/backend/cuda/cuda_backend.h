// An NVIDIA GPU as a device: raw quantised blocks as tiles times integer activations. The stages
// are in the files of their names; what passes between them is f32 rows, quantised by the product
// that reads them or by a kernel right before it. One stream; every kernel may start before the one
// before it has ended (device_utils.cuh); decode steps replay as graphs.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "backend/cuda/cuda_weights.h"
#include "backend/cuda/cuda_workspace.h"
#include "backend/cuda/head_rows.cuh"
#include "backend/cuda/launch.h"

namespace xllm::cuda {

// Opts the attention kernels in to the shared memory they use; once per device.
void prepare_attention(const Device &device);
void prepare_qkv();

class CudaBackend : public Backend {
 public:
  // Throws Error(kDevice) where there is no such device or the library was not compiled for it.
  explicit CudaBackend(const BackendOptions &options);
  ~CudaBackend() override;

  const DeviceInfo &info() const override { return info_; }
  DeviceMemory memory() const override;
  Allocator &allocator() override { return *allocator_; }

  BackendPlan plan(const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
                   int max_step_tokens, int max_seqs) const override;
  std::unique_ptr<WeightSet> load_weights(
      const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
      const std::function<void(uint64_t, uint64_t)> &progress) override;
  std::unique_ptr<Workspace> make_workspace(const WeightSet &weights, int max_seqs) override;
  void reserve(Workspace &ws, int max_step_tokens) override;

  void embed(Workspace &ws, const WeightSet &weights, const ForwardBatch &batch) override;
  void qkv(Workspace &ws, const WeightSet &weights, int layer, const KvView &kv,
           const ForwardBatch &batch) override;
  void attention(Workspace &ws, const WeightSet &weights, int layer, const KvView &kv,
                 const ForwardBatch &batch) override;
  void o_proj(Workspace &ws, const WeightSet &weights, int layer,
              const ForwardBatch &batch) override;
  void ffn(Workspace &ws, const WeightSet &weights, int layer, const ForwardBatch &batch) override;
  void head(Workspace &ws, const WeightSet &weights, const ForwardBatch &batch) override;
  void run_step(Workspace &ws, const ForwardBatch &batch,
                const std::function<void()> &stages) override;

  bool is_computing() override;
  const float *host_logits(Workspace &ws) override;
  bool sample(Workspace &ws, const ForwardBatch &batch, Span<const SampleRow> rows,
              Span<int32_t> token_ids) override;
  bool start_sample(Workspace &ws, const ForwardBatch &batch, Span<const SampleRow> rows) override;
  void finish_sample(Workspace &ws, Span<int32_t> token_ids) override;
  void copy_blocks(const KvView &kv, Span<const int32_t> src, Span<const int32_t> dst) override;
  void read_tap(Workspace &ws, Tap tap, std::vector<float> *out) override;

  // For tests and measurements.
  void set_graphs(bool is_on) { uses_graphs_ = is_on; }
  Device &device() { return device_; }
  cudaStream_t stream() const { return stream_; }
  void synchronize();

 private:
  Launch launch() const { return {&device_, stream_}; }
  // Sizes, splits and the device's copy of the batch. padded_rows >= num_tokens.
  void begin_step(CudaWorkspace &ws, const ForwardBatch &batch, int padded_rows);
  // True where attention finishes q, k and v itself and qkv leaves them as the product did: decode
  // steps that run as graphs. Without graphs every stage ends with what backend.h says it does.
  bool finishes_rows(const CudaWorkspace &ws, const KvView &kv) const;
  static QkvArgs qkv_args(const CudaWorkspace &ws, const CudaWeights &weights, int layer,
                          const KvView &kv);
  // The rows of the residual under a norm.
  static ActRows hidden_rows(const CudaWorkspace &ws, const float *norm_weight);
  // A product with the workspace's input, which is quantised first where the product wants it so.
  Product product_of(CudaWorkspace &ws, const FusedMatrix &matrix, int num_tokens);
  // x += product of the input with matrix + bias; then the input is x under norm_weight.
  void add_product(CudaWorkspace &ws, const FusedMatrix &matrix, const float *bias,
                   const float *norm_weight);
  // The stages in the dequantised form (per_slot.cu).
  void f32_embed(CudaWorkspace &ws, const CudaWeights &weights);
  void f32_qkv(CudaWorkspace &ws, const CudaWeights &weights, int layer, const KvView &kv);
  void f32_attention(CudaWorkspace &ws, const CudaWeights &weights, int layer, const KvView &kv);
  void f32_o_proj(CudaWorkspace &ws, const CudaWeights &weights, int layer);
  void f32_ffn(CudaWorkspace &ws, const CudaWeights &weights, int layer);
  void f32_head(CudaWorkspace &ws, const CudaWeights &weights);
  void f32_normalize(CudaWorkspace &ws, const float *bias, const float *weight);
  // Opened on first use; the dequantised form is refused where there is none.
  std::shared_ptr<const CublasLibrary> cublas() const;
  void capture(CudaWorkspace &ws, CudaWorkspace::Graph *graph, const std::function<void()> &stages);

  Device device_;
  DeviceInfo info_;
  std::function<void(const std::string &)> log_;
  std::unique_ptr<DeviceAllocator> allocator_;
  cudaStream_t stream_ = nullptr;
  mutable std::shared_ptr<const CublasLibrary> cublas_;
  bool uses_graphs_ = true;
  bool in_step_ = false;
};

inline CudaWorkspace &as_cuda(Workspace &ws) { return static_cast<CudaWorkspace &>(ws); }
inline const CudaWeights &as_cuda(const WeightSet &weights) {
  return static_cast<const CudaWeights &>(weights);
}

inline bool is_f32(const CudaWeights &weights) {
  return weights.form() == WeightForm::kDequantized;
}

// For a graph's signature: what a stage would have been launched with. Returns true when that is
// all that is wanted.
template <typename... Values>
bool records(CudaWorkspace &ws, Values... values) {
  if (!ws.is_recording) return false;
  (ws.signature.push_back((uint64_t)(values)), ...);
  return true;
}

}  // namespace xllm::cuda
