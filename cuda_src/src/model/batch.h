// Builds a ForwardBatch, the whole input of a step, from sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "base/span.h"
#include "kvcache/block_pool.h"
#include "kvcache/block_table.h"

namespace xllm {

constexpr int kSegmentTokens = 128;  // a prompt's complete segments may run on kernels of their own

// Which kernels compute a token: those for segments for the complete 128-token segments of its
// prompt, else the integer ones.
//   position      of the token in its sequence
//   prompt_start  where its prompt begins: 0, or behind the slot's history when it was appended to
//   a slot prompt_len    tokens of that prompt; positions from prompt_start + prompt_len on are
//   generated
TokenPath token_path(int position, int prompt_start, int prompt_len);

// What one sequence computes in a step.
struct SequenceStep {
  Span<const int32_t> token_ids;  // consecutive, [1..]; ForwardBatch::kSampledOnDevice is allowed
  int first_position = 0;         // of token_ids[0]
  int prompt_start = 0;           // see token_path
  int prompt_len = 0;
  const BlockTable *blocks = nullptr;  // covers every position of this step
  int sampler_row = 0;
  int num_logits = 0;  // logits of this many last rows: 0 in mid-prompt, 1 to choose a token
};

// Reused from step to step, so that a step allocates nothing once it has seen the largest.
//   builder.clear(); builder.add(a); builder.add(b); transformer.forward(ws, kv, builder.finish());
class BatchBuilder {
 public:
  void clear();
  // Appends a sequence; its rows are consecutive, and its logits follow those of the sequences
  // before it. Returns the index of its first row of logits, or -1 when it wants none.
  int add(const SequenceStep &step);
  int num_tokens() const { return batch_.num_tokens(); }
  int num_seqs() const { return batch_.num_seqs(); }
  // Completes the block tables, which must still be there. Valid until clear().
  const ForwardBatch &finish();
  // What finish() has returned; looks at no block table.
  const ForwardBatch &batch() const { return batch_; }

 private:
  ForwardBatch batch_;
  std::vector<Span<const int32_t>> tables_;  // per sequence; the block tables' own memory
};

}  // namespace xllm
