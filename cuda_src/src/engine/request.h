// One request on its way through the engine: what was asked for, what has been generated, and how
// it ends. A call on an owned slot is a request too, which borrows the slot's sequence while it
// runs. Knows tokens and text; seats, blocks and steps are the engine's business.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/error.h"
#include "engine/event.h"
#include "engine/sequence.h"
#include "engine/slot.h"
#include "engine/stop_checker.h"
#include "engine/vocabulary.h"
#include "sampling/mask.h"
#include "sampling/params.h"
#include "sampling/sampler.h"
#include "tokenizer/detokenizer.h"

namespace xllm {

// As xllm_request, field by field.
struct RequestOptions {
  std::vector<int32_t> prompt;
  DecodeMode decode_mode = DecodeMode::kAuto;
  Delivery delivery = Delivery::kShared;
  SamplingParams sampling;
  uint32_t max_tokens = 0;
  uint32_t min_tokens = 0;
  bool ignore_eos = false;
  int32_t num_logprobs = -1;
  std::vector<std::string> stop_strings;
  std::vector<int32_t> stop_token_ids;
  std::vector<TokenBias> biases;
  int32_t priority = 0;
  double max_queue_s = 0;
  double max_duration_s = 0;
  bool is_constrained = false;
  std::string cache_salt;
  bool bypasses_cache = false;
  uint64_t tenant = 0;
  bool wants_logits = false;  // for step calls: the logits of each token, in its event
};

enum class RequestKind {
  kGenerate,  // a prompt and its answer, in a seat of its own
  kPrefill,   // a prompt into an owned slot
  kDecode     // an answer in an owned slot
};

// Throws Error(kPromptTooLong, details num_tokens and limit) unless such a prompt leaves room for a
// token. Apart, so that a caller can ask before it copies the prompt.
void check_prompt_length(size_t num_tokens, int max_seq_len);

// Throws Error(kInvalidArgument, detail "field") unless stop string `index` may be so long. Apart,
// so that a caller can ask before it copies the string.
void check_stop_string_size(size_t size_bytes, size_t index);

// Throws Error for the first field out of its range: kInvalidArgument (detail "field"),
// kPromptTooLong, kNoTokenizer (stop strings without a vocabulary). A decode has no prompt.
void validate(const RequestOptions &options, RequestKind kind, const Vocabulary &vocabulary,
              int max_seq_len);

// Belongs to the step loop's thread once it is submitted.
class Request {
 public:
  // options: validated. decode_mode: the effective one. seed: drawn where options have none.
  // The vocabulary outlives the request.
  Request(RequestKind kind, RequestOptions options, DecodeMode decode_mode, uint64_t drawn_seed,
          const Vocabulary *vocabulary, int max_seq_len, int block_size, double now_s);

  uint64_t id() const { return sequence.id; }
  RequestKind kind() const { return kind_; }
  bool is_on_slot() const { return kind_ != RequestKind::kGenerate; }
  const RequestOptions &options() const { return options_; }
  DecodeMode decode_mode() const { return decode_mode_; }

  // Calls on a slot: sets the slot they run in; takes its sequence over, with the prompt behind its
  // history; and gives it back, as it was before where a prefill did not complete. Its last token
  // is always still to compute. Blocks beyond its tokens are the caller's to take back.
  void bind(SlotRef ref) { ref_ = ref; }
  SlotRef ref() const { return ref_; }
  void take_over(Sequence held);
  Sequence hand_back();
  bool has_begun() const { return has_begun_; }
  // A prefill: the prompt is in the slot.
  void complete_prefill() { finish_reason_ = FinishReason::kPrefilled; }

  // The tokens allowed at a position, of a constrained request; dropped where it is too late.
  void add_mask(uint32_t token_index, TokenMask mask);
  // It cannot go on without a mask that has not come.
  bool wants_mask() const { return sequence.is_held; }

  // How the next token is to be chosen. Valid until the next add_token.
  SampleRow sample_row();
  // Whether the token after the next one can be computed before the next one is known: it is surely
  // wanted unless that one ends the answer, and nothing but the cache depends on it.
  bool can_go_ahead() const;
  // Whether a token has a say in how the one after it is chosen.
  bool chooses_by_tokens() const {
    return options_.is_constrained || options_.sampling.has_penalties();
  }

  // Appends a chosen token and describes it. True when the request ends with it.
  bool add_token(const Sampled &sampled, double now_s, Event *event);

  // When it got its seat; the first time counts.
  void set_admitted(double now_s);
  bool is_admitted() const { return admitted_s_ >= 0; }
  // The moments at which it is to be ended unfinished; infinity where there is no limit.
  double queue_end_s() const;
  double duration_end_s() const;

  Event accepted_event() const;
  Event prefill_event() const;
  // The last event. kOk: it ended by itself, as add_token found; else a failure with its reason.
  Event finished_event(Status status, const std::string &message, const Error::Details &details,
                       double now_s);

  int num_generated() const {
    return kind_ == RequestKind::kPrefill ? 0 : sequence.num_tokens() - num_before_;
  }

  Sequence sequence;
  uint64_t epoch = 0;                   // of its seat
  int num_prefill_reported = 0;         // prompt tokens in the last prefill event
  std::optional<uint64_t> cancel_step;  // steps done when it was cancelled
  // When it chose its last token; -1 where what comes next is not measured against it: the first
  // token, and what comes after a preemption or a wait for a mask.
  double last_token_s = -1;

 private:
  Event make_event(EventKind kind) const;
  void set_limits();
  void count_history();
  void count_token(int32_t id);
  void add_text(int32_t id, bool is_before_min, Event *event);
  void merge_biases();
  void set_held();

  RequestKind kind_;
  RequestOptions options_;
  DecodeMode decode_mode_;
  uint64_t seed_;
  const Vocabulary *vocabulary_;
  int max_seq_len_;
  SlotRef ref_;
  bool has_begun_ = false;
  int num_before_ = 0;                        // tokens before those that it generates or appends
  uint32_t max_tokens_ = 0;                   // effective
  bool is_context_limit_ = false;             // max_tokens_ is what max_seq_len leaves
  std::vector<TokenBias> biases_;             // ascending ids
  std::vector<TokenBias> biases_before_min_;  // and the ends forbidden
  std::vector<TokenCount> counts_;            // ascending ids; kept only where penalties apply
  std::map<uint32_t, TokenMask> masks_;       // by token index; of tokens not chosen yet
  std::optional<Detokenizer> detokenizer_;
  StopChecker stop_checker_;

  FinishReason finish_reason_ = FinishReason::kNone;
  int32_t matched_token_id_ = -1;
  double submitted_s_;
  double admitted_s_ = -1;
  double first_token_s_ = -1;
};

}  // namespace xllm
