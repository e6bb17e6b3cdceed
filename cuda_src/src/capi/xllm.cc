// The C ABI over the core: handles in, status out, no exception crosses. What the functions promise
// stands in xllm.h.
#include "xllm.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "backend/factory.h"
#include "base/error.h"
#include "build_info.h"
#include "engine/engine.h"
#include "engine/model_file.h"

using xllm::Error;
using xllm::Status;

// ---- handles ----

namespace {

struct MetadataText {
  std::string key, type, json;
};

struct EndTokenText {
  int32_t id;
  std::string text, source;
};

}  // namespace

struct xllm_model {
  std::shared_ptr<const xllm::ModelFile> file;
  std::string architecture, name;
  std::string chat_template;
  std::vector<xllm::Fact> facts;
  std::vector<std::string> tensor_names;
  std::vector<EndTokenText> end_tokens;
  // Made when first asked for: a vocabulary's arrays are not worth reading for every caller.
  mutable std::once_flag metadata_once;
  mutable std::vector<MetadataText> metadata;
};

struct xllm_engine {
  std::unique_ptr<xllm::Engine> engine;
};

struct xllm_events {
  std::vector<xllm::Event> events;
  std::vector<xllm_candidate> candidates;
  std::vector<xllm_event> views;
};

namespace {

// ---- the enums of both sides ----

#define XLLM_SAME_STATUS(c_name, name)                                                    \
  static_assert(static_cast<int>(XLLM_STATUS_##c_name) == static_cast<int>(Status::name), \
                "xllm.h and base/error.h disagree")
XLLM_SAME_STATUS(OK, kOk);
XLLM_SAME_STATUS(INVALID_ARGUMENT, kInvalidArgument);
XLLM_SAME_STATUS(PROMPT_TOO_LONG, kPromptTooLong);
XLLM_SAME_STATUS(NEVER_FITS, kNeverFits);
XLLM_SAME_STATUS(NOT_FOUND, kNotFound);
XLLM_SAME_STATUS(ALREADY_EXISTS, kAlreadyExists);
XLLM_SAME_STATUS(DECODE_MODE_MISMATCH, kDecodeModeMismatch);
XLLM_SAME_STATUS(SLOT_STATE, kSlotState);
XLLM_SAME_STATUS(NO_TOKENIZER, kNoTokenizer);
XLLM_SAME_STATUS(NO_CHAT_TEMPLATE, kNoChatTemplate);
XLLM_SAME_STATUS(QUEUE_FULL, kQueueFull);
XLLM_SAME_STATUS(QUEUE_TIMEOUT, kQueueTimeout);
XLLM_SAME_STATUS(NO_FREE_SLOT, kNoFreeSlot);
XLLM_SAME_STATUS(KV_EXHAUSTED, kKvExhausted);
XLLM_SAME_STATUS(MEMORY, kMemory);
XLLM_SAME_STATUS(STALE_EPOCH, kStaleEpoch);
XLLM_SAME_STATUS(LEASE_LOST, kLeaseLost);
XLLM_SAME_STATUS(PERMISSION_DENIED, kPermissionDenied);
XLLM_SAME_STATUS(CANCELLED, kCancelled);
XLLM_SAME_STATUS(DEADLINE_EXCEEDED, kDeadlineExceeded);
XLLM_SAME_STATUS(MODEL_MALFORMED, kModelMalformed);
XLLM_SAME_STATUS(MODEL_TRUNCATED, kModelTruncated);
XLLM_SAME_STATUS(MODEL_UNSUPPORTED, kModelUnsupported);
XLLM_SAME_STATUS(UNIMPLEMENTED, kUnimplemented);
XLLM_SAME_STATUS(NON_FINITE_LOGITS, kNonFiniteLogits);
XLLM_SAME_STATUS(DEVICE, kDevice);
XLLM_SAME_STATUS(ENGINE_FAILED, kEngineFailed);
XLLM_SAME_STATUS(DRAINING, kDraining);
XLLM_SAME_STATUS(IO, kIo);
XLLM_SAME_STATUS(INTERNAL, kInternal);
#undef XLLM_SAME_STATUS

#define XLLM_SAME(c_name, name) \
  static_assert(static_cast<int>(c_name) == static_cast<int>(xllm::name), "xllm.h disagrees")
XLLM_SAME(XLLM_DECODE_MODE_AUTO, DecodeMode::kAuto);
XLLM_SAME(XLLM_DECODE_MODE_BATCHED, DecodeMode::kBatched);
XLLM_SAME(XLLM_DECODE_MODE_PER_SLOT, DecodeMode::kPerSlot);
XLLM_SAME(XLLM_BACKEND_AUTO, BackendKind::kAuto);
XLLM_SAME(XLLM_BACKEND_CPU, BackendKind::kCpu);
XLLM_SAME(XLLM_BACKEND_CUDA, BackendKind::kCuda);
XLLM_SAME(XLLM_KV_TYPE_F16, KvType::kF16);
XLLM_SAME(XLLM_KV_TYPE_INT8, KvType::kInt8);
XLLM_SAME(XLLM_KV_TYPE_INT4, KvType::kInt4);
XLLM_SAME(XLLM_DELIVERY_SHARED, Delivery::kShared);
XLLM_SAME(XLLM_DELIVERY_PRIVATE, Delivery::kPrivate);
XLLM_SAME(XLLM_EVENT_ACCEPTED, EventKind::kAccepted);
XLLM_SAME(XLLM_EVENT_PREFILL, EventKind::kPrefill);
XLLM_SAME(XLLM_EVENT_TOKEN, EventKind::kToken);
XLLM_SAME(XLLM_EVENT_FINISHED, EventKind::kFinished);
XLLM_SAME(XLLM_FINISH_NONE, FinishReason::kNone);
XLLM_SAME(XLLM_FINISH_EOS, FinishReason::kEos);
XLLM_SAME(XLLM_FINISH_STOP_TOKEN, FinishReason::kStopToken);
XLLM_SAME(XLLM_FINISH_STOP_STRING, FinishReason::kStopString);
XLLM_SAME(XLLM_FINISH_MAX_TOKENS, FinishReason::kMaxTokens);
XLLM_SAME(XLLM_FINISH_CONTEXT_FULL, FinishReason::kContextFull);
XLLM_SAME(XLLM_SLOT_FREE, SlotState::kFree);
XLLM_SAME(XLLM_SLOT_ACQUIRED, SlotState::kAcquired);
XLLM_SAME(XLLM_SLOT_PREFILLING, SlotState::kPrefilling);
XLLM_SAME(XLLM_SLOT_READY, SlotState::kReady);
XLLM_SAME(XLLM_SLOT_DECODING, SlotState::kDecoding);
XLLM_SAME(XLLM_SLOT_STALLED, SlotState::kStalled);
XLLM_SAME(XLLM_SLOT_CANCELLING, SlotState::kCancelling);
#undef XLLM_SAME

// ---- errors ----

// Copies text into a fixed array, cut between characters, on one line where asked to.
void copy_text(const std::string &text, char *out, size_t capacity) {
  size_t size = std::min(text.size(), capacity - 1);
  if (size < text.size()) {
    while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0) == 0x80) --size;
  }
  std::memcpy(out, text.data(), size);
  out[size] = '\0';
}

