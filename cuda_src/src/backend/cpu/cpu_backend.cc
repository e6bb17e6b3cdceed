#include "backend/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cpu/choose_kernels.h"
#include "backend/cpu/matmul.h"
#include "base/cpu_limits.h"
#include "base/error.h"

namespace xllm::cpu {
namespace {

CpuLimits thread_limits(const BackendOptions &options) {
  if (options.num_threads > 0) return {options.num_threads, "flag"};
  return read_cpu_limits();
}

}  // namespace

CpuBackend::CpuBackend(const BackendOptions &options)
    : allocator_(options.memory_limit),
      pool_(thread_limits(options).num_threads),
      kernels_(&choose_kernels(options.instruction_set)),
      memory_limit_(options.memory_limit) {
  info_.kind = "cpu";
  info_.name = read_cpu_name();
  info_.kernels = kernels_->name;
  info_.num_threads = pool_.num_threads();
  info_.threads_limit = thread_limits(options).decided_by;
}

DeviceMemory CpuBackend::memory() const {
  const MemoryLimits limits = read_memory_limits();
  DeviceMemory memory = {limits.total_bytes, limits.free_bytes};
  if (memory_limit_ != 0) {
    const uint64_t used = allocator_.used_bytes();
    memory.total_bytes = std::min(memory.total_bytes, memory_limit_);
    memory.free_bytes =
        std::min(memory.free_bytes, used < memory_limit_ ? memory_limit_ - used : 0);
  }
  return memory;
}

BackendPlan CpuBackend::plan(const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
                             int max_step_tokens, int max_seqs) const {
  check_tensors(dims, tensors);
  const WeightBytes bytes = plan_weight_bytes(tensors, form, *kernels_);
  BackendPlan plan;
  plan.weight_bytes = bytes.own;
  plan.mapped_bytes = bytes.mapped;
  plan.scratch_bytes =
      CpuWorkspace::plan_bytes(dims, form, pool_.num_threads(), max_step_tokens, max_seqs);
  plan.table_bytes = (dims.rope.coarse.size() + dims.rope.fine.size()) * sizeof(float);
  return plan;
}

std::unique_ptr<WeightSet> CpuBackend::load_weights(
    const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
    const std::function<void(uint64_t, uint64_t)> &progress) {
  check_tensors(dims, tensors);
  return std::make_unique<CpuWeights>(dims, tensors, form, *kernels_, &allocator_, &pool_,
                                      progress);
}

std::unique_ptr<Workspace> CpuBackend::make_workspace(const WeightSet &weights, int /*max_seqs*/) {
  return std::make_unique<CpuWorkspace>(as_cpu(weights).dims(), weights.form(), &allocator_,
                                        pool_.num_threads());
}

void CpuBackend::normalize(CpuWorkspace &ws, const CpuWeights &weights, const Vector &norm,
                           Precision next) {
  const ModelDims &dims = weights.dims();
  Activations &act = ws.hidden_act();
  pool_.parallel_for(ws.num_tokens(), [&](int64_t t, int) {
    const int token = static_cast<int>(t);
    kernels_->rms_norm(ws.x(token), norm.data(), dims.hidden_size, dims.rms_eps, act.f(token));
    if (weights.form() == WeightForm::kRaw) act.quantize(*kernels_, next, token);
  });
  ws.last_act = &act;
}

void CpuBackend::add_product(CpuWorkspace &ws, const CpuWeights &weights, const Matrix &matrix,
                             const Vector &bias, const Activations &act, Precision precision,
                             const Vector &norm, Precision next) {
  const Product product = {&matrix, ws.sum(0), weights.dims().hidden_size};
  multiply(pool_, *kernels_, &product, 1, act, ws.num_tokens(), precision,
           [&](int, int first_row, int num_rows, int first_token, int num_tokens) {
             for (int t = first_token; t < first_token + num_tokens; ++t) {
               float *sum = ws.sum(t) + first_row;
               if (!bias.empty()) kernels_->add(sum, bias.data() + first_row, num_rows);
               kernels_->add(ws.x(t) + first_row, sum, num_rows);
             }
           });
  normalize(ws, weights, norm, next);
}

const float *CpuBackend::host_logits(Workspace &ws) { return as_cpu(ws).logits(0); }

void CpuBackend::copy_blocks(const KvView &kv, Span<const int32_t> src, Span<const int32_t> dst) {
  XLLM_DCHECK(src.size() == dst.size());
  const uint64_t size = kv.layout.block_bytes();
  for (size_t i = 0; i < src.size(); ++i) {
    std::memcpy(kv.base + static_cast<uint64_t>(dst[i]) * size,
                kv.base + static_cast<uint64_t>(src[i]) * size, size);
  }
}

void CpuBackend::read_tap(Workspace &ws_base, Tap tap, std::vector<float> *out) {
  CpuWorkspace &ws = as_cpu(ws_base);
  const auto copy = [&](const float *first, int64_t count) { out->assign(first, first + count); };
  const int64_t tokens = ws.num_tokens();
  switch (tap) {
    case Tap::kResidual:
      return copy(ws.x(0), tokens * (ws.x(1) - ws.x(0)));
    case Tap::kActivations:
      return copy(ws.last_act->f(0), tokens * ws.last_act->cols());
    case Tap::kQuery:
      return copy(ws.q(0), tokens * (ws.q(1) - ws.q(0)));
    case Tap::kLogits:
      return copy(ws.logits(0), ws.num_logits() * (ws.logits(1) - ws.logits(0)));
  }
}

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions &options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace xllm::cpu
