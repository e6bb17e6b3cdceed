// The whole forward pass, from a file to logits, against the float64 reference
// (tests/reference/make_cases.py wrote the files): every kind of model, in both forms of the
// weights, however the prompt is cut and whoever runs beside it.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "backend/factory.h"
#include "kvcache/kv_storage.h"
#include "kvcache/prefix_cache.h"
#include "model/batch.h"
#include "model/model.h"
#include "model/transformer.h"

namespace xllm {
namespace {

constexpr int kNumTokens = 41;
constexpr int kBlockSize = 16;

// Relative L2 error of a row of logits.
//   raw           int8 activations and raw blocks: the release bound on tiny models
//   dequantised   fp32 throughout
constexpr double kRawTolerance = 2e-2;
constexpr double kDequantizedTolerance = 1e-5;

std::filesystem::path data_folder() {
  return std::filesystem::path(__FILE__).parent_path().parent_path() / "data" / "forward";
}

std::vector<int32_t> case_tokens() {  // TOKENS of make_cases.py
  std::vector<int32_t> ids(kNumTokens);
  for (int i = 0; i < kNumTokens; ++i) ids[static_cast<size_t>(i)] = (7 * i + i * i / 3) % 48;
  return ids;
}

std::vector<float> expected_logits(const std::string &name) {
  std::ifstream file(data_folder() / (name + ".logits"), std::ios::binary);
  std::vector<float> logits(kNumTokens * 48);
  file.read(reinterpret_cast<char *>(logits.data()),
            static_cast<std::streamsize>(logits.size() * 4));
  EXPECT_TRUE(file.good()) << name;
  return logits;
}

double relative_l2(const float *found, const float *expected, int size) {
  double difference = 0;
  double norm = 0;
  for (int i = 0; i < size; ++i) {
    const double d = static_cast<double>(found[i]) - expected[i];
    difference += d * d;
    norm += static_cast<double>(expected[i]) * expected[i];
  }
  return std::sqrt(difference / norm);
}

// A model on a device, with a cache of its own.
class Runner {
 public:
  Runner(const Model &model, const ModelDims &dims, WeightForm form,
         const BackendOptions &options = {}, KvType kv_type = KvType::kF16)
      : backend_(make_backend(BackendKind::kCpu, options)),
        weights_(backend_->load_weights(dims, model.tensors(), form, nullptr)),
        workspace_(backend_->make_workspace(*weights_, 8)),
        storage_(&backend_->allocator(), layout(dims, form, kv_type), 64),
        cache_(64, kBlockSize, HashKey{}),
        transformer_(backend_.get(), dims, weights_.get()) {}

  struct Sequence {
    std::vector<int32_t> ids;
    BlockTable blocks{kBlockSize};
    int num_done = 0;
    std::vector<float> logits;  // of every row so far
  };

