#include "engine/request.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "tokenizer/unicode.h"

namespace xllm {
namespace {

constexpr size_t kMaxStopStrings = 16;
constexpr size_t kMaxStopStringBytes = 256;
constexpr size_t kMaxStopTokenIds = 64;
constexpr size_t kMaxBiases = 1024;
constexpr size_t kMaxCacheSaltBytes = 4096;
constexpr int32_t kMaxLogprobs = 20;
constexpr double kForever = std::numeric_limits<double>::infinity();

[[noreturn]] void refuse(const std::string &field, const std::string &message) {
  throw Error(Status::kInvalidArgument, field + ": " + message, {{"field", field}});
}

std::string element(const char *field, size_t index) {
  return std::string(field) + "[" + std::to_string(index) + "]";
}

void check_id(const std::string &field, int32_t id, int32_t vocab_size) {
  if (id >= 0 && id < vocab_size) return;
  refuse(field, "expected a token id from 0 to " + std::to_string(vocab_size - 1) + ", found " +
                    std::to_string(id));
}

void check_count(const char *field, size_t count, size_t limit) {
  if (count <= limit) return;
  refuse(field, "expected at most " + std::to_string(limit) + ", found " + std::to_string(count));
}

void check_seconds(const char *field, double seconds) {
  if (std::isfinite(seconds) && seconds >= 0) return;
  refuse(field, "expected a finite number of seconds, 0 or more, found " + std::to_string(seconds));
}

}  // namespace

void check_prompt_length(size_t num_tokens, int max_seq_len) {
  if (num_tokens < static_cast<size_t>(max_seq_len)) return;
  const std::string limit = std::to_string(max_seq_len - 1);
  throw Error(Status::kPromptTooLong,
              "prompt: expected at most " + limit + " tokens, which leaves room for one in " +
                  "max_seq_len " + std::to_string(max_seq_len) + ", found " +
                  std::to_string(num_tokens),
              {{"field", "prompt"}, {"num_tokens", std::to_string(num_tokens)}, {"limit", limit}});
}

void check_stop_string_size(size_t size_bytes, size_t index) {
  if (size_bytes >= 1 && size_bytes <= kMaxStopStringBytes) return;
  refuse(element("stop_strings", index), "expected 1 to " + std::to_string(kMaxStopStringBytes) +
                                             " bytes, found " + std::to_string(size_bytes));
}

void validate(const RequestOptions &options, RequestKind kind, const Vocabulary &vocabulary,
              int max_seq_len) {
  if (kind == RequestKind::kDecode) {
    if (!options.prompt.empty()) {
      refuse("prompt", "expected none, the slot holds it, found " +
                           std::to_string(options.prompt.size()) + " tokens; prefill them");
    }
  } else if (options.prompt.empty()) {
    refuse("prompt", "expected at least one token, found none");
  }
  check_prompt_length(options.prompt.size(), max_seq_len);
  const int32_t vocab_size = vocabulary.vocab_size();
  for (size_t i = 0; i < options.prompt.size(); ++i) {
    if (options.prompt[i] < 0 || options.prompt[i] >= vocab_size) {
      check_id(element("prompt", i), options.prompt[i], vocab_size);
    }
  }
  validate(options.sampling);
  if (options.max_tokens > 0 && options.min_tokens > options.max_tokens) {
    refuse("min_tokens", "expected at most max_tokens " + std::to_string(options.max_tokens) +
                             ", found " + std::to_string(options.min_tokens));
  }
  if (options.num_logprobs < -1 || options.num_logprobs > kMaxLogprobs) {
    refuse("num_logprobs", "expected -1 to " + std::to_string(kMaxLogprobs) + ", found " +
                               std::to_string(options.num_logprobs));
  }
  check_count("stop_strings", options.stop_strings.size(), kMaxStopStrings);
  for (size_t i = 0; i < options.stop_strings.size(); ++i) {
    const std::string &stop = options.stop_strings[i];
    check_stop_string_size(stop.size(), i);
    const size_t invalid = find_invalid_utf8(stop);
    if (invalid < stop.size()) {
      refuse(element("stop_strings", i),
             "expected UTF-8, found an invalid byte at offset " + std::to_string(invalid));
    }
  }
  if (!options.stop_strings.empty() && !vocabulary.has_pieces()) {
    throw Error(Status::kNoTokenizer,
                "stop_strings: the model has no vocabulary to read text with; use stop_token_ids",
                {{"field", "stop_strings"}});
  }
  check_count("stop_token_ids", options.stop_token_ids.size(), kMaxStopTokenIds);
  for (size_t i = 0; i < options.stop_token_ids.size(); ++i) {
    check_id(element("stop_token_ids", i), options.stop_token_ids[i], vocab_size);
  }
  check_count("logit_biases", options.biases.size(), kMaxBiases);
  std::vector<int32_t> ids;
  for (size_t i = 0; i < options.biases.size(); ++i) {
    const TokenBias &bias = options.biases[i];
    check_id(element("logit_biases", i), bias.token_id, vocab_size);
    if (std::isnan(bias.bias) || bias.bias == std::numeric_limits<float>::infinity()) {
      refuse(element("logit_biases", i),
             "expected a finite number or -infinity, found " + std::to_string(bias.bias));
    }
    ids.push_back(bias.token_id);
  }
  std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice != ids.end()) {
    refuse("logit_biases", "expected each id once, found " + std::to_string(*twice) + " twice");
  }
  check_count("cache_salt", options.cache_salt.size(), kMaxCacheSaltBytes);
  check_seconds("max_queue_s", options.max_queue_s);
  check_seconds("max_duration_s", options.max_duration_s);
}

