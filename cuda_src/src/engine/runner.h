// One set of weights with the memory it runs on: builds a step's batch, runs it, chooses the
// tokens.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "engine/scheduler.h"
#include "kvcache/kv_storage.h"
#include "model/batch.h"
#include "model/plan.h"
#include "model/transformer.h"
#include "sampling/sampler.h"

namespace xllm {

// Belongs to the thread that steps. Backend and tensors outlive it.
class Runner {
 public:
  // Loads the weights of plan.form, takes the pool and what steps will need. max_seqs: sequences in
  // a step at most. Throws what loading throws; nothing stays allocated.
  Runner(Backend *backend, const ModelDims &dims, const ModelTensors &tensors,
         const WeightSetPlan &plan, int max_seqs,
         const std::function<void(uint64_t, uint64_t)> &progress);

  // Copies blocks, in order, then computes the rows: their K and V are in the cache afterwards.
  // Sequences have slots.
  void forward(const std::vector<BlockCopy> &copies, const std::vector<ScheduledRows> &rows);
  // After forward: one token for each entry of `rows` with wants_token, in their order, chosen on
  // the host. sample_rows holds one entry for each of those.
  std::vector<Sampled> sample(const std::vector<SampleRow> &sample_rows);

  // The same on the device, where it can, and in two parts: nothing is waited for between them, and
  // the next step's forward and start_sample may come before this one's finish_sample. False: use
  // sample.
  bool start_sample(const std::vector<SampleRow> &sample_rows);
  std::vector<Sampled> finish_sample(size_t num_rows);
  // Whether a device is still at work on what was started last.
  bool is_computing() { return backend_->is_computing(); }

  // After sample: the logits that the index-th token was chosen from, [vocab_size].
  std::vector<float> logits(size_t index);

  uint64_t workspace_bytes() const { return workspace_->size_bytes(); }

 private:
  Backend *backend_;
  std::unique_ptr<WeightSet> weights_;
  KvStorage storage_;
  std::unique_ptr<Workspace> workspace_;
  Transformer transformer_;
  BatchBuilder builder_;
  Sampler sampler_;
};

}  // namespace xllm