  // One step: `count` more tokens of each sequence, all their logits.
  void step(const std::vector<Sequence *> &sequences, const std::vector<int> &counts) {
    BatchBuilder builder;
    builder.clear();
    for (size_t s = 0; s < sequences.size(); ++s) {
      Sequence &sequence = *sequences[s];
      ASSERT_TRUE(cache_.extend(&sequence.blocks, sequence.num_done + counts[s]));
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
    layout.block_size = kBlockSize;
    return layout;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<WeightSet> weights_;
  std::unique_ptr<Workspace> workspace_;
  KvStorage storage_;
  PrefixCache cache_;
  Transformer transformer_;
};

double worst_error(const std::vector<float> &found, const std::vector<float> &expected) {
  EXPECT_EQ(found.size(), expected.size());
  double worst = 0;
  for (int row = 0; row < kNumTokens; ++row) {
    const double error = relative_l2(&found[static_cast<size_t>(row) * 48],
                                     &expected[static_cast<size_t>(row) * 48], 48);
    worst = error > worst || std::isnan(error) ? error : worst;
  }
  return worst;
}

class Forward : public ::testing::TestWithParam<std::string> {
 protected:
  Model model = Model::open((data_folder() / (GetParam() + ".gguf")).string());
  std::vector<float> expected = expected_logits(GetParam());
};

TEST_P(Forward, RawWeightsAgreeWithTheReference) {
  Runner runner(model, model.dims(), WeightForm::kRaw);
  const double error = worst_error(runner.logits(case_tokens(), kNumTokens), expected);
  RecordProperty("worst_relative_l2", std::to_string(error));
  EXPECT_LE(error, kRawTolerance);
}

TEST_P(Forward, DequantizedWeightsAgreeWithTheReference) {
  Runner runner(model, model.dims(), WeightForm::kDequantized);
  EXPECT_LE(worst_error(runner.logits(case_tokens(), kNumTokens), expected), kDequantizedTolerance);
}

TEST_P(Forward, TheOtherRotationDoesNot) {
  ModelDims wrong = model.dims();
  wrong.rope.is_neighbor = !wrong.rope.is_neighbor;
  Runner runner(model, wrong, WeightForm::kRaw);
  EXPECT_GT(worst_error(runner.logits(case_tokens(), kNumTokens), expected), 5 * kRawTolerance);
}

TEST_P(Forward, ChunksAndNeighboursLeaveEveryByteAsItWas) {
  for (const WeightForm form : {WeightForm::kRaw, WeightForm::kDequantized}) {
    Runner runner(model, model.dims(), form);
    const std::vector<int32_t> ids = case_tokens();
    const std::vector<float> whole = runner.logits(ids, kNumTokens);
    for (const int chunk : {1, 7, 16}) {
      EXPECT_EQ(std::memcmp(runner.logits(ids, chunk).data(), whole.data(), whole.size() * 4), 0)
          << chunk;
    }
    Runner::Sequence one;
    Runner::Sequence two;
    one.ids = ids;
    two.ids = std::vector<int32_t>(ids.rbegin(), ids.rend());
    for (int i = 0; i < 5; ++i) runner.step({&two, &one}, {1 + i, 5});
    runner.step({&one, &two}, {kNumTokens - 25, 3});
    EXPECT_EQ(std::memcmp(one.logits.data(), whole.data(), whole.size() * 4), 0);
  }
}

// Relative L2 error of the worst row of logits with quantised keys and values. Half a step is 1/254
// of the largest of 32 channels for int8, 1/14 for int4; this model's head norms of 1.5 make its
// attention sharp, so that scores, which they scale twice, show it.
struct KvBound {
  KvType type;
  double tolerance;
};

class QuantizedKv : public ::testing::TestWithParam<KvBound> {
 protected:
  const Model model = Model::open((data_folder() / "qwen3_yarn.gguf").string());
};

TEST_P(QuantizedKv, KeepsTheBoundOfItsType) {
  const std::vector<float> expected = expected_logits("qwen3_yarn");
  Runner runner(model, model.dims(), WeightForm::kRaw, {}, GetParam().type);
  const std::vector<float> found = runner.logits(case_tokens(), kNumTokens);
  EXPECT_LE(worst_error(found, expected), GetParam().tolerance);
  // It is not another type's cache.
  Runner wider(model, model.dims(), WeightForm::kRaw);
  EXPECT_NE(wider.logits(case_tokens(), kNumTokens), found);
}

TEST_P(QuantizedKv, ChunksNeighboursAndInstructionSetsLeaveEveryByteAsItWas) {
  const std::vector<int32_t> ids = case_tokens();
  Runner runner(model, model.dims(), WeightForm::kRaw, {}, GetParam().type);
  const std::vector<float> whole = runner.logits(ids, kNumTokens);
  for (const int chunk : {1, 7, 16}) {
    EXPECT_EQ(std::memcmp(runner.logits(ids, chunk).data(), whole.data(), whole.size() * 4), 0)
        << chunk;
  }
  Runner::Sequence one;
  Runner::Sequence two;
  one.ids = ids;
  two.ids = std::vector<int32_t>(ids.rbegin(), ids.rend());
  for (int i = 0; i < 5; ++i) runner.step({&two, &one}, {1 + i, 5});
  runner.step({&one, &two}, {kNumTokens - 25, 3});
  EXPECT_EQ(std::memcmp(one.logits.data(), whole.data(), whole.size() * 4), 0);
  BackendOptions portable;
  portable.instruction_set = "scalar";
  Runner scalar(model, model.dims(), WeightForm::kRaw, portable, GetParam().type);
  EXPECT_EQ(std::memcmp(scalar.logits(ids, 9).data(), whole.data(), whole.size() * 4), 0);
}

INSTANTIATE_TEST_SUITE_P(Types, QuantizedKv,
                         ::testing::Values(KvBound{KvType::kInt8, 3e-2},
                                           KvBound{KvType::kInt4, 5e-1}),
                         [](const auto &info) {
                           return std::string(kv_type_name(info.param.type));
                         });

INSTANTIATE_TEST_SUITE_P(Cases, Forward,
                         ::testing::Values("llama", "llama_untied", "llama_q8_0", "llama_q4_1",
                                           "llama_bias", "llama_window", "llama_rope_freqs",
                                           "llama_linear", "llama_wide_head", "qwen2",
                                           "qwen2_large_bias", "qwen3", "qwen3_yarn"),
                         [](const auto &info) { return info.param; });

}  // namespace
}  // namespace xllm
