// The whole forward pass, from a file to logits, against the float64 reference
// (tests/reference/make_cases.py wrote the files): every kind of model, in both forms of the
// weights, however the prompt is cut and whoever runs beside it.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "forward_runner.h"
#include "model/model.h"

namespace xllm {
namespace {

constexpr int kNumTokens = 41;

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
  ForwardRunner runner(model, model.dims(), WeightForm::kRaw);
  const double error = worst_error(runner.logits(case_tokens(), kNumTokens), expected);
  RecordProperty("worst_relative_l2", std::to_string(error));
  EXPECT_LE(error, kRawTolerance);
}

TEST_P(Forward, DequantizedWeightsAgreeWithTheReference) {
  ForwardRunner runner(model, model.dims(), WeightForm::kDequantized);
  EXPECT_LE(worst_error(runner.logits(case_tokens(), kNumTokens), expected), kDequantizedTolerance);
}

TEST_P(Forward, TheOtherRotationDoesNot) {
  ModelDims wrong = model.dims();
  wrong.rope.is_neighbor = !wrong.rope.is_neighbor;
  ForwardRunner runner(model, wrong, WeightForm::kRaw);
  EXPECT_GT(worst_error(runner.logits(case_tokens(), kNumTokens), expected), 5 * kRawTolerance);
}

TEST_P(Forward, ChunksAndNeighboursLeaveEveryByteAsItWas) {
  for (const WeightForm form : {WeightForm::kRaw, WeightForm::kDequantized}) {
    ForwardRunner runner(model, model.dims(), form);
    const std::vector<int32_t> ids = case_tokens();
    const std::vector<float> whole = runner.logits(ids, kNumTokens);
    for (const int chunk : {1, 7, 16}) {
      EXPECT_EQ(std::memcmp(runner.logits(ids, chunk).data(), whole.data(), whole.size() * 4), 0)
          << chunk;
    }
    ForwardRunner::Sequence one;
    ForwardRunner::Sequence two;
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
  ForwardRunner runner(model, model.dims(), WeightForm::kRaw, {}, GetParam().type);
  const std::vector<float> found = runner.logits(case_tokens(), kNumTokens);
  EXPECT_LE(worst_error(found, expected), GetParam().tolerance);
  // It is not another type's cache.
  ForwardRunner wider(model, model.dims(), WeightForm::kRaw);
  EXPECT_NE(wider.logits(case_tokens(), kNumTokens), found);
}

TEST_P(QuantizedKv, ChunksNeighboursAndInstructionSetsLeaveEveryByteAsItWas) {
  const std::vector<int32_t> ids = case_tokens();
  ForwardRunner runner(model, model.dims(), WeightForm::kRaw, {}, GetParam().type);
  const std::vector<float> whole = runner.logits(ids, kNumTokens);
  for (const int chunk : {1, 7, 16}) {
    EXPECT_EQ(std::memcmp(runner.logits(ids, chunk).data(), whole.data(), whole.size() * 4), 0)
        << chunk;
  }
  ForwardRunner::Sequence one;
  ForwardRunner::Sequence two;
  one.ids = ids;
  two.ids = std::vector<int32_t>(ids.rbegin(), ids.rend());
  for (int i = 0; i < 5; ++i) runner.step({&two, &one}, {1 + i, 5});
  runner.step({&one, &two}, {kNumTokens - 25, 3});
  EXPECT_EQ(std::memcmp(one.logits.data(), whole.data(), whole.size() * 4), 0);
  BackendOptions portable;
  portable.instruction_set = "scalar";
  ForwardRunner scalar(model, model.dims(), WeightForm::kRaw, portable, GetParam().type);
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
