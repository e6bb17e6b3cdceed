// The memory of one step on the CPU. Sized by the step's tokens, and for few rows over long
// contexts by a hundredth of the keys that they attend to; never by max_seq_len.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "backend/cpu/activations.h"

namespace xllm::cpu {

class CpuWorkspace : public Workspace {
 public:
  // For weights of one form: dequantised ones take activations in f32 alone.
  CpuWorkspace(const ModelDims &dims, WeightForm form, Allocator *allocator, int num_threads);

  // Bytes for a step of num_tokens rows with num_logits rows of logits.
  static uint64_t plan_bytes(const ModelDims &dims, WeightForm form, int num_threads,
                             int num_tokens, int num_logits);

  // Makes room for a step; allocates only when it is the largest so far. Contents are lost when it
  // grows.
  void reserve(int num_tokens, int num_logits);

  uint64_t size_bytes() const override;
  int num_tokens() const { return num_tokens_; }
  int num_logits() const { return num_logits_; }

  // Row pointers, all f32.
  float *x(int token) const {
    return x_.data<float>() + int64_t{token} * dims_.hidden_size;
  }  // residual
  float *q(int token) const {
    return q_.data<float>() + int64_t{token} * q_width();
  }  // [num_heads, head_dim]
  float *k(int token) const {
    return k_.data<float>() + int64_t{token} * kv_width();
  }  // [num_kv_heads, head_dim]
  float *v(int token) const { return v_.data<float>() + int64_t{token} * kv_width(); }
  float *cos_sin(int token) const {
    return cos_sin_.data<float>() + int64_t{token} * dims_.rope.rotary_dim;
  }
  float *logits(int row) const { return logits_.data<float>() + int64_t{row} * dims_.vocab_size; }
  float *sum(int token) const {
    return sum_.data<float>() + int64_t{token} * dims_.hidden_size;
  }  // a product to be added to x
  Activations &hidden_act() { return hidden_act_; }  // [hidden] normalised residual
  Activations &attn_act() { return attn_act_; }      // [num_heads * head_dim] attention's output
  Activations &ffn_act() { return ffn_act_; }        // [intermediate] silu(gate) * up
  // [hidden] the rows of hidden_act that want logits, where some want none
  Activations &head_act() { return head_act_; }
  const Activations *last_act = nullptr;  // what the last stage left, for taps

  // Floats that each thread has for itself: attention's key and value tiles and states, or a piece
  // of gate and up.
  float *thread_scratch(int thread) const {
    return scratch_.data<float>() + thread * thread_scratch_floats(dims_);
  }
  static int64_t thread_scratch_floats(const ModelDims &dims);

  // Room for the parts of attention that is spread over threads (attention_plan.h). Grows by
  // doubling with the contexts of the step's rows; contents are lost.
  float *attention_parts(int64_t num_floats);

 private:
  void grow_rows(int num_tokens);
  int q_width() const { return dims_.num_heads * dims_.head_dim; }
  int kv_width() const { return dims_.num_kv_heads * dims_.head_dim; }

  const ModelDims &dims_;  // of the weights, which outlive the workspace
  WeightForm form_;
  Allocator *allocator_;
  Buffer x_, q_, k_, v_, cos_sin_, sum_, logits_, scratch_, parts_;
  Activations hidden_act_, attn_act_, ffn_act_, head_act_;
  int capacity_logits_ = 0;
  int capacity_tokens_ = 0;
  int num_tokens_ = 0;
  int num_logits_ = 0;
};

}  // namespace xllm::cpu
