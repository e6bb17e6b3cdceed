// What the step loop reports about a request.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/decode_mode.h"
#include "sampling/sampler.h"

namespace xllm {

// Numbers of these three are those of xllm.h.
enum class EventKind : int { kAccepted = 1, kPrefill = 2, kToken = 3, kFinished = 4 };

enum class FinishReason : int {
  kNone = 0,
  kEos = 1,
  kStopToken = 2,
  kStopString = 3,
  kMaxTokens = 4,
  kContextFull = 5,
  kPrefilled = 6
};

enum class Delivery : int { kShared = 0, kPrivate = 1 };

// As xllm_event, field by field; fields of other kinds keep their zero.
struct Event {
  EventKind kind = EventKind::kAccepted;
  uint64_t request_id = 0;
  Delivery delivery = Delivery::kShared;
  // Accepted
  int32_t slot = 0;
  uint64_t epoch = 0;
  DecodeMode decode_mode = DecodeMode::kAuto;
  uint64_t seed = 0;
  uint32_t max_tokens = 0;
  // Accepted, prefill, finished
  uint32_t num_prompt_tokens = 0;
  uint32_t num_cached_tokens = 0;
  uint32_t num_computed_tokens = 0;
  // Token
  int32_t token_id = 0;
  uint32_t token_index = 0;
  bool has_piece = false;
  std::string piece;
  float logprob = 0;
  std::vector<Candidate> candidates;
  std::vector<float> logits;  // [vocab_size] where the request wants them; not in xllm_event
  // Token, finished
  std::string text;
  // Finished
  Status status = Status::kOk;
  FinishReason finish_reason = FinishReason::kNone;
  int32_t matched_token_id = 0;
  int32_t matched_stop = 0;
  std::string message;
  uint32_t num_generated_tokens = 0;
  double queue_s = 0, prefill_s = 0, decode_s = 0, ttft_s = 0;
  // Accepted, token
  bool wants_mask = false;
  // Token
  uint32_t rank = 0;
  // Finished
  uint32_t num_preemptions = 0;
  std::string details;  // lines "key=value\n"
};

}  // namespace xllm
