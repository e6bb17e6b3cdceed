// The metadata of a model in our names. GGUF's keys are renamed here and nowhere else; a key of the
// architecture that this file does not know is refused by name, because it may change numbers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gguf/gguf.h"
#include "model/arch.h"
#include "model/fact.h"
#include "model/rope.h"

namespace xllm {

// What a flag sets in place of the file. Unset: the file decides.
struct ModelOverrides {
  std::optional<double> rope_freq_base;
  std::optional<int> context_length;
};

struct ModelConfig {
  const Arch *arch = nullptr;
  std::string display_name;  // general.name; empty: none
  int context_length = 0;    // tokens, as trained (scaling included)
  int num_layers = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int declared_vocab_size = 0;  // {arch}.vocab_size; 0: not given. The head's rows decide
  float rms_eps = 0;
  float attention_scale = 0;
  int sliding_window = 0;  // 0: none
  RopeParams rope;         // divisors are a tensor's: weights.h
  std::vector<Fact> facts;
};

// Throws Error(kModelUnsupported) for an architecture, key or value that this build lacks,
// Error(kModelMalformed) for a required key that is missing or out of range. Both name the key.
ModelConfig read_model_config(const GgufFile &file, const ModelOverrides &overrides = {});

// The cap on a sequence: `requested`, or with 0 the model's context. Beyond the context only where
// `allow_beyond_context` says so. Throws Error(kInvalidArgument, field max_seq_len).
int resolve_max_seq_len(const ModelConfig &config, int requested, bool allow_beyond_context);

}  // namespace xllm
