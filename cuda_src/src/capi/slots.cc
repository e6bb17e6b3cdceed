// The C ABI of slots.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/read_request.h"
#include "engine/engine.h"
#include "xllm.h"

namespace xllm {
namespace {

constexpr double kDefaultLeaseS = 60;

SlotRef to_ref(xllm_slot_ref ref) { return {ref.slot, ref.epoch}; }

xllm_slot_info to_c(const SlotSnapshot &slot) {
  xllm_slot_info out{};
  out.slot = slot.index;
  out.epoch = slot.epoch;
  out.state = static_cast<xllm_slot_state>(slot.state);
  out.decode_mode = static_cast<xllm_decode_mode>(slot.decode_mode);
  out.request_id = slot.request_id;
  out.num_tokens = static_cast<uint32_t>(slot.num_tokens);
  out.num_blocks = static_cast<uint32_t>(slot.num_blocks);
  out.is_acquired = slot.is_acquired ? 1 : 0;
  out.lease_left_s = slot.lease_left_s;
  out.owned_s = slot.owned_s;
  return out;
}

RequestOptions read_prefill(const xllm_prefill_options *in, int max_seq_len) {
  require(in, "options");
  const xllm_prefill_options o = read_struct(in, xllm_prefill_options_init, "xllm_prefill_options");
  require_array(o.prompt, o.num_prompt, "prompt");
  require_range(enum_number(o.delivery), 0, 1, "delivery");
  // Before anything is copied: a count that is out of range may have no memory behind it.
  check_prompt_length(o.num_prompt, max_seq_len);
  RequestOptions out;
  if (o.num_prompt > 0) out.prompt.assign(o.prompt, o.prompt + o.num_prompt);
  out.delivery = static_cast<Delivery>(o.delivery);
  out.max_duration_s = o.max_duration_s;
  read_cache(o.cache, &out);
  return out;
}

void check_num_slots(size_t num_slots, const Engine &engine) {
  const auto limit = static_cast<size_t>(engine.info().max_slots);
  if (num_slots >= 1 && num_slots <= limit) return;
  refuse("slots",
         "expected 1 to " + std::to_string(limit) + " slots, found " + std::to_string(num_slots));
}

void copy_logits(const SlotStep &step, float *out) {
  if (out == nullptr || step.logits.empty()) return;
  std::memcpy(out, step.logits.data(), step.logits.size() * sizeof(float));
}

}  // namespace
}  // namespace xllm

using xllm::check_num_slots;
using xllm::copy_logits;
using xllm::DecodeMode;
using xllm::Engine;
using xllm::enum_number;
using xllm::Error;
using xllm::guarded;
using xllm::kDefaultLeaseS;
using xllm::read_prefill;
using xllm::read_request;
using xllm::read_sampling;
using xllm::read_struct;
using xllm::RequestOptions;
using xllm::require;
using xllm::require_range;
using xllm::SamplingParams;
using xllm::SlotRef;
using xllm::SlotSnapshot;
using xllm::SlotStep;
using xllm::Status;
using xllm::to_c;
using xllm::to_ref;

extern "C" {

int xllm_engine_get_slot(const xllm_engine *engine, int32_t slot, xllm_slot_info *out) {
  if (engine == nullptr || out == nullptr) return 0;
  int is_found = 0;
  guarded(nullptr, [&] {
    SlotSnapshot found;
    if (!engine->engine->get_slot(slot, &found)) return;
    *out = to_c(found);
    is_found = 1;
  });
  return is_found;
}

void xllm_acquire_options_init(xllm_acquire_options *options) {
  if (options == nullptr) return;
  *options = xllm_acquire_options{};
  options->struct_size = sizeof *options;
  options->decode_mode = XLLM_DECODE_MODE_AUTO;
  options->slot = -1;
  options->lease_s = kDefaultLeaseS;
}

xllm_status xllm_engine_acquire(xllm_engine *engine, const xllm_acquire_options *options,
                                xllm_slot_info *out_info, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(out_info, "out_info");
    const xllm_acquire_options o =
        read_struct(options, xllm_acquire_options_init, "xllm_acquire_options");
    require_range(enum_number(o.decode_mode), 0, 2, "decode_mode");
    *out_info =
        to_c(engine->engine->acquire(static_cast<DecodeMode>(o.decode_mode), o.slot, o.lease_s));
  });
}

