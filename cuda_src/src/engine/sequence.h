// A sequence: the tokens of one request, and how many of them are in the KV cache. What the
// scheduler works on; how its tokens are chosen and reported is request.h's business.
#pragma once

#include <cstdint>
#include <vector>

#include "kvcache/block_table.h"
#include "kvcache/prefix_cache.h"

namespace xllm {

enum class SequenceState {
  kNew,      // not with the scheduler yet
  kWaiting,  // in the queue; holds no blocks. Also after a preemption
  kRunning,  // computing its prompt or generating
  kDone      // ended; holds nothing
};

struct Sequence {
  explicit Sequence(int block_size) : blocks(block_size) {}

  uint64_t id = 0;              // > 0; rises with the order of arrival
  int32_t priority = 0;         // larger goes first
  std::vector<int32_t> tokens;  // prompt, then generated
  int num_prompt = 0;

  SequenceState state = SequenceState::kNew;
  int slot = -1;  // its seat in the batch, from first admission to the end; -1 before
  BlockTable blocks;
  PrefixCursor cursor;   // how far its prompt has been published to the prefix cache
  int num_computed = 0;  // leading tokens whose K and V are in its blocks
  int num_cached = 0;    // of the prompt, found in the prefix cache at first admission
  int num_preemptions = 0;

  int num_tokens() const { return static_cast<int>(tokens.size()); }
  int num_generated() const { return num_tokens() - num_prompt; }
  int num_pending() const { return num_tokens() - num_computed; }
  // One token to compute, and it was generated: a row of decode. Everything else is prefill,
  // generated tokens that are computed again after a preemption included.
  bool is_decoding() const { return num_pending() == 1 && num_generated() > 0; }
};

// Whether a is served before b: by priority, then by arrival.
inline bool is_senior(const Sequence &a, const Sequence &b) {
  return a.priority != b.priority ? a.priority > b.priority : a.id < b.id;
}

}  // namespace xllm
