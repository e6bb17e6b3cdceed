#include <algorithm>
#include <string>

#include "backend/cuda/act_rows.h"
#include "backend/cuda/attention_splits.cuh"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/kv_pages.cuh"
#include "base/error.h"

namespace xllm::cuda {
namespace {

constexpr int kMaxGraphRows = 64;

// Rows of the graph that runs a decode step of `n` sequences.
int graph_rows(int n) {
  if (n <= 2) return n;
  if (n <= 4) return 4;
  return (n + 7) / 8 * 8;
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "ask for a device attribute");
  return value;
}

}  // namespace

CudaBackend::CudaBackend(const BackendOptions &options) : log_(options.log) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "count devices");
  if (options.device_index < 0 || options.device_index >= count) {
    throw Error(Status::kDevice, "CUDA: device " + std::to_string(options.device_index) +
                                     " asked for, found " + std::to_string(count));
  }
  const int index = options.device_index;
  check(cudaSetDevice(index), "select the device");
  device_.index = index;
  device_.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                               attribute(cudaDevAttrComputeCapabilityMinor, index);
  device_.num_sms = attribute(cudaDevAttrMultiProcessorCount, index);
  device_.max_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  device_.shared_bytes_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
  device_.registers_per_sm = attribute(cudaDevAttrMaxRegistersPerMultiprocessor, index);
  cudaFuncAttributes compiled = {};
  const cudaError_t found = kernel_attributes(&compiled);
  if (found != cudaSuccess) {
    (void)cudaGetLastError();
    throw Error(Status::kDevice, "CUDA: this library was not compiled for compute capability " +
                                     std::to_string(device_.compute_capability / 10) + "." +
                                     std::to_string(device_.compute_capability % 10) + " (" +
                                     cudaGetErrorString(found) +
                                     "); build it with that target in XLLM_CUDA_ARCHITECTURES");
  }
  // What the code was compiled for decides, not the chip: PTX of an older target lacks the newer
  // instructions.
  const int code_version =
      compiled.binaryVersion < compiled.ptxVersion ? compiled.binaryVersion : compiled.ptxVersion;
  device_.has_int8_mma = code_version >= 80;
  device_.has_dependent_launch = code_version >= 90 && device_.compute_capability >= 90;
  device_.has_clusters = device_.has_dependent_launch;
  cudaDeviceProp properties = {};
  check(cudaGetDeviceProperties(&properties, index), "ask for the device's name");
  device_.memory_bytes = properties.totalGlobalMem;
  info_.kind = "cuda";
  info_.name = properties.name;
  info_.kernels = "sm_" + std::to_string(device_.compute_capability);
  info_.samples_on_device = true;
  allocator_ = std::make_unique<DeviceAllocator>(index, options.memory_limit);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream");
  prepare_matmul(&device_);
  prepare_rows(device_);
  prepare_attention(device_);
  prepare_qkv();
}

CudaBackend::~CudaBackend() {
  if (stream_ == nullptr) return;
  (void)cudaSetDevice(device_.index);
  (void)cudaStreamSynchronize(stream_);
  (void)cudaStreamDestroy(stream_);
}

DeviceMemory CudaBackend::memory() const {
  return {allocator_->total_bytes(), allocator_->free_bytes()};
}

void CudaBackend::synchronize() { check(cudaStreamSynchronize(stream_), "finish the queued work"); }

// ---- weights and memory ----

namespace {

void check_limits(const ModelDims &dims) {
  if (dims.hidden_size > kMaxNormCols) {
    throw Error(Status::kUnimplemented, "CUDA: hidden_size up to " + std::to_string(kMaxNormCols) +
                                            " is supported, found " +
                                            std::to_string(dims.hidden_size) +
                                            "; use the CPU backend");
  }
  if (dims.head_dim > kMaxHeadDim) {
    throw Error(Status::kUnimplemented,
                "CUDA: head_dim up to " + std::to_string(kMaxHeadDim) + " is supported, found " +
                    std::to_string(dims.head_dim) + "; use the CPU backend");
  }
}

}  // namespace