Request::Request(RequestKind kind, RequestOptions options, DecodeMode decode_mode,
                 uint64_t drawn_seed, const Vocabulary *vocabulary, int max_seq_len, int block_size,
                 double now_s)
    : sequence(block_size),
      kind_(kind),
      options_(std::move(options)),
      decode_mode_(decode_mode),
      seed_(options_.sampling.seed.value_or(drawn_seed)),
      vocabulary_(vocabulary),
      max_seq_len_(max_seq_len),
      stop_checker_(options_.stop_strings),
      submitted_s_(now_s) {
  sequence.priority = options_.priority;
  sequence.tenant = options_.tenant;
  sequence.cache_salt = std::move(options_.cache_salt);
  sequence.bypasses_cache = options_.bypasses_cache;
  sequence.num_prompt = static_cast<int>(options_.prompt.size());
  sequence.tokens = std::move(options_.prompt);
  merge_biases();
  set_held();
  if (kind == RequestKind::kGenerate) set_limits();
  if (vocabulary_->has_pieces()) {
    DecodeOptions decode;
    decode.is_continuation = true;
    detokenizer_.emplace(*vocabulary_->tokenizer(), decode);
  }
}

// What depends on the tokens that lie before the answer.
void Request::set_limits() {
  num_before_ = sequence.num_tokens();
  const auto room = static_cast<uint32_t>(max_seq_len_ - num_before_);
  is_context_limit_ = options_.max_tokens == 0 || options_.max_tokens > room;
  max_tokens_ = is_context_limit_ ? room : options_.max_tokens;
  if (options_.sampling.has_penalties()) count_history();
}

void Request::count_history() {
  struct Use {
    int32_t token_id;
    bool is_prompt;
  };
  std::vector<Use> uses;
  uses.reserve(sequence.tokens.size());
  for (const int32_t token : sequence.tokens) uses.push_back({token, false});
  const auto mark = [&](const PromptSpan &span) {
    for (int i = span.start; i < span.start + span.num_tokens; ++i) {
      uses[static_cast<size_t>(i)].is_prompt = true;
    }
  };
  for (const PromptSpan &span : sequence.earlier_prompts) mark(span);
  mark({sequence.prompt_start, sequence.num_prompt});
  std::sort(uses.begin(), uses.end(),
            [](const Use &a, const Use &b) { return a.token_id < b.token_id; });
  for (const Use &use : uses) {
    if (counts_.empty() || counts_.back().token_id != use.token_id) {
      counts_.push_back({use.token_id, 0, 0});
    }
    ++(use.is_prompt ? counts_.back().num_prompt : counts_.back().num_generated);
  }
}

void Request::take_over(Sequence held) {
  const std::vector<int32_t> prompt = std::move(sequence.tokens);
  if (held.num_tokens() == 0) {  // a slot's first prompt decides for what it leaves in the cache
    held.cache_salt = std::move(sequence.cache_salt);
    held.bypasses_cache = sequence.bypasses_cache;
  }
  held.id = sequence.id;
  held.slot = ref_.slot;
  held.is_pinned = true;
  held.is_prefill_only = kind_ == RequestKind::kPrefill;
  sequence = std::move(held);
  epoch = ref_.epoch;
  has_begun_ = true;
  if (kind_ == RequestKind::kDecode) {
    set_limits();
    set_held();
    return;
  }
  num_before_ = sequence.num_tokens();
  if (num_before_ > 0) {
    sequence.earlier_prompts.push_back({sequence.prompt_start, sequence.num_prompt});
  }
  sequence.prompt_start = num_before_;
  sequence.num_prompt = static_cast<int>(prompt.size());
  sequence.num_cached = 0;
  sequence.tokens.insert(sequence.tokens.end(), prompt.begin(), prompt.end());
}

