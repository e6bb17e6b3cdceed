// The C ABI of engines: plan, create, look at.
#include "engine/engine.h"

#include <memory>
#include <string>
#include <utility>

#include "backend/factory.h"
#include "base/error.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "xllm.h"

namespace xllm {
namespace {

struct EngineSetup {
  EngineConfig config;
  BackendKind backend = BackendKind::kAuto;
  BackendOptions backend_options;
};

EngineSetup read_config(const xllm_engine_config *in) {
  const xllm_engine_config c = read_struct(in, xllm_engine_config_init, "xllm_engine_config");
  require_range(enum_number(c.backend), 0, 2, "backend");
  require_range(enum_number(c.decode_mode), 0, 2, "decode_mode");
  require_range(enum_number(c.kv_type), 0, 2, "kv_type");
  require_range(c.num_threads, 0, 4096, "num_threads");
  require_range(c.device_index, 0, 1023, "device_index");
  EngineSetup out;
  out.config.decode_mode = static_cast<DecodeMode>(c.decode_mode);
  out.config.kv_type = static_cast<KvType>(c.kv_type);
  out.config.max_slots = c.max_slots;
  out.config.max_seq_len = c.max_seq_len;
  out.config.allow_long_context = c.allow_long_context != 0;
  out.config.prefill_chunk = c.prefill_chunk;
  out.config.block_size = c.block_size;
  out.config.max_queue = c.max_queue;
  out.config.kv_memory = c.kv_memory;
  out.config.max_token_gap_s = c.max_token_gap_s;
  if (c.log != nullptr) {
    out.config.log = [log = c.log, user = c.log_user](const std::string &line) {
      log(user, line.c_str());
    };
  }
  out.backend = static_cast<BackendKind>(c.backend);
  out.backend_options.num_threads = c.num_threads;
  out.backend_options.instruction_set = c.instruction_set != nullptr ? c.instruction_set : "";
  out.backend_options.device_index = c.device_index;
  out.backend_options.memory_limit = c.memory_limit;
  out.backend_options.log = out.config.log;
  return out;
}

xllm_plan to_c(const MemoryPlan &plan) {
  xllm_plan out{};
  if (const auto *raw = plan.find(WeightForm::kRaw)) {
    out.raw_weight_bytes = raw->weight_bytes;
  }
  if (const auto *dequantized = plan.find(WeightForm::kDequantized)) {
    out.dequantized_weight_bytes = dequantized->weight_bytes;
  }
  if (!plan.sets.empty()) {
    const WeightSetPlan &first = plan.sets.front();  // the set that the mode begins with
    out.mapped_bytes = first.mapped_bytes;
    out.kv_bytes_per_token = first.kv_bytes_per_token;
    out.kv_pool_bytes = first.pool_bytes;
    out.kv_num_blocks = static_cast<uint64_t>(first.num_blocks);
    out.scratch_bytes = first.scratch_bytes;
    out.table_bytes = first.table_bytes;
    out.block_size = first.kv_layout.block_size;
  }
  out.total_bytes = plan.bytes_needed;
  out.device_total_bytes = plan.total_bytes;
  out.device_free_bytes = plan.bytes_free;
  out.fits = plan.fits ? 1 : 0;
  return out;
}

}  // namespace
}  // namespace xllm

using xllm::Backend;
using xllm::Engine;
using xllm::EngineConfig;
using xllm::EngineInfo;
using xllm::EngineModel;
using xllm::EngineSetup;
using xllm::EngineStats;
using xllm::guarded;
using xllm::make_backend;
using xllm::make_engine_model;
using xllm::plan_engine;
using xllm::read_config;
using xllm::require;
using xllm::to_c;
using xllm::validate;