xllm_status xllm_engine_renew(xllm_engine *engine, xllm_slot_ref ref, double lease_s,
                              xllm_slot_info *out_info, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    const SlotSnapshot slot = engine->engine->renew(to_ref(ref), lease_s);
    if (out_info != nullptr) *out_info = to_c(slot);
  });
}

xllm_status xllm_engine_release(xllm_engine *engine, xllm_slot_ref ref, xllm_slot_info *out_info,
                                xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    const SlotSnapshot slot = engine->engine->release(to_ref(ref));
    if (out_info != nullptr) *out_info = to_c(slot);
  });
}

xllm_status xllm_engine_fork(xllm_engine *engine, xllm_slot_ref ref, double lease_s,
                             xllm_slot_info *out_info, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(out_info, "out_info");
    *out_info = to_c(engine->engine->fork(to_ref(ref), lease_s));
  });
}

void xllm_prefill_options_init(xllm_prefill_options *options) {
  if (options == nullptr) return;
  *options = xllm_prefill_options{};
  options->struct_size = sizeof *options;
}

xllm_status xllm_engine_prefill(xllm_engine *engine, xllm_slot_ref ref,
                                const xllm_prefill_options *options, uint64_t *out_id,
                                xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(out_id, "out_id");
    Engine &core = *engine->engine;
    *out_id = core.prefill(to_ref(ref), read_prefill(options, core.info().max_seq_len));
  });
}

xllm_status xllm_engine_decode_slot(xllm_engine *engine, xllm_slot_ref ref,
                                    const xllm_request *request, uint64_t *out_id,
                                    xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(out_id, "out_id");
    Engine &core = *engine->engine;
    *out_id = core.decode_slot(to_ref(ref), read_request(request, core.info().max_seq_len));
  });
}

xllm_status xllm_engine_decode_batch(xllm_engine *engine, const xllm_slot_ref *refs,
                                     const xllm_request *requests, size_t num_slots,
                                     uint64_t *out_ids, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(refs, "refs");
    require(requests, "requests");
    require(out_ids, "out_ids");
    Engine &core = *engine->engine;
    check_num_slots(num_slots, core);
    std::vector<SlotRef> slots;
    std::vector<RequestOptions> options;
    for (size_t i = 0; i < num_slots; ++i) {
      slots.push_back(to_ref(refs[i]));
      options.push_back(read_request(&requests[i], core.info().max_seq_len));
    }
    const std::vector<uint64_t> ids = core.decode_batch(slots, std::move(options));
    std::memcpy(out_ids, ids.data(), ids.size() * sizeof(uint64_t));
  });
}

xllm_status xllm_engine_decode_step_slot(xllm_engine *engine, xllm_slot_ref ref,
                                         const xllm_sampling_params *sampling, int32_t *out_token,
                                         float *out_logits, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(out_token, "out_token");
    const SamplingParams params = sampling != nullptr ? read_sampling(*sampling) : SamplingParams();
    const SlotStep step = engine->engine->step_slot(to_ref(ref), params, out_logits != nullptr);
    *out_token = step.token_id;
    if (step.status != Status::kOk) throw Error(step.status, step.message);
    copy_logits(step, out_logits);
  });
}

xllm_status xllm_engine_decode_step_batch(xllm_engine *engine, const xllm_slot_ref *refs,
                                          const xllm_sampling_params *sampling, size_t num_slots,
                                          int32_t *out_tokens, float *out_logits, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(refs, "refs");
    require(out_tokens, "out_tokens");
    Engine &core = *engine->engine;
    check_num_slots(num_slots, core);
    std::vector<SlotRef> slots;
    std::vector<SamplingParams> params(num_slots);
    for (size_t i = 0; i < num_slots; ++i) {
      slots.push_back(to_ref(refs[i]));
      if (sampling != nullptr) params[i] = read_sampling(sampling[i]);
    }
    const std::vector<SlotStep> steps = core.step_batch(slots, params, out_logits != nullptr);
    const SlotStep *failed = nullptr;
    for (size_t i = 0; i < num_slots; ++i) {
      out_tokens[i] = steps[i].token_id;
      if (out_logits != nullptr) {
        copy_logits(steps[i], out_logits + i * static_cast<size_t>(core.info().vocab_size));
      }
      if (failed == nullptr && steps[i].status != Status::kOk) failed = &steps[i];
    }
    if (failed == nullptr) return;
    const std::string entry = std::to_string(failed - steps.data());
    throw Error(failed->status, "entry " + entry + ": " + failed->message, {{"entry", entry}});
  });
}

}  // extern "C"
