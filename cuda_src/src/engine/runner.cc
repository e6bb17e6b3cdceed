#include "engine/runner.h"

#include "base/error.h"

namespace xllm {

Runner::Runner(Backend *backend, const ModelDims &dims, const ModelTensors &tensors,
               const WeightSetPlan &plan, int max_seqs,
               const std::function<void(uint64_t, uint64_t)> &progress)
    : backend_(backend),
      weights_(backend->load_weights(dims, tensors, plan.form, progress)),
      storage_(&backend->allocator(), plan.kv_layout, plan.num_blocks),
      workspace_(backend->make_workspace(*weights_, max_seqs)),
      transformer_(backend, dims, weights_.get()) {
  backend_->reserve(*workspace_, plan.max_step_tokens);
}

void Runner::forward(const std::vector<BlockCopy> &copies, const std::vector<ScheduledRows> &rows) {
  // One at a time: what one copies into, the next may copy from.
  for (const BlockCopy &copy : copies) {
    backend_->copy_blocks(storage_.view(), {&copy.from, 1}, {&copy.to, 1});
  }
  builder_.clear();
  for (const ScheduledRows &entry : rows) {
    const Sequence &sequence = *entry.sequence;
    SequenceStep step;
    step.token_ids = Span<const int32_t>(sequence.tokens)
                         .subspan(static_cast<size_t>(sequence.num_computed),
                                  static_cast<size_t>(entry.num_tokens));
    step.first_position = sequence.num_computed;
    const PromptSpan prompt = sequence.prompt_of(sequence.num_computed + entry.num_tokens - 1);
    step.prompt_start = prompt.start;
    step.prompt_len = prompt.num_tokens;
    step.blocks = &sequence.blocks;
    step.sampler_row = sequence.slot;
    step.num_logits = entry.wants_token ? 1 : 0;
    builder_.add(step);
  }
  transformer_.forward(workspace_.get(), storage_.view(), builder_.finish());
}

// Sequences of the batch may have ended since forward.
bool Runner::start_sample(const std::vector<SampleRow> &sample_rows) {
  return !sample_rows.empty() && backend_->start_sample(*workspace_, builder_.batch(), sample_rows);
}

std::vector<Sampled> Runner::finish_sample(size_t num_rows) {
  std::vector<int32_t> ids(num_rows, -1);
  backend_->finish_sample(*workspace_, ids);
  std::vector<Sampled> chosen(num_rows);
  for (size_t i = 0; i < ids.size(); ++i) {
    chosen[i].token_id = ids[i];
    if (ids[i] == -1) chosen[i].outcome = SampleOutcome::kNotFinite;
    if (ids[i] == -2) chosen[i].outcome = SampleOutcome::kAllForbidden;
  }
  return chosen;
}

std::vector<Sampled> Runner::sample(const std::vector<SampleRow> &sample_rows) {
  std::vector<Sampled> chosen(sample_rows.size());
  if (sample_rows.empty()) return chosen;
  const float *logits = backend_->host_logits(*workspace_);
  const auto vocab_size = static_cast<size_t>(transformer_.dims().vocab_size);
  for (size_t i = 0; i < sample_rows.size(); ++i) {
    chosen[i] = sampler_.sample(logits + i * vocab_size, sample_rows[i]);
  }
  return chosen;
}

std::vector<float> Runner::logits(size_t index) {
  const auto vocab_size = static_cast<size_t>(transformer_.dims().vocab_size);
  const float *row = backend_->host_logits(*workspace_) + index * vocab_size;
  return std::vector<float>(row, row + vocab_size);
}

}  // namespace xllm
