// Which KV types a model's keys bear. A K bias is added to every key alike, so it says nothing of a
// token, yet it takes up the range that a key's codes are spread over: where it is large, int4 has
// no code left for the rest. Qwen2.5 has such biases in its first and last layers.
#pragma once

#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/fact.h"
#include "tensor/kv.h"

namespace xllm {

// The largest K bias of a model: root mean square over the channels of one KV head.
struct KBias {
  float rms = 0;       // 0: no layer has a K bias
  std::string tensor;  // "blk.0.attn_k.bias"
  int kv_head = 0;
};
KBias largest_k_bias(const ModelDims &dims, const ModelTensors &tensors);

// Above this int4 is refused. Measured on models whose keys have unit spread (docs/perf/kv.md): at
// 2 the divergence that int4 causes is twice that of a model without bias, at 4 up to ten times,
// and from 10 on attention is noise.
constexpr float kMaxInt4KBias = 2;

// Throws Error(kInvalidArgument, field kv_type) that names the tensor, its size and the remedy.
void check_kv_precision(KvType type, const KBias &bias);

// Adds the types that the model takes, where it has a K bias.
void add_kv_types_fact(const KBias &bias, std::vector<Fact> *facts);

}  // namespace xllm
