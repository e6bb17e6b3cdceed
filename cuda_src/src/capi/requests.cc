// The C ABI of requests and their events.
#include <algorithm>
#include <cmath>
#include <memory>
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

SamplingParams read_sampling(const xllm_sampling_params &params) {
  SamplingParams out;
  out.temperature = params.temperature;
  out.top_k = params.top_k;
  out.top_p = params.top_p;
  out.min_p = params.min_p;
  out.repetition_penalty = params.repetition_penalty;
  out.frequency_penalty = params.frequency_penalty;
  out.presence_penalty = params.presence_penalty;
  if (params.has_seed != 0) out.seed = params.seed;
  return out;
}

void read_cache(const xllm_cache_options &in, RequestOptions *out) {
  require_array(in.salt, in.salt_size, "cache_salt");
  // One byte too many is enough for its refusal, whatever the size says.
  if (in.salt_size > 0) out->cache_salt.assign(in.salt, std::min<size_t>(in.salt_size, 4097));
  out->bypasses_cache = in.bypass != 0;
}

RequestOptions read_request(const xllm_request *in, int max_seq_len) {
  require(in, "request");
  const xllm_request r = read_struct(in, xllm_request_init, "xllm_request");
  require_array(r.prompt, r.num_prompt, "prompt");
  require_array(r.stop_strings, r.num_stop_strings, "stop_strings");
  require_array(r.stop_token_ids, r.num_stop_token_ids, "stop_token_ids");
  require_array(r.logit_biases, r.num_logit_biases, "logit_biases");
  require_range(enum_number(r.decode_mode), 0, 2, "decode_mode");
  require_range(enum_number(r.delivery), 0, 1, "delivery");
  // Before anything is copied: a count that is out of range may have no memory behind it.
  check_prompt_length(r.num_prompt, max_seq_len);
  require_range(static_cast<int>(std::min<size_t>(r.num_stop_strings, 1000)), 0, 16,
                "stop_strings");
  require_range(static_cast<int>(std::min<size_t>(r.num_stop_token_ids, 1000)), 0, 64,
                "stop_token_ids");
  require_range(static_cast<int>(std::min<size_t>(r.num_logit_biases, 10000)), 0, 1024,
                "logit_biases");
  RequestOptions out;
  if (r.num_prompt > 0) out.prompt.assign(r.prompt, r.prompt + r.num_prompt);
  out.decode_mode = static_cast<DecodeMode>(r.decode_mode);
  out.delivery = static_cast<Delivery>(r.delivery);
  out.sampling = read_sampling(r.sampling);
  out.max_tokens = r.max_tokens;
  out.min_tokens = r.min_tokens;
  out.ignore_eos = r.ignore_eos != 0;
  out.num_logprobs = r.num_logprobs;
  for (size_t i = 0; i < r.num_stop_strings; ++i) {
    const xllm_text &text = r.stop_strings[i];
    require_array(text.data, text.size, "stop_strings");
    check_stop_string_size(text.size, i);  // before it is copied, as the counts above
    out.stop_strings.emplace_back(text.data, text.size);
  }
  if (r.num_stop_token_ids > 0) {
    out.stop_token_ids.assign(r.stop_token_ids, r.stop_token_ids + r.num_stop_token_ids);
  }
  for (size_t i = 0; i < r.num_logit_biases; ++i) {
    out.biases.push_back({r.logit_biases[i].token_id, r.logit_biases[i].bias});
  }
  out.priority = r.priority;
  out.max_queue_s = r.max_queue_s;
  out.max_duration_s = r.max_duration_s;
  out.is_constrained = r.is_constrained != 0;
  read_cache(r.cache, &out);
  out.tenant = r.tenant;
  return out;
}

namespace {

xllm_event to_c(const Event &event, const xllm_candidate *candidates) {
  xllm_event out{};
  out.kind = static_cast<xllm_event_kind>(event.kind);
  out.request_id = event.request_id;
  out.slot = event.slot;
  out.epoch = event.epoch;
  out.decode_mode = static_cast<xllm_decode_mode>(event.decode_mode);
  out.seed = event.seed;
  out.max_tokens = event.max_tokens;
  out.num_prompt_tokens = event.num_prompt_tokens;
  out.num_cached_tokens = event.num_cached_tokens;
  out.num_computed_tokens = event.num_computed_tokens;
  out.token_id = event.token_id;
  out.token_index = event.token_index;
  out.piece = event.has_piece ? event.piece.data() : nullptr;
  out.piece_size = event.piece.size();
  out.logprob = event.logprob;
  out.candidates = event.candidates.empty() ? nullptr : candidates;
  out.num_candidates = event.candidates.size();
  const bool has_text = event.kind == EventKind::kToken || event.kind == EventKind::kFinished;
  out.text = has_text ? event.text.c_str() : nullptr;
  out.text_size = event.text.size();
  out.status = static_cast<xllm_status>(event.status);
  out.finish_reason = static_cast<xllm_finish_reason>(event.finish_reason);
  out.matched_token_id = event.matched_token_id;
  out.matched_stop = event.matched_stop;
  out.message = event.status != Status::kOk ? event.message.c_str() : nullptr;
  out.num_generated_tokens = event.num_generated_tokens;
  out.queue_s = event.queue_s;
  out.prefill_s = event.prefill_s;
  out.decode_s = event.decode_s;
  out.ttft_s = event.ttft_s;
  out.wants_mask = event.wants_mask ? 1 : 0;
  out.rank = event.rank;
  out.num_preemptions = event.num_preemptions;
  out.details = event.status != Status::kOk ? event.details.c_str() : nullptr;
  return out;
}

PositionMask read_mask(const xllm_token_mask &in, int32_t vocab_size, size_t index) {
  const size_t num_words = TokenMask::num_words_of(vocab_size);
  if (in.words == nullptr || in.num_words != num_words) {
    throw Error(Status::kInvalidArgument,
                "masks[" + std::to_string(index) + "]: expected " + std::to_string(num_words) +
                    " words, one bit for each of " + std::to_string(vocab_size) + " ids, found " +
                    (in.words == nullptr ? "null" : std::to_string(in.num_words)),
                {{"field", "masks"}, {"entry", std::to_string(index)}});
  }
  return {in.request_id, in.token_index, TokenMask(vocab_size, in.words)};
}

std::unique_ptr<xllm_events> to_c(std::vector<Event> events) {
  auto out = std::make_unique<xllm_events>();
  out->events = std::move(events);
  size_t num_candidates = 0;
  for (const Event &event : out->events) num_candidates += event.candidates.size();
  out->candidates.reserve(num_candidates);  // so that pointers into it stay
  out->views.reserve(out->events.size());
  for (const Event &event : out->events) {
    const xllm_candidate *first = out->candidates.data() + out->candidates.size();
    for (const Candidate &candidate : event.candidates) {
      out->candidates.push_back({candidate.token_id, candidate.logprob});
    }
    out->views.push_back(to_c(event, first));
  }
  return out;
}

}  // namespace
}  // namespace xllm

