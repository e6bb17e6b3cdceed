#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/cuda_weights.h"
#include "backend/cuda/dequantize.h"
#include "backend/cuda/planes.cuh"
#include "backend/cuda/repack.h"
#include "base/half.h"

namespace xllm::cuda {
namespace {

constexpr uint64_t kAlignment = 256;
// Enough to hide the start of a copy; there are two.
constexpr uint64_t kStagingBytes = CudaWeights::kUploadBytes / 2;

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

float plain_element(const MatrixView &vector, int64_t i) {
  const auto *bytes = static_cast<const uint8_t *>(vector.data);
  if (vector.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, bytes + i * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes + i * 2, 2);
  return vector.dtype == DType::kF16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

// Walks the tensors of a model in the order in which they are laid out. Two passes use it: one adds
// up sizes, one uploads.
class Arena {
 public:
  explicit Arena(WeightForm form) : form_(form) {}
  virtual ~Arena() = default;
  virtual DeviceMatrix matrix(const MatrixView &view) = 0;
  virtual const float *vector(const float *values, uint64_t count) = 0;

  const float *vector_of(const MatrixView &view) {
    if (!view) return nullptr;
    std::vector<float> values(static_cast<size_t>(view.cols));
    for (int64_t i = 0; i < view.cols; ++i) values[static_cast<size_t>(i)] = plain_element(view, i);
    return vector(values.data(), values.size());
  }

 protected:
  // Kept as f32 rows: everything in the dequantised form, and the types that no tile holds.
  bool is_expanded(const MatrixView &view) const {
    return form_ == WeightForm::kDequantized || weight_type_of(view.dtype) < 0;
  }
  int type_of(const MatrixView &view) const {
    return is_expanded(view) ? kWeightF32 : weight_type_of(view.dtype);
  }
  uint64_t bytes_of(const MatrixView &view) const {
    if (!is_expanded(view)) return device_bytes(view);
    return static_cast<uint64_t>(view.rows) * static_cast<uint64_t>(view.cols) * sizeof(float);
  }

 private:
  WeightForm form_;
};

class SizeArena : public Arena {
 public:
  using Arena::Arena;
  DeviceMatrix matrix(const MatrixView &view) override {
    total += aligned(bytes_of(view));
    upload += view.size_bytes();
    return {nullptr, type_of(view), view.rows, view.cols};
  }
  const float *vector(const float * /*values*/, uint64_t count) override {
    total += aligned(count * sizeof(float));
    upload += count * sizeof(float);
    return nullptr;
  }
  uint64_t total = 0;
  uint64_t upload = 0;  // bytes that cross to the device
};

// Two page-locked buffers and two on the device take turns: while one is rearranged, the next is
// filled.
class UploadArena : public Arena {
 public:
  UploadArena(WeightForm form, uint8_t *base, DeviceAllocator *allocator, cudaStream_t stream,
              uint64_t upload_bytes, const std::function<void(uint64_t, uint64_t)> &progress)
      : Arena(form),
        base_(base),
        stream_(stream),
        upload_bytes_(upload_bytes),
        progress_(progress) {
    for (Lane &lane : lanes_) {
      lane.host = PinnedBuffer(kStagingBytes);
      lane.device = Buffer(allocator, kStagingBytes);
      check(cudaEventCreateWithFlags(&lane.is_free, cudaEventDisableTiming), "create an event");
    }
  }
  ~UploadArena() override {
    for (Lane &lane : lanes_) (void)cudaEventDestroy(lane.is_free);
  }

  DeviceMatrix matrix(const MatrixView &view) override {
    const int type = type_of(view);
    uint8_t *to = take(bytes_of(view));
    const uint64_t row_bytes = view.row_bytes();
    const int64_t step =
        std::max<int64_t>(static_cast<int64_t>(kStagingBytes / row_bytes) / 16 * 16, 16);
    if (row_bytes * 16 > kStagingBytes) {
      throw Error(Status::kModelUnsupported, view.name + ": a row of " + std::to_string(row_bytes) +
                                                 " bytes is too long to upload");
    }
    for (int64_t row = 0; row < view.rows; row += step) {
      const int64_t count = std::min(step, view.rows - row);
      const uint64_t bytes = static_cast<uint64_t>(count) * row_bytes;
      if (is_plain(type) && weight_type_of(view.dtype) == type) {
        copy(view.row(row), bytes, to + static_cast<uint64_t>(row) * row_bytes);
      } else if (is_expanded(view)) {
        Lane &lane = copy(view.row(row), bytes, nullptr);
        dequantize(view.dtype, lane.device.data<uint8_t>(), count, view.cols,
                   reinterpret_cast<float *>(to) + row * view.cols, stream_);
        release(&lane);
      } else {
        Lane &lane = copy(view.row(row), bytes, nullptr);
        repack(view.dtype, lane.device.data<uint8_t>(), count, view.cols,
               to + static_cast<uint64_t>(row / 16) * tile_bytes(type, view.cols), stream_);
        release(&lane);
      }
    }
    return {to, type, view.rows, view.cols};
  }

  const float *vector(const float *values, uint64_t count) override {
    uint8_t *to = take(count * sizeof(float));
    const auto *from = reinterpret_cast<const uint8_t *>(values);
    for (uint64_t done = 0; done < count * sizeof(float); done += kStagingBytes) {
      copy(from + done, std::min(kStagingBytes, count * sizeof(float) - done), to + done);
    }
    return reinterpret_cast<const float *>(to);
  }

 private:
  struct Lane {
    PinnedBuffer host;
    Buffer device;
    cudaEvent_t is_free = nullptr;
  };

  uint8_t *take(uint64_t bytes) {
    uint8_t *at = base_ + used_;
    used_ += aligned(bytes);
    return at;
  }

  // Copies to `to`, or to the lane's device buffer; the caller of the latter releases the lane.
  Lane &copy(const void *from, uint64_t bytes, uint8_t *to) {
    Lane &lane = lanes_[next_];
    next_ ^= 1;
    check(cudaEventSynchronize(lane.is_free), "upload weights");
    std::memcpy(lane.host.data<uint8_t>(), from, bytes);
    check(cudaMemcpyAsync(to != nullptr ? to : lane.device.data<uint8_t>(),
                          lane.host.data<uint8_t>(), bytes, cudaMemcpyHostToDevice, stream_),
          "upload weights");
    if (to != nullptr) release(&lane);
    done_ += bytes;
    if (progress_) progress_(done_, upload_bytes_);
    return lane;
  }
  void release(Lane *lane) { check(cudaEventRecord(lane->is_free, stream_), "upload weights"); }

  uint8_t *base_;
  cudaStream_t stream_;
  uint64_t upload_bytes_;
  const std::function<void(uint64_t, uint64_t)> &progress_;
  uint64_t used_ = 0, done_ = 0;
  Lane lanes_[2];
  int next_ = 0;
};

// Everything but the RoPE tables.
void walk(const ModelDims &dims, const ModelTensors &tensors, Arena *arena, CudaWeights *out) {
  const DeviceMatrix embedding = arena->matrix(tensors.embedding);
  const DeviceMatrix head =
      tensors.head.data == tensors.embedding.data ? embedding : arena->matrix(tensors.head);
  if (out != nullptr) {
    out->embedding = embedding;
    // The embedding may have more rows than the head: tiles past the head's rows are never asked
    // for.
    out->head.parts = {head};
    out->head.parts[0].rows = dims.vocab_size;
  }
  for (const LayerTensors &layer : tensors.layers) {
    CudaLayer made;
    made.attn_norm = arena->vector_of(layer.attn_norm);
    for (const MatrixView *part : {&layer.q, &layer.k, &layer.v})
      made.qkv.parts.push_back(arena->matrix(*part));
    if (layer.q_bias || layer.k_bias || layer.v_bias) {
      std::vector<float> bias;
      const std::pair<const MatrixView *, int64_t> parts[] = {{&layer.q_bias, layer.q.rows},
                                                              {&layer.k_bias, layer.k.rows},
                                                              {&layer.v_bias, layer.v.rows}};
      for (const auto &[view, rows] : parts) {
        for (int64_t i = 0; i < rows; ++i) bias.push_back(*view ? plain_element(*view, i) : 0.0f);
      }
      made.qkv_bias = arena->vector(bias.data(), bias.size());
    }
    made.q_norm = arena->vector_of(layer.q_norm);
    made.k_norm = arena->vector_of(layer.k_norm);
    made.o.parts.push_back(arena->matrix(layer.o));
    made.o_bias = arena->vector_of(layer.o_bias);
    made.ffn_norm = arena->vector_of(layer.ffn_norm);
    for (const MatrixView *part : {&layer.gate, &layer.up})
      made.gate_up.parts.push_back(arena->matrix(*part));
    made.down.parts.push_back(arena->matrix(layer.down));
    if (out != nullptr) out->layers.push_back(std::move(made));
  }
  const float *norm = arena->vector_of(tensors.output_norm);
  if (out != nullptr) out->output_norm = norm;
}

uint64_t table_size(const ModelDims &dims) {
  return aligned(dims.rope.coarse.size() * sizeof(float)) +
         aligned(dims.rope.fine.size() * sizeof(float));
}

}  // namespace

void CudaWeights::plan(const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
                       uint64_t *weight_bytes, uint64_t *table_bytes) {
  SizeArena size(form);
  walk(dims, tensors, &size, nullptr);
  *weight_bytes = size.total;
  *table_bytes = table_size(dims);
}

bool CudaWeights::is_gate_unfused(const ModelTensors &tensors, WeightForm form) {
  if (form == WeightForm::kDequantized) return true;
  const auto is_row_type = [](const MatrixView &view) {
    return weight_type_of(view.dtype) < 0 || is_plain(weight_type_of(view.dtype));
  };
  return std::any_of(tensors.layers.begin(), tensors.layers.end(), [&](const LayerTensors &layer) {
    return is_row_type(layer.gate) || is_row_type(layer.up);
  });
}

bool CudaWeights::is_gate_unfused() const {
  if (form_ == WeightForm::kDequantized) return true;
  return std::any_of(layers.begin(), layers.end(),
                     [](const CudaLayer &layer) { return layer.gate_up.has_plain_part(); });
}

CudaWeights::CudaWeights(const ModelDims &model, const ModelTensors &tensors, WeightForm form,
                         DeviceAllocator *allocator, cudaStream_t stream,
                         const std::function<void(uint64_t, uint64_t)> &progress)
    : dims(model), form_(form) {
  SizeArena size(form);
  walk(dims, tensors, &size, nullptr);
  arena_ = Buffer(allocator, size.total + table_size(dims));
  const uint64_t tables = (dims.rope.coarse.size() + dims.rope.fine.size()) * sizeof(float);
  UploadArena upload(form, arena_.data<uint8_t>(), allocator, stream, size.upload + tables,
                     progress);
  walk(dims, tensors, &upload, this);
  if (!dims.rope.coarse.empty()) {
    rope_coarse =
        static_cast<Arena &>(upload).vector(dims.rope.coarse.data(), dims.rope.coarse.size());
    rope_fine = static_cast<Arena &>(upload).vector(dims.rope.fine.data(), dims.rope.fine.size());
  }
  check(cudaStreamSynchronize(stream), "upload weights");
}

}  // namespace xllm::cuda
