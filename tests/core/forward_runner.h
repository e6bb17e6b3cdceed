// A forward pass from a model file to logits, without an engine; shared by the tests and the
// fuzzer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/factory.h"
#include "base/error.h"
#include "kvcache/kv_storage.h"
#include "kvcache/prefix_cache.h"
#include "model/batch.h"
#include "model/model.h"
#include "model/transformer.h"

namespace xllm {

constexpr int kForwardBlockSize = 16;

// A model on the CPU, with 64 blocks of cache of its own.
class ForwardRunner {
 public:
  ForwardRunner(const Model &model, const ModelDims &dims, WeightForm form,
                const BackendOptions &options = {}, KvType kv_type = KvType::kF16)
      : backend_(make_backend(BackendKind::kCpu, options)),
        weights_(backend_->load_weights(dims, model.tensors(), form, nullptr)),
        workspace_(backend_->make_workspace(*weights_, 8)),
        storage_(&backend_->allocator(), layout(dims, form, kv_type), 64),
        cache_(64, kForwardBlockSize, HashKey{}),
        transformer_(backend_.get(), dims, weights_.get()) {}

  struct Sequence {
    std::vector<int32_t> ids;
    BlockTable blocks{kForwardBlockSize};
    int num_done = 0;
    std::vector<float> logits;  // of every row so far
  };

  // One step: `count` more tokens of each sequence, all their logits.
  void step(const std::vector<Sequence *> &sequences, const std::vector<int> &counts) {
    BatchBuilder builder;
    builder.clear();
    for (size_t s = 0; s < sequences.size(); ++s) {
      Sequence &sequence = *sequences[s];
      if (!cache_.extend(&sequence.blocks, sequence.num_done + counts[s])) {
        throw Error(Status::kInternal, "the cache holds no block more");
      }
      SequenceStep step;
      step.token_ids =
          Span<const int32_t>(sequence.ids)
              .subspan(static_cast<size_t>(sequence.num_done), static_cast<size_t>(counts[s]));
      step.first_position = sequence.num_done;
      step.prompt_len = static_cast<int>(sequence.ids.size());
      step.blocks = &sequence.blocks;
      step.sampler_row = static_cast<int>(s);
      step.num_logits = counts[s];
      builder.add(step);
    }
    transformer_.forward(workspace_.get(), storage_.view(), builder.finish());
    const float *row = backend_->host_logits(*workspace_);
    const int vocab = transformer_.dims().vocab_size;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const float *end = row + static_cast<ptrdiff_t>(counts[s]) * vocab;
      sequences[s]->logits.insert(sequences[s]->logits.end(), row, end);
      sequences[s]->num_done += counts[s];
      row = end;
    }
  }

  // Logits of every position of `ids`, computed `chunk` tokens at a time.
  std::vector<float> logits(const std::vector<int32_t> &ids, int chunk) {
    Sequence sequence;
    sequence.ids = ids;
    while (sequence.num_done < static_cast<int>(ids.size())) {
      step({&sequence}, {std::min(chunk, static_cast<int>(ids.size()) - sequence.num_done)});
    }
    cache_.release_all(&sequence.blocks);
    return sequence.logits;
  }

 private:
  static KvLayout layout(const ModelDims &dims, WeightForm form, KvType kv_type) {
    KvLayout layout;
    layout.type = form == WeightForm::kRaw ? kv_type : KvType::kF32;
    layout.num_layers = dims.num_layers;
    layout.num_kv_heads = dims.num_kv_heads;
    layout.head_dim = dims.head_dim;
    layout.block_size = kForwardBlockSize;
    return layout;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<WeightSet> weights_;
  std::unique_ptr<Workspace> workspace_;
  KvStorage storage_;
  PrefixCache cache_;
  Transformer transformer_;
};

}  // namespace xllm
