#include "backend/cpu/cpu_weights.h"

#include <algorithm>

#include "backend/cpu/dequant.h"
#include "backend/cpu/interleave.h"
#include "base/thread_pool.h"

namespace xllm::cpu {
namespace {

constexpr uint64_t kPieceBytes = 2 << 20;  // of a tensor, as in the file
constexpr uint64_t kCopyAlignment = 256;

// What a matrix is copied to; f32 tensors serve both forms where they lie.
enum class Copy { kNone, kInterleaved, kF32 };

Copy copy_of(const MatrixView &tensor, WeightForm form, const Kernels &kernels) {
  if (form == WeightForm::kDequantized)
    return tensor.dtype == DType::kF32 ? Copy::kNone : Copy::kF32;
  return kernels.tiles[static_cast<int>(tensor.dtype)] != nullptr ? Copy::kInterleaved
                                                                  : Copy::kNone;
}

uint64_t f32_bytes(const MatrixView &tensor) {
  return static_cast<uint64_t>(tensor.rows) * static_cast<uint64_t>(tensor.cols) * sizeof(float);
}

// Whole cache lines and more: copies lie one after the other.
uint64_t copy_bytes(const MatrixView &tensor, Copy copy) {
  if (copy == Copy::kNone) return 0;
  const uint64_t bytes =
      copy == Copy::kF32 ? f32_bytes(tensor) : interleaved_bytes(tensor.rows, tensor.row_bytes());
  return (bytes + kCopyAlignment - 1) / kCopyAlignment * kCopyAlignment;
}

template <typename Visit>
void for_each_matrix(const ModelTensors &tensors, const Visit &visit) {
  for (const LayerTensors &layer : tensors.layers) {
    for (const MatrixView *tensor :
         {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      visit(*tensor);
    }
  }
  visit(tensors.head);
}

template <typename Visit>
void for_each_vector(const ModelTensors &tensors, const Visit &visit) {
  for (const LayerTensors &layer : tensors.layers) {
    for (const MatrixView *tensor :
         {&layer.attn_norm, &layer.q_bias, &layer.k_bias, &layer.v_bias, &layer.q_norm,
          &layer.k_norm, &layer.o_bias, &layer.ffn_norm}) {
      visit(*tensor);
    }
  }
  visit(tensors.output_norm);
}

}  // namespace

WeightBytes plan_weight_bytes(const ModelTensors &tensors, WeightForm form,
                              const Kernels &kernels) {
  WeightBytes bytes;
  for_each_matrix(tensors, [&](const MatrixView &tensor) {
    const Copy copy = copy_of(tensor, form, kernels);
    bytes.own += copy_bytes(tensor, copy);
    if (copy == Copy::kNone) bytes.mapped += tensor.size_bytes();
  });
  const bool is_read_by_head = tensors.head.data == tensors.embedding.data &&
                               copy_of(tensors.head, form, kernels) == Copy::kNone;
  if (!is_read_by_head) bytes.mapped += tensors.embedding.size_bytes();
  for_each_vector(tensors, [&](const MatrixView &tensor) {
    if (tensor) bytes.own += f32_bytes(tensor);
  });
  return bytes;
}

Matrix CpuWeights::take_matrix(const MatrixView &tensor, ThreadPool *pool,
                               const std::function<void(uint64_t)> &rows_done) {
  Matrix matrix;
  matrix.dtype = tensor.dtype;
  matrix.rows = static_cast<int>(tensor.rows);
  matrix.cols = static_cast<int>(tensor.cols);
  matrix.row_bytes = tensor.row_bytes();
  matrix.data = static_cast<const uint8_t *>(tensor.data);
  const Copy copy = copy_of(tensor, form_, *kernels_);
  if (copy == Copy::kNone) {
    rows_done(tensor.size_bytes());
    return matrix;
  }

  auto *to = copies_.data<uint8_t>() + copied_bytes_;
  copied_bytes_ += copy_bytes(tensor, copy);
  size_bytes_ += copy_bytes(tensor, copy);
  matrix.data = to;
  matrix.is_interleaved = copy == Copy::kInterleaved;
  const auto copy_group = [&](int64_t group, int) {
    const int64_t row = group * kInterleavedRows;
    const int64_t count = std::min<int64_t>(kInterleavedRows, tensor.rows - row);
    if (matrix.is_interleaved) {
      interleave_rows(tensor.dtype, tensor.row(row), tensor.row_bytes(), static_cast<int>(count),
                      matrix.cols, to + static_cast<uint64_t>(row) * tensor.row_bytes());
      return;
    }
    for (int64_t i = row; i < row + count; ++i) {
      dequantize_row(tensor.dtype, tensor.row(i), tensor.cols,
                     reinterpret_cast<float *>(to) + i * tensor.cols);
    }
  };
  // In pieces: where a set is loaded beside running streams, a step goes between two of them.
  const int64_t num_groups = (tensor.rows + kInterleavedRows - 1) / kInterleavedRows;
  const uint64_t group_bytes = tensor.row_bytes() * kInterleavedRows;
  const auto piece = static_cast<int64_t>(std::max<uint64_t>(kPieceBytes / group_bytes, 1));
  for (int64_t first = 0; first < num_groups; first += piece) {
    const int64_t end = std::min(first + piece, num_groups);
    pool->parallel_for(end - first, [&](int64_t i, int thread) { copy_group(first + i, thread); });
    const int64_t rows = std::min<int64_t>(end * kInterleavedRows, tensor.rows);
    rows_done(static_cast<uint64_t>(rows - first * kInterleavedRows) * tensor.row_bytes());
  }
  if (!matrix.is_interleaved) {
    matrix.dtype = DType::kF32;
    matrix.row_bytes = static_cast<uint64_t>(tensor.cols) * sizeof(float);
  }
  return matrix;
}

Vector CpuWeights::take_vector(const MatrixView &tensor) {
  if (!tensor) return {};
  Vector vector(static_cast<size_t>(tensor.cols));
  dequantize_row(tensor.dtype, tensor.data, tensor.cols, vector.data());
  size_bytes_ += vector.size() * sizeof(float);
  return vector;
}

CpuWeights::CpuWeights(const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
                       const Kernels &kernels, Allocator *allocator, ThreadPool *pool,
                       const std::function<void(uint64_t, uint64_t)> &progress)
    : dims_(dims), form_(form), kernels_(&kernels), embedding_(tensors.embedding) {
  uint64_t total = 0, done = 0, copied = 0;
  for_each_matrix(tensors, [&](const MatrixView &tensor) {
    total += tensor.size_bytes();
    copied += copy_bytes(tensor, copy_of(tensor, form, kernels));
  });
  // In one piece: on its own, what a tensor has beyond whole large pages would lie in small ones.
  if (copied > 0) copies_ = Buffer(allocator, copied);
  const auto take = [&](const MatrixView &tensor) {
    return take_matrix(tensor, pool, [&](uint64_t bytes) {
      done += bytes;
      if (progress) progress(done, total);
    });
  };
  layers_.reserve(tensors.layers.size());
  for (const LayerTensors &from : tensors.layers) {
    layers_.emplace_back();
    Layer &to = layers_.back();
    to.attn_norm = take_vector(from.attn_norm);
    to.q = take(from.q);
    to.k = take(from.k);
    to.v = take(from.v);
    to.q_bias = take_vector(from.q_bias);
    to.k_bias = take_vector(from.k_bias);
    to.v_bias = take_vector(from.v_bias);
    to.q_norm = take_vector(from.q_norm);
    to.k_norm = take_vector(from.k_norm);
    to.o = take(from.o);
    to.o_bias = take_vector(from.o_bias);
    to.ffn_norm = take_vector(from.ffn_norm);
    to.gate = take(from.gate);
    to.up = take(from.up);
    to.down = take(from.down);
  }
  output_norm_ = take_vector(tensors.output_norm);
  head_ = take(tensors.head);
}

}  // namespace xllm::cpu
