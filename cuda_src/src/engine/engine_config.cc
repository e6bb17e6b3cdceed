#include "engine/engine_config.h"

#include <utility>

#include "base/error.h"
#include "tokenizer/tokenizer.h"

namespace xllm {
namespace {

void check_range(const char *field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return;
  throw Error(Status::kInvalidArgument,
              std::string(field) + ": expected " + std::to_string(min) + " to " +
                  std::to_string(max) + ", found " + std::to_string(value),
              {{"field", field}});
}

}  // namespace

EngineModel make_engine_model(std::shared_ptr<const ModelFile> file) {
  const Model *model = file->model();
  if (model == nullptr) {
    throw Error(
        Status::kModelUnsupported,
        file_name(file->path()) +
            ": expected a model, found only a vocabulary; it can be used for its tokenizer");
  }
  EngineModel out;
  out.config = model->config();
  out.dims = model->dims();
  out.tensors = model->tensors();
  out.tokenizer = &file->tokenizer();
  const GgufFile *pages = &file->file();
  out.check_file = [pages] {
    for (uint32_t i = 0; i < pages->num_shards(); ++i) {
      if (pages->shard(i).is_whole()) continue;
      throw Error(Status::kModelTruncated,
                  pages->shard(i).name() + ": expected " + std::to_string(pages->shard(i).size()) +
                      " bytes as when it was opened, found fewer; put the whole file back in "
                      "place and open it again");
    }
  };
  out.release_pages = [pages] {
    for (uint32_t i = 0; i < pages->num_shards(); ++i) pages->shard(i).release_pages();
  };
  out.keep_alive = std::move(file);
  return out;
}

int32_t validate(const EngineConfig &config, const ModelConfig &model) {
  check_range("decode_mode", static_cast<int>(config.decode_mode), 0, 2);
  check_range("kv_type", static_cast<int>(config.kv_type), 0, 2);
  check_range("max_slots", config.max_slots, 1, 1024);
  check_range("prefill_chunk", config.prefill_chunk, 1, 8192);
  check_range("max_queue", config.max_queue, 0, 1 << 20);
  if (!(config.max_token_gap_s >= 0 && config.max_token_gap_s <= 3600)) {
    throw Error(
        Status::kInvalidArgument,
        "max_token_gap_s: expected 0 to 3600, found " + std::to_string(config.max_token_gap_s),
        {{"field", "max_token_gap_s"}});
  }
  const int32_t size = config.block_size;
  if (size != 16 && size != 32 && size != 64 && size != 128) {
    throw Error(Status::kInvalidArgument,
                "block_size: expected 16, 32, 64 or 128, found " + std::to_string(size),
                {{"field", "block_size"}});
  }
  const int32_t max_seq_len =
      resolve_max_seq_len(model, config.max_seq_len, config.allow_long_context);
  // One token of prompt and one of answer.
  check_range("max_seq_len", max_seq_len, 2, int64_t{1} << 30);
  return max_seq_len;
}

EnginePlan plan_engine(const EngineModel &model, const EngineConfig &config,
                       const Backend &backend) {
  EnginePlan out;
  out.max_seq_len = validate(config, model.config);
  PlanOptions options;
  options.raw_at_creation = config.decode_mode != DecodeMode::kPerSlot;
  options.dequantized_at_creation = config.decode_mode == DecodeMode::kPerSlot;
  options.dequantized_later = config.decode_mode == DecodeMode::kAuto;
  options.kv_type = config.kv_type;
  options.kv_memory = config.kv_memory;
  options.block_size = config.block_size;
  options.max_slots = config.max_slots;
  options.max_seq_len = out.max_seq_len;
  options.prefill_chunk_tokens = config.prefill_chunk;
  if (model.tokenizer != nullptr) options.vocabulary_bytes = model.tokenizer->memory_bytes();
  const auto plan = [&] {
    MemoryPlan memory = make_plan(backend, model.dims, model.tensors, options);
    for (const WeightSetPlan &set : memory.sets) backend.check_kv({set.kv_layout});
    return memory;
  };
  try {
    out.memory = plan();
  } catch (const Error &error) {
    if (error.status() != Status::kUnimplemented || !options.dequantized_later) throw;
    // An AUTO engine does without the per-slot way and refuses it when asked. Where it is the
    // batched way that is lacking, this throws again.
    out.without_per_slot = error.message();
    options.dequantized_later = false;
    out.memory = plan();
  }
  return out;
}

}  // namespace xllm