BackendPlan CudaBackend::plan(const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
                              int max_step_tokens, int max_seqs) const {
  check_tensors(dims, tensors);
  check_limits(dims);
  if (form == WeightForm::kDequantized) (void)cublas();
  BackendPlan plan;
  CudaWeights::plan(dims, tensors, form, &plan.weight_bytes, &plan.table_bytes);
  // The upload's buffers are gone before the workspace comes.
  const bool is_gate_unfused = CudaWeights::is_gate_unfused(tensors, form);
  plan.scratch_bytes =
      std::max(CudaWorkspace::plan_bytes(device_, dims, form, is_gate_unfused,
                                         std::max(max_step_tokens, max_seqs), max_seqs),
               CudaWeights::kUploadBytes);
  return plan;
}

std::shared_ptr<const CublasLibrary> CudaBackend::cublas() const {
  if (cublas_ == nullptr) cublas_ = CublasLibrary::open();
  return cublas_;
}

std::unique_ptr<WeightSet> CudaBackend::load_weights(
    const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
    const std::function<void(uint64_t, uint64_t)> &progress) {
  check_tensors(dims, tensors);
  check_limits(dims);
  if (form == WeightForm::kDequantized) (void)cublas();
  check(cudaSetDevice(device_.index), "select the device");
  return std::make_unique<CudaWeights>(dims, tensors, form, allocator_.get(), stream_, progress);
}

std::unique_ptr<Workspace> CudaBackend::make_workspace(const WeightSet &weights, int max_seqs) {
  check(cudaSetDevice(device_.index), "select the device");
  return std::make_unique<CudaWorkspace>(device_, as_cuda(weights), allocator_.get(), stream_,
                                         max_seqs, is_f32(as_cuda(weights)) ? cublas() : nullptr);
}

void CudaBackend::reserve(Workspace &ws_base, int max_step_tokens) {
  CudaWorkspace &ws = as_cuda(ws_base);
  check(cudaSetDevice(device_.index), "select the device");
  ws.reserve_all(std::max({max_step_tokens, ws.max_seqs, 1}));
}

void CudaBackend::copy_blocks(const KvView &kv, Span<const int32_t> src, Span<const int32_t> dst) {
  XLLM_DCHECK(src.size() == dst.size());
  check(cudaSetDevice(device_.index), "select the device");
  const uint64_t bytes = kv.layout.block_bytes();
  for (size_t i = 0; i < src.size(); ++i) {
    check(cudaMemcpyAsync(kv.base + static_cast<uint64_t>(dst[i]) * bytes,
                          kv.base + static_cast<uint64_t>(src[i]) * bytes, bytes,
                          cudaMemcpyDeviceToDevice, stream_),
          "copy KV blocks");
  }
}

// ---- one step ----

void CudaBackend::begin_step(CudaWorkspace &ws, const ForwardBatch &batch, int padded_rows) {
  check(cudaSetDevice(device_.index), "select the device");
  const bool is_padded = padded_rows > batch.num_tokens();
  const int num_logits = is_padded ? padded_rows : batch.num_logits();
  ws.reserve(padded_rows, num_logits, static_cast<int64_t>(batch.block_tables.size()));
  ws.num_rows = padded_rows;
  ws.num_logits = num_logits;
  ws.is_identity = is_padded || batch.num_logits() == batch.num_tokens();
  ws.is_decode = batch.num_tokens() == batch.num_seqs() &&
                 batch.num_tokens() == batch.num_logits() && batch.num_tokens() <= kMaxGraphRows;
  const ModelDims &dims = ws.weights->dims;
  const int tile_rows = prompt_tile_rows(dims.num_heads / dims.num_kv_heads);
  // note: a window begins at other keys in every row.
  if (ws.is_decode || tile_rows < 2 || dims.sliding_window > 0) {
    ws.prompt.set_plain(padded_rows);
  } else {
    ws.prompt.set(batch, tile_rows);
  }
  ws.upload(batch, padded_rows);
  int splits = 1;
  for (const int32_t position : batch.positions)
    splits = std::max(splits, num_splits(position + 1));
  ws.max_splits = 1;
  while (ws.max_splits < splits) ws.max_splits *= 2;
}

