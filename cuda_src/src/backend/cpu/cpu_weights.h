// The weights of a model as the CPU computes with them: in the raw form interleaved copies of the
// types that the instruction set has tiles for (interleave.h) and views of the file's map for the
// rest, in the dequantised form f32 copies.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"

namespace xllm {
class ThreadPool;
}

namespace xllm::cpu {

// A matrix that a product reads; `data` points into the file's map or into the set's own memory.
struct Matrix {
  DType dtype = DType::kF32;
  int rows = 0;
  int cols = 0;
  uint64_t row_bytes = 0;
  const uint8_t *data = nullptr;
  bool is_interleaved = false;

  bool is_float() const {
    return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
  }
  // Where interleaved, only for a multiple of kInterleavedRows.
  const uint8_t *row(int64_t r) const { return data + static_cast<uint64_t>(r) * row_bytes; }
};

// A norm's weights or a bias; empty where the model has none.
using Vector = std::vector<float>;

struct Layer {
  Vector attn_norm, ffn_norm;
  Matrix q, k, v, o;
  Vector q_bias, k_bias, v_bias, o_bias;
  Vector q_norm, k_norm;
  Matrix gate, up, down;
};

class CpuWeights : public WeightSet {
 public:
  // `tensors` has passed check_tensors and its map outlives this object. Copies come from
  // `allocator`.
  CpuWeights(const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
             const Kernels &kernels, Allocator *allocator, ThreadPool *pool,
             const std::function<void(uint64_t, uint64_t)> &progress);

  WeightForm form() const override { return form_; }
  uint64_t size_bytes() const override { return size_bytes_; }

  const ModelDims &dims() const { return dims_; }
  const MatrixView &embedding() const { return embedding_; }  // always in the file's own type
  const Layer &layer(int i) const { return layers_[static_cast<size_t>(i)]; }
  const Vector &output_norm() const { return output_norm_; }
  const Matrix &head() const { return head_; }

 private:
  // rows_done: called with the bytes, as in the file, of each piece that is ready.
  Matrix take_matrix(const MatrixView &tensor, ThreadPool *pool,
                     const std::function<void(uint64_t)> &rows_done);
  Vector take_vector(const MatrixView &tensor);

  ModelDims dims_;
  WeightForm form_;
  const Kernels *kernels_;
  MatrixView embedding_;
  std::vector<Layer> layers_;
  Vector output_norm_;
  Matrix head_;
  Buffer copies_;  // of all matrices, in the order of the layers
  uint64_t copied_bytes_ = 0;
  uint64_t size_bytes_ = 0;
};

struct WeightBytes {
  uint64_t own = 0;     // copies that CpuWeights will make
  uint64_t mapped = 0;  // bytes of the file that it goes on reading
};

WeightBytes plan_weight_bytes(const ModelTensors &tensors, WeightForm form, const Kernels &kernels);

}  // namespace xllm::cpu