extern "C" {

void xllm_engine_config_init(xllm_engine_config *config) {
  if (config == nullptr) return;
  const EngineConfig defaults;
  *config = xllm_engine_config{};
  config->struct_size = sizeof *config;
  config->backend = XLLM_BACKEND_AUTO;
  config->decode_mode = static_cast<xllm_decode_mode>(defaults.decode_mode);
  config->kv_type = static_cast<xllm_kv_type>(defaults.kv_type);
  config->max_slots = defaults.max_slots;
  config->prefill_chunk = defaults.prefill_chunk;
  config->block_size = defaults.block_size;
  config->max_queue = defaults.max_queue;
  config->max_token_gap_s = defaults.max_token_gap_s;
}

xllm_status xllm_model_plan(const xllm_model *model, const xllm_engine_config *config,
                            xllm_plan *out_plan, xllm_error *err) {
  return guarded(err, [&] {
    require(model, "model");
    require(out_plan, "out_plan");
    const EngineSetup setup = read_config(config);
    const EngineModel engine_model = make_engine_model(model->file);
    const std::unique_ptr<Backend> backend = make_backend(setup.backend, setup.backend_options);
    *out_plan = to_c(plan_engine(engine_model, setup.config, *backend).memory);
  });
}

xllm_status xllm_engine_create(xllm_model *model, const xllm_engine_config *config,
                               xllm_engine **out_engine, xllm_error *err) {
  return guarded(err, [&] {
    require(model, "model");
    require(out_engine, "out_engine");
    const EngineSetup setup = read_config(config);
    EngineModel engine_model = make_engine_model(model->file);
    validate(setup.config, engine_model.config);
    auto engine = std::make_unique<xllm_engine>();
    engine->engine = std::make_unique<Engine>(std::move(engine_model), setup.config,
                                              make_backend(setup.backend, setup.backend_options));
    *out_engine = engine.release();
  });
}

void xllm_engine_destroy(xllm_engine *engine) { delete engine; }

void xllm_engine_get_info(const xllm_engine *engine, xllm_engine_info *out) {
  if (engine == nullptr || out == nullptr) return;
  const EngineInfo &info = engine->engine->info();
  *out = xllm_engine_info{};
  out->device_kind = info.device.kind.c_str();
  out->device_name = info.device.name.c_str();
  out->kernels = info.device.kernels.c_str();
  out->num_threads = info.device.num_threads;
  out->threads_limit = info.device.threads_limit.c_str();
  out->decode_mode = static_cast<xllm_decode_mode>(info.decode_mode);
  out->kv_type = static_cast<xllm_kv_type>(info.kv_type);
  out->max_slots = info.max_slots;
  out->max_seq_len = info.max_seq_len;
  out->prefill_chunk = info.prefill_chunk;
  out->block_size = info.block_size;
  out->max_queue = info.max_queue;
  out->plan = to_c(info.plan);
  out->load_s = info.load_s;
}

void xllm_engine_drain(xllm_engine *engine) {
  if (engine != nullptr) engine->engine->drain();
}

void xllm_engine_get_stats(const xllm_engine *engine, xllm_engine_stats *out) {
  if (engine == nullptr || out == nullptr) return;
  const EngineStats stats = engine->engine->stats();
  *out = xllm_engine_stats{};
  out->num_running = stats.num_running;
  out->num_waiting = stats.num_waiting;
  out->slots_total = stats.slots_total;
  out->slots_used = stats.slots_used;
  out->blocks_total = stats.blocks_total;
  out->blocks_used = stats.blocks_used;
  out->blocks_cached = stats.blocks_cached;
  out->num_steps = stats.num_steps;
  out->num_prompt_tokens = stats.num_prompt_tokens;
  out->num_cached_tokens = stats.num_cached_tokens;
  out->num_generated_tokens = stats.num_generated_tokens;
  out->num_requests_finished = stats.num_requests_finished;
  out->num_requests_cancelled = stats.num_requests_cancelled;
  out->num_requests_failed = stats.num_requests_failed;
  out->num_preemptions = stats.num_preemptions;
  out->last_step_s = stats.last_step_s;
  out->heartbeat_age_s = stats.heartbeat_age_s;
  out->cancel_steps_max = stats.cancel_steps_max;
  out->workspace_bytes = stats.workspace_bytes;
  out->is_draining = stats.is_draining ? 1 : 0;
  out->has_failed = stats.has_failed ? 1 : 0;
  out->token_gap_bound_s = stats.token_gap_bound_s;
  out->token_gap_max_s = stats.token_gap_max_s;
  out->prefill_tokens_per_s = stats.prefill_tokens_per_s;
}

}  // extern "C"
