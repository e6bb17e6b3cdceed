// A set of weights on the device: one allocation that holds every matrix, every norm and bias as
// f32, and the RoPE tables. Matrices are tiles (planes.cuh) in the raw form, f32 rows in the
// dequantised one and for the types that no tile holds (q2_k, iq4_xs).
#pragma once

#include <functional>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device_memory.h"
#include "backend/cuda/matmul.h"

namespace xllm::cuda {

struct CudaLayer {
  const float *attn_norm = nullptr;  // [hidden]
  FusedMatrix qkv;                   // Q|K|V by rows
  const float *qkv_bias = nullptr;   // [rows of qkv], or null
  const float *q_norm = nullptr, *k_norm = nullptr;
  FusedMatrix o;
  const float *o_bias = nullptr;
  const float *ffn_norm = nullptr;
  FusedMatrix gate_up;  // gate, then up
  FusedMatrix down;
};

class CudaWeights : public WeightSet {
 public:
  // Uploads on `stream` and waits for it. Throws Error(kMemory) before anything is copied when it
  // does not fit.
  CudaWeights(const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
              DeviceAllocator *allocator, cudaStream_t stream,
              const std::function<void(uint64_t, uint64_t)> &progress);

  WeightForm form() const override { return form_; }
  uint64_t size_bytes() const override { return arena_.size_bytes(); }

  // Bytes that the constructor keeps, in two parts; kUploadBytes more while it runs.
  static void plan(const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
                   uint64_t *weight_bytes, uint64_t *table_bytes);
  static constexpr uint64_t kUploadBytes = uint64_t{16} << 20;

  // Whether gate and up are multiplied one by one, so that their rows need memory of their own.
  static bool is_gate_unfused(const ModelTensors &tensors, WeightForm form);
  bool is_gate_unfused() const;

  ModelDims dims;  // without the host copy of the RoPE tables
  DeviceMatrix embedding;
  std::vector<CudaLayer> layers;
  const float *output_norm = nullptr;
  FusedMatrix head;
  const float *rope_coarse = nullptr, *rope_fine = nullptr;

 private:
  WeightForm form_;
  Buffer arena_;
};

}  // namespace xllm::cuda