std::string one_line(std::string text) {
  for (char &c : text) {
    if (c == '\n' || c == '\r' || c == '\0') c = ' ';
  }
  return text;
}

xllm_status report(const Error &error, xllm_error *err) {
  const auto status = static_cast<xllm_status>(error.status());
  if (err == nullptr) return status;
  err->status = status;
  copy_text(one_line(error.message()), err->message, sizeof err->message);
  std::string details;
  for (const auto &[key, value] : error.details()) {
    const std::string line = key + "=" + one_line(value) + "\n";
    if (details.size() + line.size() < sizeof err->details) details += line;
  }
  copy_text(details, err->details, sizeof err->details);
  return status;
}

// Runs a function body and turns what it throws into a status. Nothing gets past this.
template <typename Body>
xllm_status guarded(xllm_error *err, Body &&body) noexcept {
  try {
    if (err != nullptr) {
      err->status = XLLM_STATUS_OK;
      err->message[0] = '\0';
      err->details[0] = '\0';
    }
    try {
      body();
      return XLLM_STATUS_OK;
    } catch (const Error &error) {
      return report(error, err);
    } catch (const std::bad_alloc &) {
      return report(Error(Status::kMemory, "out of memory; free some, or use smaller limits"), err);
    } catch (const std::exception &error) {
      return report(Error(Status::kInternal, std::string("unexpected: ") + error.what()), err);
    }
  } catch (...) {  // no memory left to describe it
    if (err != nullptr) err->status = XLLM_STATUS_INTERNAL;
    return XLLM_STATUS_INTERNAL;
  }
}

