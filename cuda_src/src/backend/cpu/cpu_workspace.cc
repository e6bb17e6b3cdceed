#include "backend/cpu/cpu_workspace.h"

#include <algorithm>

#include "backend/cpu/attention_plan.h"
#include "backend/cpu/matmul.h"

namespace xllm::cpu {
namespace {

uint64_t floats(int64_t count) { return static_cast<uint64_t>(count) * sizeof(float); }

void grow(Buffer *buffer, Allocator *allocator, uint64_t size_bytes) {
  if (buffer->size_bytes() >= size_bytes) return;
  *buffer = Buffer();  // the old one goes first: the two need not fit together
  *buffer = Buffer(allocator, size_bytes);
}

// Bytes per token row outside the activations.
uint64_t row_bytes(const ModelDims &dims) {
  return floats(int64_t{2} * dims.hidden_size + int64_t{dims.num_heads} * dims.head_dim +
                int64_t{2} * dims.num_kv_heads * dims.head_dim + dims.rope.rotary_dim);
}

}  // namespace

int64_t CpuWorkspace::thread_scratch_floats(const ModelDims &dims) {
  return std::max<int64_t>(attention_scratch_floats(dims), kFfnScratchFloats);
}

CpuWorkspace::CpuWorkspace(const ModelDims &dims, WeightForm form, Allocator *allocator,
                           int num_threads)
    : dims_(dims),
      form_(form),
      allocator_(allocator),
      scratch_(allocator, floats(thread_scratch_floats(dims) * num_threads)) {}

uint64_t CpuWorkspace::plan_bytes(const ModelDims &dims, WeightForm form, int num_threads,
                                  int num_tokens, int num_logits) {
  return row_bytes(dims) * static_cast<uint64_t>(num_tokens) +
         Activations::plan_bytes(form, num_tokens, dims.hidden_size) +
         Activations::plan_bytes(form, num_tokens, dims.num_heads * dims.head_dim) +
         Activations::plan_bytes(form, num_tokens, dims.intermediate_size) +
         Activations::plan_bytes(form, num_logits, dims.hidden_size) +
         floats(int64_t{num_logits} * dims.vocab_size) +
         floats(thread_scratch_floats(dims) * num_threads);
}

void CpuWorkspace::reserve(int num_tokens, int num_logits) {
  num_tokens_ = num_tokens;
  num_logits_ = num_logits;
  grow(&logits_, allocator_, floats(int64_t{num_logits} * dims_.vocab_size));
  if (num_logits > capacity_logits_) {
    capacity_logits_ = 0;
    head_act_.reserve(allocator_, form_, num_logits, dims_.hidden_size);
    capacity_logits_ = num_logits;
  }
  head_act_.begin_step(num_logits);
  if (num_tokens > capacity_tokens_) grow_rows(num_tokens);
  for (Activations *act : {&hidden_act_, &attn_act_, &ffn_act_}) act->begin_step(num_tokens);
}

void CpuWorkspace::grow_rows(int num_tokens) {
  capacity_tokens_ = 0;
  const int64_t rows = num_tokens;
  grow(&x_, allocator_, floats(rows * dims_.hidden_size));
  grow(&sum_, allocator_, floats(rows * dims_.hidden_size));
  grow(&q_, allocator_, floats(rows * q_width()));
  grow(&k_, allocator_, floats(rows * kv_width()));
  grow(&v_, allocator_, floats(rows * kv_width()));
  grow(&cos_sin_, allocator_, floats(rows * dims_.rope.rotary_dim));
  hidden_act_.reserve(allocator_, form_, num_tokens, dims_.hidden_size);
  attn_act_.reserve(allocator_, form_, num_tokens, q_width());
  ffn_act_.reserve(allocator_, form_, num_tokens, dims_.intermediate_size);
  capacity_tokens_ = num_tokens;
}

float *CpuWorkspace::attention_parts(int64_t num_floats) {
  if (parts_.size_bytes() < floats(num_floats)) {
    grow(&parts_, allocator_, std::max(floats(num_floats), 2 * parts_.size_bytes()));
  }
  return parts_.data<float>();
}

uint64_t CpuWorkspace::size_bytes() const {
  uint64_t total = hidden_act_.size_bytes() + attn_act_.size_bytes() + ffn_act_.size_bytes() +
                   head_act_.size_bytes();
  for (const Buffer *buffer : {&x_, &q_, &k_, &v_, &cos_sin_, &sum_, &logits_, &scratch_, &parts_})
    total += buffer->size_bytes();
  return total;
}

}  // namespace xllm::cpu
