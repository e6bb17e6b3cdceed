// The CPU as a device: quantised blocks, interleaved or straight from the file's map, times int8
// activations (batched API), or f32 copies times f32 activations (per-slot API). The stages are in
// the file of their name.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "backend/cpu/cpu_weights.h"
#include "backend/cpu/cpu_workspace.h"
#include "backend/cpu/host_memory.h"
#include "backend/cpu/kernels.h"
#include "base/thread_pool.h"

namespace xllm::cpu {

class CpuBackend : public Backend {
 public:
  // Throws Error(kInvalidArgument) for an instruction set that is unknown or that this CPU lacks.
  explicit CpuBackend(const BackendOptions &options);

  const DeviceInfo &info() const override { return info_; }
  DeviceMemory memory() const override;
  Allocator &allocator() override { return allocator_; }

  BackendPlan plan(const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
                   int max_step_tokens, int max_seqs) const override;
  std::unique_ptr<WeightSet> load_weights(
      const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
      const std::function<void(uint64_t, uint64_t)> &progress) override;
  std::unique_ptr<Workspace> make_workspace(const WeightSet &weights, int max_seqs) override;

  void embed(Workspace &ws, const WeightSet &weights, const ForwardBatch &batch) override;
  void qkv(Workspace &ws, const WeightSet &weights, int layer, const KvView &kv,
           const ForwardBatch &batch) override;
  void attention(Workspace &ws, const WeightSet &weights, int layer, const KvView &kv,
                 const ForwardBatch &batch) override;
  void o_proj(Workspace &ws, const WeightSet &weights, int layer,
              const ForwardBatch &batch) override;
  void ffn(Workspace &ws, const WeightSet &weights, int layer, const ForwardBatch &batch) override;
  void head(Workspace &ws, const WeightSet &weights, const ForwardBatch &batch) override;

  const float *host_logits(Workspace &ws) override;
  void copy_blocks(const KvView &kv, Span<const int32_t> src, Span<const int32_t> dst) override;
  void read_tap(Workspace &ws, Tap tap, std::vector<float> *out) override;

 private:
  // act = Q(rms_norm(x)) of every row, as finely as the next product reads it.
  void normalize(CpuWorkspace &ws, const CpuWeights &weights, const Vector &norm, Precision next);
  // x += act * w (+ bias), then normalize.
  void add_product(CpuWorkspace &ws, const CpuWeights &weights, const Matrix &matrix,
                   const Vector &bias, const Activations &act, Precision precision,
                   const Vector &norm, Precision next);

  // Attention of few rows over long contexts: splits are spread over the threads, their parts kept
  // in num_floats floats of the workspace.
  void spread_attention(CpuWorkspace &ws, const ModelDims &dims, int layer, const KvView &kv,
                        const ForwardBatch &batch, int64_t num_floats);

  HostAllocator allocator_;
  ThreadPool pool_;
  const Kernels *kernels_;
  DeviceInfo info_;
  uint64_t memory_limit_;
};

inline CpuWorkspace &as_cpu(Workspace &ws) { return static_cast<CpuWorkspace &>(ws); }
inline const CpuWeights &as_cpu(const WeightSet &weights) {
  return static_cast<const CpuWeights &>(weights);
}

// Throws what CpuBackend's constructor throws.
std::unique_ptr<Backend> make_cpu_backend(const BackendOptions &options);

}  // namespace xllm::cpu
