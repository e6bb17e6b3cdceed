// A sequence: the tokens of one request or slot, and how many of them are in the KV cache. What the
// scheduler works on; how its tokens are chosen and reported is request.h's business.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kvcache/block_table.h"
#include "kvcache/prefix_cache.h"

namespace xllm {

enum class SequenceState {
  kNew,      // not with the scheduler
  kWaiting,  // in the queue; holds no blocks. Also after a preemption
  kRunning,  // computing its prompt or generating
  kDone      // ended; holds nothing
};

// A prompt within a sequence.
struct PromptSpan {
  int start = 0;
  int num_tokens = 0;
};

struct Sequence {
  explicit Sequence(int block_size) : blocks(block_size) {}

  uint64_t id = 0;               // > 0; rises with the order of arrival
  int32_t priority = 0;          // larger goes first
  uint64_t tenant = 0;           // whose it is: tenants take turns in the queue
  uint64_t place = 0;            // in the queue, from the scheduler: its tenant's turn
  bool is_pinned = false;        // runs in an owned slot: before all others, never preempted
  bool is_prefill_only = false;  // computes all but its last token, and chooses none
  bool is_held = false;          // may not choose its next token yet: its last one waits
  bool is_due = false;           // while held: may by the end of the next step, and computes in it
  std::vector<int32_t> tokens;   // prompt, then generated; in a slot perhaps several times over
  std::vector<PromptSpan> earlier_prompts;  // before the latest one
  int prompt_start = 0;                     // of the latest prompt: 0, or behind a slot's history
  int num_prompt = 0;                       // tokens of the latest prompt

  SequenceState state = SequenceState::kNew;
  int slot = -1;  // its seat in the batch, from first admission to the end; -1 before
  BlockTable blocks;
  uint64_t leader_id = 0;       // its prompt is this one's: waits for it and shares its blocks
  std::string cache_salt;       // blocks are shared only where it is equal
  bool bypasses_cache = false;  // nothing is looked up or published
  PrefixCursor cursor;          // how far its prompt has been published to the prefix cache
  int num_computed = 0;         // leading tokens whose K and V are in its blocks
  int num_cached = 0;  // of the latest prompt, found in the prefix cache at first admission
  int num_preemptions = 0;
  uint64_t last_turn = 0;  // where sequences take turns: when it had its last one

  int num_tokens() const { return static_cast<int>(tokens.size()); }
  int num_generated() const { return num_tokens() - prompt_start - num_prompt; }
  int num_pending() const { return num_tokens() - num_computed; }
  // Its last token is not computed in the next step.
  bool sits_out() const { return is_held && !is_due; }
  // It is computed, perhaps for nothing: its mask may come too late, or never.
  bool may_drop_out() const { return is_held && is_due; }
  // Of the pending ones, those that it has to compute.
  int num_to_compute() const { return num_pending() - (is_prefill_only || sits_out() ? 1 : 0); }
  // Of the latest prompt, in the cache.
  int num_prompt_computed() const { return std::clamp(num_computed - prompt_start, 0, num_prompt); }
  // One token to compute, and it was generated or lies in a slot that decodes: a row of decode.
  // Everything else is prefill, generated tokens that are computed again after a preemption
  // included.
  bool is_decoding() const {
    if (is_pinned) return !is_prefill_only;
    return num_pending() == 1 && num_generated() > 0;
  }
  // The prompt that a position belongs to or was generated from.
  PromptSpan prompt_of(int position) const {
    if (position >= prompt_start || earlier_prompts.empty()) return {prompt_start, num_prompt};
    auto span = earlier_prompts.end() - 1;
    while (span != earlier_prompts.begin() && span->start > position) --span;
    return *span;
  }
};

// Whether a is served before b: owned slots first, then by priority, then by their tenants' turns,
// then by arrival.
inline bool is_senior(const Sequence &a, const Sequence &b) {
  if (a.is_pinned != b.is_pinned) return a.is_pinned;
  if (a.priority != b.priority) return a.priority > b.priority;
  return a.place != b.place ? a.place < b.place : a.id < b.id;
}

}  // namespace xllm