void CudaBackend::run_step(Workspace &ws_base, const ForwardBatch &batch,
                           const std::function<void()> &stages) {
  CudaWorkspace &ws = as_cuda(ws_base);
  struct InStep {
    bool *flag;
    ~InStep() { *flag = false; }
  } const guard{&in_step_};
  in_step_ = true;
  const int n = batch.num_tokens();
  const bool is_decode = n == batch.num_seqs() && n == batch.num_logits() && n <= kMaxGraphRows &&
                         !is_f32(*ws.weights);
  begin_step(ws, batch, is_decode ? graph_rows(n) : n);
  if (!is_decode || !uses_graphs_) {
    stages();
    return;
  }
  ws.signature.clear();
  ws.is_recording = true;
  stages();
  ws.is_recording = false;
  CudaWorkspace::Graph &graph = ws.graphs[{ws.num_rows, ws.max_splits}];
  if (graph.exec == nullptr || graph.signature != ws.signature) {
    // The first step of a kind runs as it is, so that nothing is loaded or allocated while a graph
    // is captured.
    if (graph.num_uses++ == 0) {
      stages();
      return;
    }
    capture(ws, &graph, stages);
    if (graph.exec == nullptr) {
      stages();
      return;
    }
  }
  check(cudaGraphLaunch(graph.exec, stream_), "launch the step's graph");
}

void CudaBackend::capture(CudaWorkspace &ws, CudaWorkspace::Graph *graph,
                          const std::function<void()> &stages) {
  if (graph->exec != nullptr) {
    (void)cudaGraphExecDestroy(graph->exec);
    graph->exec = nullptr;
  }
  cudaGraph_t captured = nullptr;
  try {
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "begin a graph");
    try {
      stages();
    } catch (...) {
      (void)cudaStreamEndCapture(stream_, &captured);
      if (captured != nullptr) (void)cudaGraphDestroy(captured);
      throw;
    }
    check(cudaStreamEndCapture(stream_, &captured), "end a graph");
    const cudaError_t made = cudaGraphInstantiate(&graph->exec, captured, 0);
    (void)cudaGraphDestroy(captured);
    check(made, "make a graph");
    graph->signature = ws.signature;
  } catch (const Error &error) {
    (void)cudaGetLastError();
    graph->exec = nullptr;
    uses_graphs_ = false;
    if (log_) log_("CUDA: steps run without graphs: " + error.message());
  }
}

// ---- products ----

ActRows CudaBackend::hidden_rows(const CudaWorkspace &ws, const float *norm_weight) {
  const ModelDims &dims = ws.weights->dims;
  return {ws.x.data<float>(), dims.hidden_size, dims.hidden_size, norm_weight, dims.rms_eps};
}

Product CudaBackend::product_of(CudaWorkspace &ws, const FusedMatrix &matrix, int num_tokens) {
  Product product = {};
  product.matrix = &matrix;
  product.num_tokens = num_tokens;
  product.partials = ws.partials.data<float>();
  if (!ws.is_quantized && takes_rows(device_, matrix, num_tokens)) {
    product.rows = ws.input;
    return product;
  }
  if (!ws.is_quantized) quantize_rows(launch(), ws.input, num_tokens, ws.next_act());
  ws.is_quantized = true;
  product.act = ws.next_act();
  return product;
}