[[noreturn]] void refuse(const char *field, const std::string &message) {
  throw Error(Status::kInvalidArgument, std::string(field) + ": " + message, {{"field", field}});
}

void require(const void *pointer, const char *name) {
  if (pointer == nullptr) refuse(name, "expected a pointer, found NULL");
}

void require_array(const void *pointer, size_t count, const char *name) {
  if (pointer == nullptr && count > 0) {
    refuse(name, "expected " + std::to_string(count) + " elements, found NULL");
  }
}

void require_range(int value, int min, int max, const char *field) {
  if (value < min || value > max) {
    refuse(field, "expected " + std::to_string(min) + " to " + std::to_string(max) + ", found " +
                      std::to_string(value));
  }
}

// A caller's struct of this or an earlier version: fields that it does not have keep their
// defaults.
template <typename T>
T read_struct(const T *in, void (*init)(T *), const char *name) {
  T out;
  init(&out);
  if (in == nullptr) return out;
  const size_t size = in->struct_size;
  if (size <= sizeof(size_t) || size > sizeof(T)) {
    refuse("struct_size", std::string(name) + ": expected at most " + std::to_string(sizeof(T)) +
                              ", found " + std::to_string(size) + "; call its _init function and " +
                              "use one version of xllm.h and the library");
  }
  std::memcpy(static_cast<void *>(&out), in, size);
  return out;
}

