// How an engine is to be set up, and what it will take.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "engine/decode_mode.h"
#include "engine/model_file.h"
#include "model/model_config.h"
#include "model/plan.h"
#include "tokenizer/tokenizer.h"

namespace xllm {

// As xllm_engine_config, without what chooses and sets up the backend.
struct EngineConfig {
  DecodeMode decode_mode = DecodeMode::kBatched;
  KvType kv_type = KvType::kF16;
  int32_t max_slots = 8;
  int32_t max_seq_len = 0;  // 0: the model's context
  bool allow_long_context = false;
  int32_t prefill_chunk = 512;
  int32_t block_size = 64;
  int32_t max_queue = 256;
  uint64_t kv_memory = 0;  // 0: auto
  bool use_prefix_cache = true;
  double max_token_gap_s = 0.2;                  // 0: no bound
  std::function<void(const std::string &)> log;  // may be empty
  // What a step of constrained requests alone, whose rows are computed, waits for their masks at
  // most before it goes on without; others with it make that less.
  double mask_patience_s = 0.005;
  // Called on the loop's thread in every step, between taking in what callers have asked for and
  // ending what is over: where a test makes happen what could happen there. May be empty.
  std::function<void()> on_taken;
};

// What an engine runs: the parts of a ModelFile, or of a model made in memory by a test.
struct EngineModel {
  ModelConfig config;  // context length
  ModelDims dims;
  ModelTensors tensors;
  const Tokenizer *tokenizer = nullptr;    // null: none
  std::shared_ptr<const void> keep_alive;  // what the views and the tokenizer belong to
  // Called when a set of weights is loaded: what was only read to be copied need not stay in
  // memory. May be empty.
  std::function<void()> release_pages;
  // Called before a set is loaded. Throws Error(kModelTruncated) when the file has become shorter
  // since it was opened. May be empty.
  std::function<void()> check_file;
};

// Throws Error(kModelUnsupported) for a file that holds only a vocabulary.
EngineModel make_engine_model(std::shared_ptr<const ModelFile> file);

// Throws Error(kInvalidArgument, detail "field") for the first field out of its range, and returns
// max_seq_len with 0 resolved.
int32_t validate(const EngineConfig &config, const ModelConfig &model);

struct EnginePlan {
  MemoryPlan memory;
  int32_t max_seq_len = 0;
  // Why the backend cannot decode one way, where an AUTO engine could do without; else empty.
  std::string without_per_slot;
};

// Throws what validate and make_plan throw; Error(kUnimplemented) for a mode or KV type that the
// backend lacks. That it does not fit is a result.
EnginePlan plan_engine(const EngineModel &model, const EngineConfig &config,
                       const Backend &backend);

}  // namespace xllm