Sequence Request::hand_back() {
  has_begun_ = false;
  if (kind_ == RequestKind::kPrefill && finish_reason_ != FinishReason::kPrefilled) {
    sequence.tokens.resize(static_cast<size_t>(num_before_));
    PromptSpan last;
    if (num_before_ > 0) {
      last = sequence.earlier_prompts.back();
      sequence.earlier_prompts.pop_back();
    }
    sequence.prompt_start = last.start;
    sequence.num_prompt = last.num_tokens;
  }
  sequence.num_computed = std::min(sequence.num_computed, std::max(0, sequence.num_tokens() - 1));
  sequence.is_prefill_only = false;
  sequence.is_held = sequence.is_due = false;
  return std::exchange(sequence, Sequence(sequence.blocks.block_size()));
}

void Request::merge_biases() {
  const auto by_id = [](const TokenBias &a, const TokenBias &b) { return a.token_id < b.token_id; };
  biases_ = std::move(options_.biases);
  std::sort(biases_.begin(), biases_.end(), by_id);
  if (options_.min_tokens == 0) return;
  std::vector<int32_t> ends = options_.stop_token_ids;
  if (!options_.ignore_eos) {
    ends.insert(ends.end(), vocabulary_->end_of_generation().begin(),
                vocabulary_->end_of_generation().end());
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  for (const TokenBias &bias : biases_) {
    if (!std::binary_search(ends.begin(), ends.end(), bias.token_id)) {
      biases_before_min_.push_back(bias);
    }
  }
  for (const int32_t id : ends) {
    biases_before_min_.push_back({id, -std::numeric_limits<float>::infinity()});
  }
  std::sort(biases_before_min_.begin(), biases_before_min_.end(), by_id);
}

void Request::add_mask(uint32_t token_index, TokenMask mask) {
  if (!options_.is_constrained || token_index < static_cast<uint32_t>(num_generated())) return;
  mask.keep(vocabulary_->mask());
  masks_[token_index] = std::move(mask);
  set_held();
}

void Request::set_held() {
  const auto next = static_cast<uint32_t>(num_generated());
  sequence.is_held = options_.is_constrained && masks_.count(next) == 0;
}

SampleRow Request::sample_row() {
  const SamplingParams &params = options_.sampling;
  SampleRow row;
  row.temperature = params.temperature;
  row.top_k = params.top_k;
  row.top_p = params.top_p;
  row.min_p = params.min_p;
  row.repetition_penalty = params.repetition_penalty;
  row.frequency_penalty = params.frequency_penalty;
  row.presence_penalty = params.presence_penalty;
  row.seed = seed_;
  row.position = static_cast<uint64_t>(sequence.num_tokens());
  row.counts = counts_;
  const bool is_before_min = static_cast<uint32_t>(num_generated()) < options_.min_tokens;
  row.biases = is_before_min ? biases_before_min_ : biases_;
  row.mask = options_.is_constrained ? masks_.at(static_cast<uint32_t>(num_generated())).words()
                                     : vocabulary_->mask();
  row.num_choosable = vocabulary_->num_choosable();
  row.num_logprobs = options_.num_logprobs + 1;
  return row;
}

void Request::count_token(int32_t id) {
  if (!options_.sampling.has_penalties()) return;
  const auto place =
      std::lower_bound(counts_.begin(), counts_.end(), id,
                       [](const TokenCount &count, int32_t key) { return count.token_id < key; });
  if (place != counts_.end() && place->token_id == id) {
    ++place->num_generated;
  } else {
    counts_.insert(place, {id, 0, 1});
  }
}

bool Request::can_go_ahead() const {
  return kind_ == RequestKind::kGenerate && !options_.wants_logits && options_.num_logprobs < 0 &&
         static_cast<uint32_t>(num_generated()) + 1 < max_tokens_;
}

bool Request::add_token(const Sampled &sampled, double now_s, Event *event) {
  const int32_t id = sampled.token_id;
  const auto index = static_cast<uint32_t>(num_generated());
  sequence.tokens.push_back(id);
  count_token(id);
  if (first_token_s_ < 0) first_token_s_ = now_s;

  *event = make_event(EventKind::kToken);
  event->token_id = id;
  event->token_index = index;
  event->logprob = sampled.logprob;
  event->rank = sampled.rank;
  event->candidates = sampled.candidates;
  if (vocabulary_->has_pieces()) {
    event->has_piece = true;
    event->piece = std::string(vocabulary_->tokenizer()->token_bytes(id));
  }

  const bool is_end = vocabulary_->is_end_of_generation(id);
  const std::vector<int32_t> &stops = options_.stop_token_ids;
  if (is_end && !options_.ignore_eos) {
    finish_reason_ = FinishReason::kEos;
    matched_token_id_ = id;
  } else if (std::find(stops.begin(), stops.end(), id) != stops.end()) {
    finish_reason_ = FinishReason::kStopToken;
    matched_token_id_ = id;
  } else {
    if (!is_end) add_text(id, index < options_.min_tokens, event);
    if (stop_checker_.matched() >= 0) {
      finish_reason_ = FinishReason::kStopString;
    } else if (index + 1 == max_tokens_) {
      finish_reason_ = is_context_limit_ ? FinishReason::kContextFull : FinishReason::kMaxTokens;
    }
  }
  masks_.erase(index);
  const bool is_last = finish_reason_ != FinishReason::kNone;
  if (!is_last) {
    set_held();
    event->wants_mask = sequence.is_due = wants_mask();
  }
  return is_last;
}

void Request::add_text(int32_t id, bool is_before_min, Event *event) {
  if (!detokenizer_) return;
  std::string text = detokenizer_->feed(id);
  event->text = is_before_min ? std::move(text) : stop_checker_.feed(text);
}

void Request::set_admitted(double now_s) {
  if (admitted_s_ < 0) admitted_s_ = now_s;
}

double Request::queue_end_s() const {
  return options_.max_queue_s > 0 ? submitted_s_ + options_.max_queue_s : kForever;
}

double Request::duration_end_s() const {
  return options_.max_duration_s > 0 ? submitted_s_ + options_.max_duration_s : kForever;
}

Event Request::make_event(EventKind kind) const {
  Event event;
  event.kind = kind;
  event.request_id = id();
  event.delivery = options_.delivery;
  if (kind != EventKind::kToken && kind_ != RequestKind::kDecode) {
    event.num_prompt_tokens = static_cast<uint32_t>(sequence.num_prompt);
    event.num_cached_tokens = static_cast<uint32_t>(sequence.num_cached);
    event.num_computed_tokens = static_cast<uint32_t>(sequence.num_prompt_computed());
  }
  return event;
}

Event Request::accepted_event() const {
  Event event = make_event(EventKind::kAccepted);
  event.slot = sequence.slot;
  event.epoch = epoch;
  event.decode_mode = decode_mode_;
  event.seed = seed_;
  event.max_tokens = max_tokens_;
  event.queue_s = admitted_s_ - submitted_s_;
  event.wants_mask = wants_mask();
  return event;
}

Event Request::prefill_event() const { return make_event(EventKind::kPrefill); }

Event Request::finished_event(Status status, const std::string &message,
                              const Error::Details &details, double now_s) {
  Event event = make_event(EventKind::kFinished);
  for (const auto &[key, value] : details) {
    event.details.append(key).append("=").append(value).append("\n");
  }
  event.num_preemptions = static_cast<uint32_t>(sequence.num_preemptions);
  event.status = status;
  event.message = message;
  event.matched_token_id = -1;
  event.matched_stop = -1;
  if (status == Status::kOk) {
    event.finish_reason = finish_reason_;
    event.matched_token_id = matched_token_id_;
    event.matched_stop = stop_checker_.matched();
  }
  if (detokenizer_ && stop_checker_.matched() < 0) {
    // Nothing will complete a stop string or a character any more: what was held back is text.
    event.text = stop_checker_.flush();
    event.text += detokenizer_->flush();
  }
  event.num_generated_tokens =
      has_begun_ || !is_on_slot() ? static_cast<uint32_t>(num_generated()) : 0;
  event.queue_s = (is_admitted() ? admitted_s_ : now_s) - submitted_s_;
  if (first_token_s_ >= 0) {
    event.prefill_s = first_token_s_ - admitted_s_;
    event.decode_s = now_s - first_token_s_;
    event.ttft_s = first_token_s_ - submitted_s_;
  } else if (is_admitted()) {
    event.prefill_s = now_s - admitted_s_;
  }
  return event;
}

}  // namespace xllm