void CudaBackend::add_product(CudaWorkspace &ws, const FusedMatrix &matrix, const float *bias,
                              const float *norm_weight) {
  Product product = product_of(ws, matrix, ws.num_rows);
  product.out = ws.x.data<float>();
  product.out_stride = ws.weights->dims.hidden_size;
  product.bias = bias;
  product.finish = Finish::kAdd;
  Partials left;
  matmul(launch(), product, &left);
  ws.set_input(hidden_rows(ws, norm_weight));
  if (left.data == nullptr) return;
  add_and_quantize_rows(launch(), left, bias, product.out, ws.input, ws.num_rows, ws.next_act());
  ws.is_quantized = true;
}

// ---- reading back ----

bool CudaBackend::is_computing() {
  check(cudaSetDevice(device_.index), "select the device");
  const cudaError_t state = cudaStreamQuery(stream_);
  if (state == cudaErrorNotReady) {
    (void)cudaGetLastError();  // it counts as one for the next launch
    return true;
  }
  check(state, "look whether the device is at work");
  return false;
}

const float *CudaBackend::host_logits(Workspace &ws_base) {
  CudaWorkspace &ws = as_cuda(ws_base);
  check(cudaSetDevice(device_.index), "select the device");
  const uint64_t bytes = static_cast<uint64_t>(ws.num_logits) *
                         static_cast<uint64_t>(ws.weights->dims.vocab_size) * sizeof(float);
  if (ws.host_logits.size_bytes() < bytes) ws.host_logits = PinnedBuffer(bytes);
  check(cudaMemcpyAsync(ws.host_logits.data<float>(), ws.logits.data(), bytes,
                        cudaMemcpyDeviceToHost, stream_),
        "read logits");
  synchronize();
  return ws.host_logits.data<float>();
}

void CudaBackend::read_tap(Workspace &ws_base, Tap tap, std::vector<float> *out) {
  CudaWorkspace &ws = as_cuda(ws_base);
  check(cudaSetDevice(device_.index), "select the device");
  const ModelDims &dims = ws.weights->dims;
  const auto rows = static_cast<size_t>(ws.num_rows);
  const auto copy = [&](const void *from, size_t bytes, void *to) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "read a tap");
    synchronize();
  };
  const bool is_plain_form = is_f32(*ws.weights);
  if (tap == Tap::kLogits) {
    const float *logits = host_logits(ws_base);
    out->assign(logits,
                logits + static_cast<size_t>(ws.num_logits) * static_cast<size_t>(dims.vocab_size));
  } else if (tap == Tap::kResidual) {
    out->resize(rows * static_cast<size_t>(dims.hidden_size));
    copy(ws.x.data(), out->size() * sizeof(float), out->data());
  } else if (is_plain_form) {
    const F32Scratch::Rows q = {ws.f32.q.data<float>(), dims.num_heads * dims.head_dim};
    const F32Scratch::Rows &from = tap == Tap::kQuery ? q : ws.f32.last_act;
    out->resize(rows * static_cast<size_t>(from.num_cols));
    copy(from.data, out->size() * sizeof(float), out->data());
  } else if (tap == Tap::kQuery) {
    std::vector<__half> half(rows * static_cast<size_t>(dims.num_heads) *
                             static_cast<size_t>(dims.head_dim));
    copy(ws.q.data(), half.size() * sizeof(__half), half.data());
    out->resize(half.size());
    for (size_t i = 0; i < half.size(); ++i) (*out)[i] = __half2float(half[i]);
  } else {
    // Quantised here where the product to come does it itself: the same numbers.
    if (ws.input.x == nullptr) return out->clear();
    const auto cols = static_cast<size_t>(ws.input.num_cols);
    Buffer expanded(allocator_.get(), rows * cols * sizeof(float));
    if (!ws.is_quantized) quantize_rows(launch(), ws.input, ws.num_rows, ws.next_act());
    expand_acts(launch(), ws.next_act(), ws.num_rows, ws.input.num_cols, expanded.data<float>());
    out->resize(rows * cols);
    copy(expanded.data(), out->size() * sizeof(float), out->data());
  }
}

}  // namespace xllm::cuda
