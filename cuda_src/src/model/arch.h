// What tells one family of models from another, as data. The forward pass is one; a family is a row
// in a table.
#pragma once

#include <string_view>

namespace xllm {

// Whether a family has a kind of tensor.
enum class Presence { kNever, kOptional, kRequired };

struct Arch {
  const char *name;       // general.architecture, and the prefix of the file's keys
  bool is_rope_neighbor;  // the file's Q and K rows are ordered for rotating pairs (2i, 2i + 1);
                          // otherwise halves (i, i + d/2)
  Presence qkv_bias;      // attn_{q,k,v}.bias
  Presence qk_norm;       // attn_{q,k}_norm.weight: RMSNorm over each head before RoPE
};

// The family, or nullptr when this build does not know it.
const Arch *find_arch(std::string_view name);

// "llama, qwen2, qwen3", for refusals.
const char *arch_names();

}  // namespace xllm
