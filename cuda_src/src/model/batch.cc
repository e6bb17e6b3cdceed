#include "model/batch.h"

#include <algorithm>

#include "base/error.h"

namespace xllm {

TokenPath token_path(int position, int prompt_start, int prompt_len) {
  const int offset = position - prompt_start;
  const int in_segments = prompt_len / kSegmentTokens * kSegmentTokens;
  return offset >= 0 && offset < in_segments ? TokenPath::kSegment : TokenPath::kInteger;
}

void BatchBuilder::clear() {
  batch_.token_ids.clear();
  batch_.positions.clear();
  batch_.seq_index.clear();
  batch_.kv_indices.clear();
  batch_.paths.clear();
  batch_.query_start.clear();
  batch_.context_len.clear();
  batch_.sampler_row.clear();
  batch_.block_tables.clear();
  batch_.logit_rows.clear();
  batch_.max_blocks = 0;
  tables_.clear();
}

int BatchBuilder::add(const SequenceStep &step) {
  const int count = static_cast<int>(step.token_ids.size());
  XLLM_DCHECK(count > 0 && step.num_logits >= 0 && step.num_logits <= count);
  const int first_row = batch_.num_tokens();
  const int sequence = batch_.num_seqs();
  const int context_len = step.first_position + count;
  XLLM_DCHECK(step.blocks->num_missing(context_len) == 0);

  batch_.query_start.push_back(first_row);
  for (int i = 0; i < count; ++i) {
    const int position = step.first_position + i;
    batch_.token_ids.push_back(step.token_ids[static_cast<size_t>(i)]);
    batch_.positions.push_back(position);
    batch_.seq_index.push_back(sequence);
    batch_.kv_indices.push_back(step.blocks->kv_index(position));
    batch_.paths.push_back(token_path(position, step.prompt_start, step.prompt_len));
  }
  batch_.context_len.push_back(context_len);
  batch_.sampler_row.push_back(step.sampler_row);
  // Only the blocks that hold this context: a table may already reach further.
  const int num_blocks = (context_len + step.blocks->block_size() - 1) / step.blocks->block_size();
  tables_.push_back(step.blocks->ids().subspan(0, static_cast<size_t>(num_blocks)));
  batch_.max_blocks = std::max(batch_.max_blocks, num_blocks);

  const int first_logit = batch_.num_logits();
  for (int row = first_row + count - step.num_logits; row < first_row + count; ++row) {
    batch_.logit_rows.push_back(row);
  }
  return step.num_logits > 0 ? first_logit : -1;
}

const ForwardBatch &BatchBuilder::finish() {
  batch_.query_start.resize(
      static_cast<size_t>(batch_.num_seqs()));  // finish() may be called twice
  batch_.query_start.push_back(batch_.num_tokens());
  const auto stride = static_cast<size_t>(batch_.max_blocks);
  batch_.block_tables.assign(tables_.size() * stride, kNoBlock);
  for (size_t s = 0; s < tables_.size(); ++s) {
    std::copy(tables_[s].begin(), tables_[s].end(),
              batch_.block_tables.begin() + static_cast<ptrdiff_t>(s * stride));
  }
  return batch_;
}

}  // namespace xllm