// Memory for xllm_free.
void *allocate(size_t size) {
  void *memory = std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// ---- conversions ----

struct EngineSetup {
  xllm::EngineConfig config;
  xllm::BackendKind backend = xllm::BackendKind::kAuto;
  xllm::BackendOptions backend_options;
};

EngineSetup read_config(const xllm_engine_config *in) {
  const xllm_engine_config c = read_struct(in, xllm_engine_config_init, "xllm_engine_config");
  require_range(static_cast<int>(c.backend), 0, 2, "backend");
  require_range(static_cast<int>(c.decode_mode), 0, 2, "decode_mode");
  require_range(static_cast<int>(c.kv_type), 0, 2, "kv_type");
  require_range(c.num_threads, 0, 4096, "num_threads");
  require_range(c.device_index, 0, 1023, "device_index");
  EngineSetup out;
  out.config.decode_mode = static_cast<xllm::DecodeMode>(c.decode_mode);
  out.config.kv_type = static_cast<xllm::KvType>(c.kv_type);
  out.config.max_slots = c.max_slots;
  out.config.max_seq_len = c.max_seq_len;
  out.config.allow_long_context = c.allow_long_context != 0;
  out.config.prefill_chunk = c.prefill_chunk;
  out.config.block_size = c.block_size;
  out.config.max_queue = c.max_queue;
  out.config.kv_memory = c.kv_memory;
  if (c.log != nullptr) {
    out.config.log = [log = c.log, user = c.log_user](const std::string &line) {
      log(user, line.c_str());
    };
  }
  out.backend = static_cast<xllm::BackendKind>(c.backend);
  out.backend_options.num_threads = c.num_threads;
  out.backend_options.instruction_set = c.instruction_set != nullptr ? c.instruction_set : "";
  out.backend_options.device_index = c.device_index;
  out.backend_options.memory_limit = c.memory_limit;
  out.backend_options.log = out.config.log;
  return out;
}

xllm_plan to_c(const xllm::MemoryPlan &plan) {
  xllm_plan out{};
  if (const auto *raw = plan.find(xllm::WeightForm::kRaw)) {
    out.raw_weight_bytes = raw->weight_bytes;
  }
  if (const auto *dequantized = plan.find(xllm::WeightForm::kDequantized)) {
    out.dequantized_weight_bytes = dequantized->weight_bytes;
  }
  if (!plan.sets.empty()) {
    const xllm::WeightSetPlan &first = plan.sets.front();  // the set that the mode begins with
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

xllm::RequestOptions read_request(const xllm_request *in, int max_seq_len) {
  require(in, "request");
  const xllm_request r = read_struct(in, xllm_request_init, "xllm_request");
  require_array(r.prompt, r.num_prompt, "prompt");
  require_array(r.stop_strings, r.num_stop_strings, "stop_strings");
  require_array(r.stop_token_ids, r.num_stop_token_ids, "stop_token_ids");
  require_array(r.logit_biases, r.num_logit_biases, "logit_biases");
  require_range(static_cast<int>(r.decode_mode), 0, 2, "decode_mode");
  require_range(static_cast<int>(r.delivery), 0, 1, "delivery");
  // Before anything is copied: a count that is out of range may have no memory behind it.
  xllm::check_prompt_length(r.num_prompt, max_seq_len);
  require_range(static_cast<int>(std::min<size_t>(r.num_stop_strings, 1000)), 0, 16,
                "stop_strings");
  require_range(static_cast<int>(std::min<size_t>(r.num_stop_token_ids, 1000)), 0, 64,
                "stop_token_ids");
  require_range(static_cast<int>(std::min<size_t>(r.num_logit_biases, 10000)), 0, 1024,
                "logit_biases");
  xllm::RequestOptions out;
  if (r.num_prompt > 0) out.prompt.assign(r.prompt, r.prompt + r.num_prompt);
  out.decode_mode = static_cast<xllm::DecodeMode>(r.decode_mode);
  out.delivery = static_cast<xllm::Delivery>(r.delivery);
  out.sampling.temperature = r.sampling.temperature;
  out.sampling.top_k = r.sampling.top_k;
  out.sampling.top_p = r.sampling.top_p;
  out.sampling.min_p = r.sampling.min_p;
  out.sampling.repetition_penalty = r.sampling.repetition_penalty;
  out.sampling.frequency_penalty = r.sampling.frequency_penalty;
  out.sampling.presence_penalty = r.sampling.presence_penalty;
  if (r.sampling.has_seed != 0) out.sampling.seed = r.sampling.seed;
  out.max_tokens = r.max_tokens;
  out.min_tokens = r.min_tokens;
  out.ignore_eos = r.ignore_eos != 0;
  out.num_logprobs = r.num_logprobs;
  for (size_t i = 0; i < r.num_stop_strings; ++i) {
    const xllm_text &text = r.stop_strings[i];
    require_array(text.data, text.size, "stop_strings");
    out.stop_strings.emplace_back(text.size > 0 ? text.data : "", std::min<size_t>(text.size, 257));
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
  return out;
}

xllm_event to_c(const xllm::Event &event, const xllm_candidate *candidates) {
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
  const bool has_text =
      event.kind == xllm::EventKind::kToken || event.kind == xllm::EventKind::kFinished;
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
  return out;
}

std::unique_ptr<xllm_events> to_c(std::vector<xllm::Event> events) {
  auto out = std::make_unique<xllm_events>();
  out->events = std::move(events);
  size_t num_candidates = 0;
  for (const xllm::Event &event : out->events) num_candidates += event.candidates.size();
  out->candidates.reserve(num_candidates);  // so that pointers into it stay
  out->views.reserve(out->events.size());
  for (const xllm::Event &event : out->events) {
    const xllm_candidate *first = out->candidates.data() + out->candidates.size();
    for (const xllm::Candidate &candidate : event.candidates) {
      out->candidates.push_back({candidate.token_id, candidate.logprob});
    }
    out->views.push_back(to_c(event, first));
  }
  return out;
}

// "uint32" for the file's u32, "array of string" for its arr[str].
std::string type_text(const xllm::GgufValue &value) {
  const auto scalar = [](xllm::GgufType type) -> std::string {
    switch (type) {
      case xllm::GgufType::kUint8:
        return "uint8";
      case xllm::GgufType::kInt8:
        return "int8";
      case xllm::GgufType::kUint16:
        return "uint16";
      case xllm::GgufType::kInt16:
        return "int16";
      case xllm::GgufType::kUint32:
        return "uint32";
      case xllm::GgufType::kInt32:
        return "int32";
      case xllm::GgufType::kFloat32:
        return "float32";
      case xllm::GgufType::kBool:
        return "bool";
      case xllm::GgufType::kString:
        return "string";
      case xllm::GgufType::kArray:
        return "array";
      case xllm::GgufType::kUint64:
        return "uint64";
      case xllm::GgufType::kInt64:
        return "int64";
      case xllm::GgufType::kFloat64:
        return "float64";
    }
    return "unknown";
  };
  return value.is_array() ? "array of " + scalar(value.element_type()) : scalar(value.type());
}

std::string metadata_json(const xllm::GgufValue &value) {
  constexpr size_t kMaxElements = 16;
  std::string json = value.to_json(kMaxElements);
  if (value.is_array() && value.num_elements() > kMaxElements) {
    json.insert(json.size() - 1, ", \"...\"");
  }
  return json;
}

// What was concluded about the vocabulary, beside what the model says of itself.
void add_tokenizer_facts(const xllm::Tokenizer &tokenizer, std::vector<xllm::Fact> *facts) {
  facts->push_back({"tokenizer", tokenizer.model(), "tokenizer.ggml.model"});
  if (!tokenizer.pre_tokenizer().empty()) {
    facts->push_back({"pretokenizer", tokenizer.pre_tokenizer(), tokenizer.pre_tokenizer_source()});
  }
  if (!tokenizer.has_text()) {
    facts->push_back({"text", "refused", tokenizer.without_text_reason()});
  }
  facts->push_back({"add_bos", tokenizer.add_bos() ? "true" : "false",
                    "tokenizer.ggml.add_bos_token, or the family's rule without it"});
  if (tokenizer.bos()) {
    facts->push_back(
        {"bos_token", std::to_string(*tokenizer.bos()), "tokenizer.ggml.bos_token_id"});
  }
  for (const xllm::EndToken &end : tokenizer.end_of_generation()) {
    facts->push_back({"end_of_generation", std::to_string(end.id), end.source});
  }
  if (tokenizer.num_real_tokens() < tokenizer.vocab_size()) {
    facts->push_back({"padding_rows",
                      std::to_string(tokenizer.vocab_size() - tokenizer.num_real_tokens()),
                      "rows of the head beyond tokenizer.ggml.tokens, or of type UNUSED"});
  }
}

void describe(xllm_model *model) {
  const xllm::GgufFile &file = model->file->file();
  model->architecture = file.get_string("general.architecture", "");
  model->name = file.get_string("general.name", "");
  model->chat_template = file.get_string("tokenizer.chat_template", "");
  if (model->file->model() != nullptr) model->facts = model->file->model()->facts();
  const xllm::Tokenizer &tokenizer = model->file->tokenizer();
  add_tokenizer_facts(tokenizer, &model->facts);
  for (const xllm::GgufTensor &tensor : file.tensors()) {
    model->tensor_names.emplace_back(tensor.name);
  }
  for (const xllm::EndToken &end : tokenizer.end_of_generation()) {
    model->end_tokens.push_back({end.id, std::string(tokenizer.token_bytes(end.id)), end.source});
  }
}

}  // namespace

extern "C" {

// ---- library ----

const char *xllm_status_name(xllm_status status) {
  switch (status) {
#define XLLM_NAME(name)    \
  case XLLM_STATUS_##name: \
    return #name
    XLLM_NAME(OK);
    XLLM_NAME(INVALID_ARGUMENT);
    XLLM_NAME(PROMPT_TOO_LONG);
    XLLM_NAME(NEVER_FITS);
    XLLM_NAME(NOT_FOUND);
    XLLM_NAME(ALREADY_EXISTS);
    XLLM_NAME(DECODE_MODE_MISMATCH);
    XLLM_NAME(SLOT_STATE);
    XLLM_NAME(NO_TOKENIZER);
    XLLM_NAME(NO_CHAT_TEMPLATE);
    XLLM_NAME(QUEUE_FULL);
    XLLM_NAME(QUEUE_TIMEOUT);
    XLLM_NAME(NO_FREE_SLOT);
    XLLM_NAME(KV_EXHAUSTED);
    XLLM_NAME(MEMORY);
    XLLM_NAME(STALE_EPOCH);
    XLLM_NAME(LEASE_LOST);
    XLLM_NAME(PERMISSION_DENIED);
    XLLM_NAME(CANCELLED);
    XLLM_NAME(DEADLINE_EXCEEDED);
    XLLM_NAME(MODEL_MALFORMED);
    XLLM_NAME(MODEL_TRUNCATED);
    XLLM_NAME(MODEL_UNSUPPORTED);
    XLLM_NAME(UNIMPLEMENTED);
    XLLM_NAME(NON_FINITE_LOGITS);
    XLLM_NAME(DEVICE);
    XLLM_NAME(ENGINE_FAILED);
    XLLM_NAME(DRAINING);
    XLLM_NAME(IO);
    XLLM_NAME(INTERNAL);
#undef XLLM_NAME
  }
  return "UNKNOWN";
}

const char *xllm_version(void) { return XLLM_VERSION; }
int xllm_abi_version(void) { return XLLM_ABI_VERSION; }
const char *xllm_build_id(void) { return XLLM_BUILD_ID; }
void xllm_free(void *memory) { std::free(memory); }

// ---- model ----

void xllm_model_options_init(xllm_model_options *options) {
  if (options == nullptr) return;
  *options = xllm_model_options{};
  options->struct_size = sizeof *options;
}

xllm_status xllm_model_open(const char *path, const xllm_model_options *options,
                            xllm_model **out_model, xllm_error *err) {
  return guarded(err, [&] {
    require(path, "path");
    require(out_model, "out_model");
    const xllm_model_options read =
        read_struct(options, xllm_model_options_init, "xllm_model_options");
    xllm::ModelFileOptions file_options;
    if (read.pretokenizer != nullptr) file_options.pretokenizer = read.pretokenizer;
    auto model = std::make_unique<xllm_model>();
    model->file = xllm::ModelFile::open(path, file_options);
    describe(model.get());
    *out_model = model.release();
  });
}

void xllm_model_close(xllm_model *model) { delete model; }

void xllm_model_get_info(const xllm_model *model, xllm_model_info *out) {
  if (model == nullptr || out == nullptr) return;
  *out = xllm_model_info{};
  const xllm::Tokenizer &tokenizer = model->file->tokenizer();
  out->architecture = model->architecture.c_str();
  out->name = model->name.c_str();
  out->path = model->file->path().c_str();
  out->file_bytes = model->file->file().file_bytes();
  if (const xllm::Model *weights = model->file->model()) {
    const xllm::ModelDims &dims = weights->dims();
    out->num_params = weights->num_parameters();
    out->has_weights = 1;
    out->num_layers = dims.num_layers;
    out->hidden_size = dims.hidden_size;
    out->intermediate_size = dims.intermediate_size;
    out->num_heads = dims.num_heads;
    out->num_kv_heads = dims.num_kv_heads;
    out->head_dim = dims.head_dim;
    out->context_length = weights->config().context_length;
  }
  out->vocab_size = tokenizer.vocab_size();
  out->num_real_tokens = tokenizer.num_real_tokens();
  out->tokenizer_model = tokenizer.model().c_str();
  out->pretokenizer = tokenizer.pre_tokenizer().c_str();
  out->has_tokenizer = tokenizer.has_text() ? 1 : 0;
  out->bos_token_id = tokenizer.bos().value_or(-1);
  out->add_bos = tokenizer.add_bos() ? 1 : 0;
  out->chat_template = model->chat_template.c_str();
  out->chat_template_size = model->chat_template.size();
}

int xllm_model_get_metadata(const xllm_model *model, size_t index, xllm_metadata *out) {
  if (model == nullptr || out == nullptr) return 0;
  int is_found = 0;
  guarded(nullptr, [&] {
    std::call_once(model->metadata_once, [&] {
      std::vector<MetadataText> all;
      for (const xllm::GgufValue &value : model->file->file().values()) {
        all.push_back({std::string(value.key()), type_text(value), metadata_json(value)});
      }
      model->metadata = std::move(all);
    });
    if (index >= model->metadata.size()) return;
    const MetadataText &text = model->metadata[index];
    *out = {text.key.c_str(), text.type.c_str(), text.json.c_str()};
    is_found = 1;
  });
  return is_found;
}

int xllm_model_get_tensor(const xllm_model *model, size_t index, xllm_tensor_info *out) {
  if (model == nullptr || out == nullptr || index >= model->tensor_names.size()) return 0;
  const xllm::GgufTensor &tensor = model->file->file().tensors()[index];
  *out = xllm_tensor_info{};
  out->name = model->tensor_names[index].c_str();
  out->dtype = xllm::dtype_info(tensor.dtype).name;
  out->num_dims = static_cast<int32_t>(tensor.num_dims);
  for (int i = 0; i < 4; ++i) out->dims[i] = tensor.dims[i];
  out->size_bytes = tensor.size_bytes;
  out->file_offset = tensor.byte_offset;
  return 1;
}

int xllm_model_get_fact(const xllm_model *model, size_t index, xllm_fact *out) {
  if (model == nullptr || out == nullptr || index >= model->facts.size()) return 0;
  const xllm::Fact &fact = model->facts[index];
  *out = {fact.name.c_str(), fact.value.c_str(), fact.source.c_str()};
  return 1;
}

int xllm_model_get_end_token(const xllm_model *model, size_t index, xllm_end_token *out) {
  if (model == nullptr || out == nullptr || index >= model->end_tokens.size()) return 0;
  const EndTokenText &end = model->end_tokens[index];
  *out = {end.id, end.text.c_str(), end.source.c_str()};
  return 1;
}

// ---- text ----

xllm_status xllm_model_encode(const xllm_model *model, const xllm_text *texts, size_t num_texts,
                              int add_special, int32_t **out_ids, size_t *out_num,
                              xllm_error *err) {
  return guarded(err, [&] {
    require(model, "model");
    require(out_ids, "out_ids");
    require(out_num, "out_num");
    require_array(texts, num_texts, "texts");
    std::vector<xllm::Segment> segments;
    for (size_t i = 0; i < num_texts; ++i) {
      require_array(texts[i].data, texts[i].size, "texts");
      if (texts[i].size == 0) continue;
      segments.push_back({{texts[i].data, texts[i].size}, texts[i].trusted != 0});
    }
    const std::vector<int32_t> ids =
        model->file->tokenizer().encode_segments(segments, add_special != 0);
    int32_t *copy = nullptr;
    if (!ids.empty()) {
      copy = static_cast<int32_t *>(allocate(ids.size() * sizeof(int32_t)));
      std::memcpy(copy, ids.data(), ids.size() * sizeof(int32_t));
    }
    *out_ids = copy;
    *out_num = ids.size();
  });
}

xllm_status xllm_model_decode(const xllm_model *model, const int32_t *ids, size_t num_ids,
                              int render_special, char **out_text, size_t *out_size,
                              xllm_error *err) {
  return guarded(err, [&] {
    require(model, "model");
    require(out_text, "out_text");
    require(out_size, "out_size");
    require_array(ids, num_ids, "ids");
    xllm::DecodeOptions options;
    options.render_special = render_special != 0;
    const std::string text = model->file->tokenizer().decode({ids, num_ids}, options);
    auto *copy = static_cast<char *>(allocate(text.size() + 1));
    std::memcpy(copy, text.c_str(), text.size() + 1);
    *out_text = copy;
    *out_size = text.size();
  });
}

xllm_status xllm_model_token_piece(const xllm_model *model, int32_t id, const char **out_bytes,
                                   size_t *out_size, int32_t *out_type, xllm_error *err) {
  return guarded(err, [&] {
    require(model, "model");
    require(out_bytes, "out_bytes");
    require(out_size, "out_size");
    const xllm::Tokenizer &tokenizer = model->file->tokenizer();
    if (tokenizer.model() == "no_vocab") {
      throw Error(Status::kNoTokenizer, "the model has no vocabulary: ids have no text");
    }
    if (id < 0 || id >= tokenizer.vocab_size()) {
      refuse("id", "expected 0 to " + std::to_string(tokenizer.vocab_size() - 1) + ", found " +
                       std::to_string(id));
    }
    const std::string_view bytes = tokenizer.token_bytes(id);
    *out_bytes = bytes.empty() ? "" : bytes.data();
    *out_size = bytes.size();
    if (out_type != nullptr) *out_type = static_cast<int32_t>(tokenizer.token_type(id));
  });
}

// ---- engine ----

void xllm_engine_config_init(xllm_engine_config *config) {
  if (config == nullptr) return;
  const xllm::EngineConfig defaults;
  *config = xllm_engine_config{};
  config->struct_size = sizeof *config;
  config->backend = XLLM_BACKEND_AUTO;
  config->decode_mode = static_cast<xllm_decode_mode>(defaults.decode_mode);
  config->kv_type = static_cast<xllm_kv_type>(defaults.kv_type);
  config->max_slots = defaults.max_slots;
  config->prefill_chunk = defaults.prefill_chunk;
  config->block_size = defaults.block_size;
  config->max_queue = defaults.max_queue;
}

xllm_status xllm_model_plan(const xllm_model *model, const xllm_engine_config *config,
                            xllm_plan *out_plan, xllm_error *err) {
  return guarded(err, [&] {
    require(model, "model");
    require(out_plan, "out_plan");
    const EngineSetup setup = read_config(config);
    const xllm::EngineModel engine_model = xllm::make_engine_model(model->file);
    const std::unique_ptr<xllm::Backend> backend =
        xllm::make_backend(setup.backend, setup.backend_options);
    *out_plan = to_c(xllm::plan_engine(engine_model, setup.config, *backend).memory);
  });
}

xllm_status xllm_engine_create(xllm_model *model, const xllm_engine_config *config,
                               xllm_engine **out_engine, xllm_error *err) {
  return guarded(err, [&] {
    require(model, "model");
    require(out_engine, "out_engine");
    const EngineSetup setup = read_config(config);
    xllm::EngineModel engine_model = xllm::make_engine_model(model->file);
    xllm::validate(setup.config, engine_model.config);
    auto engine = std::make_unique<xllm_engine>();
    engine->engine =
        std::make_unique<xllm::Engine>(std::move(engine_model), setup.config,
                                       xllm::make_backend(setup.backend, setup.backend_options));
    *out_engine = engine.release();
  });
}

void xllm_engine_destroy(xllm_engine *engine) { delete engine; }

void xllm_engine_get_info(const xllm_engine *engine, xllm_engine_info *out) {
  if (engine == nullptr || out == nullptr) return;
  const xllm::EngineInfo &info = engine->engine->info();
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

// ---- requests and events ----

void xllm_sampling_params_init(xllm_sampling_params *params) {
  if (params == nullptr) return;
  const xllm::SamplingParams defaults;
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
  const xllm::RequestOptions defaults;
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

xllm_status xllm_engine_cancel(xllm_engine *engine, uint64_t request_id, xllm_error *err) {
  return guarded(err, [&] {
    require(engine, "engine");
    engine->engine->cancel(request_id);
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
    std::vector<xllm::Event> events = engine->engine->take_events(request_id, timeout_s);
    if (!events.empty()) *out_events = to_c(std::move(events)).release();
  });
}

// ---- operation ----

void xllm_engine_drain(xllm_engine *engine) {
  if (engine != nullptr) engine->engine->drain();
}

void xllm_engine_get_stats(const xllm_engine *engine, xllm_engine_stats *out) {
  if (engine == nullptr || out == nullptr) return;
  const xllm::EngineStats stats = engine->engine->stats();
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
}

int xllm_engine_get_slot(const xllm_engine *engine, int32_t slot, xllm_slot_info *out) {
  xllm::Slot found;
  if (engine == nullptr || out == nullptr || !engine->engine->get_slot(slot, &found)) return 0;
  out->slot = found.index;
  out->epoch = found.epoch;
  out->state = static_cast<xllm_slot_state>(found.state);
  out->decode_mode = static_cast<xllm_decode_mode>(found.decode_mode);
  out->request_id = found.request_id;
  out->num_tokens = static_cast<uint32_t>(found.num_tokens);
  out->num_blocks = static_cast<uint32_t>(found.num_blocks);
  return 1;
}

}  // extern "C"