using xllm::DecodeMode;
using xllm::enum_number;
using xllm::Event;
using xllm::guarded;
using xllm::PositionMask;
using xllm::read_cache;
using xllm::read_mask;
using xllm::read_request;
using xllm::refuse;
using xllm::RequestOptions;
using xllm::require;
using xllm::require_array;
using xllm::require_range;
using xllm::SamplingParams;
using xllm::to_c;

extern "C" {

void xllm_sampling_params_init(xllm_sampling_params *params) {
  if (params == nullptr) return;
  const SamplingParams defaults;
  *params = xllm_sampling_params{};
  params->temperature = defaults.temperature;
  params->top_k = defaults.top_k;
  params->top_p = defaults.top_p;
  params->min_p = defaults.min_p;
  params->repetition_penalty = defaults.repetition_penalty;
  params->frequency_penalty = defaults.frequency_penalty;
  params->presence_penalty = defaults.presence_penalty;
}

void xllm_request_init(xllm_request *request) {
  if (request == nullptr) return;
  const RequestOptions defaults;
  *request = xllm_request{};
  request->struct_size = sizeof *request;
  xllm_sampling_params_init(&request->sampling);
  request->num_logprobs = defaults.num_logprobs;
}

xllm_status xllm_engine_submit(xllm_engine *engine, const xllm_request *request, uint64_t *out_id,
                               xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(out_id, "out_id");
    *out_id = engine->engine->submit(read_request(request, engine->engine->info().max_seq_len));
  });
}

xllm_status xllm_engine_submit_outputs(xllm_engine *engine, const xllm_request *request,
                                       size_t num_outputs, uint64_t *out_ids, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(out_ids, "out_ids");
    RequestOptions options = read_request(request, engine->engine->info().max_seq_len);
    const std::vector<uint64_t> ids = engine->engine->submit(
        std::move(options), static_cast<int>(std::min<size_t>(num_outputs, 1000)));
    std::copy(ids.begin(), ids.end(), out_ids);
  });
}

xllm_status xllm_engine_count_cached(const xllm_engine *engine, const int32_t *prompt,
                                     size_t num_prompt, xllm_decode_mode decode_mode,
                                     const xllm_cache_options *cache, uint32_t *out_num,
                                     xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(out_num, "out_num");
    require_array(prompt, num_prompt, "prompt");
    require_range(enum_number(decode_mode), 0, 2, "decode_mode");
    RequestOptions options;
    if (cache != nullptr) read_cache(*cache, &options);
    const int num_cached = engine->engine->count_cached(
        {prompt, num_prompt}, static_cast<DecodeMode>(decode_mode), options.cache_salt);
    *out_num = options.bypasses_cache ? 0 : static_cast<uint32_t>(num_cached);
  });
}

xllm_status xllm_engine_cancel(xllm_engine *engine, uint64_t request_id, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    engine->engine->cancel(request_id);
  });
}

xllm_status xllm_engine_push_masks(xllm_engine *engine, const xllm_token_mask *masks,
                                   size_t num_masks, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require_array(masks, num_masks, "masks");
    const int32_t vocab_size = engine->engine->info().vocab_size;
    std::vector<PositionMask> copies;
    copies.reserve(num_masks);
    for (size_t i = 0; i < num_masks; ++i) copies.push_back(read_mask(masks[i], vocab_size, i));
    engine->engine->push_masks(std::move(copies));
  });
}

size_t xllm_events_count(const xllm_events *events) {
  return events != nullptr ? events->views.size() : 0;
}

const xllm_event *xllm_events_get(const xllm_events *events, size_t index) {
  if (events == nullptr || index >= events->views.size()) return nullptr;
  return &events->views[index];
}

void xllm_events_destroy(xllm_events *events) { delete events; }

int xllm_engine_event_fd(const xllm_engine *engine) {
  return engine != nullptr ? engine->engine->event_fd() : -1;
}

xllm_status xllm_engine_take_events(xllm_engine *engine, uint64_t request_id, double timeout_s,
                                    xllm_events **out_events, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    require(out_events, "out_events");
    if (std::isnan(timeout_s)) refuse("timeout_s", "expected a number of seconds, found NaN");
    *out_events = nullptr;
    std::vector<Event> events = engine->engine->take_events(request_id, timeout_s);
    if (!events.empty()) *out_events = to_c(std::move(events)).release();
  });
}

}  // extern "C"
