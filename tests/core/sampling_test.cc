// Choosing a token: neutral values, the order of steps, penalties, padding rows, logprobs.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "base/rng.h"
#include "sampling/exp_log.h"
#include "sampling/mask.h"
#include "sampling/params.h"
#include "sampling/sampler.h"
#include "sampling/weight.h"

namespace xllm {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

SampleRow row_for(const std::vector<float> &logits) {
  SampleRow row;
  row.num_choosable = static_cast<int32_t>(logits.size());
  return row;
}

Sampled sample(const std::vector<float> &logits, const SampleRow &row) {
  return Sampler().sample(logits.data(), row);
}

// The ids that some of many seeds draw.
std::set<int32_t> drawn(const std::vector<float> &logits, SampleRow row) {
  std::set<int32_t> ids;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    row.seed = seed;
    ids.insert(sample(logits, row).token_id);
  }
  return ids;
}

std::vector<float> random_logits(int size, unsigned seed, float spread = 4) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(static_cast<size_t>(size));
  for (float &logit : logits) logit = normal(random);
  return logits;
}

TEST(ExpLog, AgreeWithTheLibrary) {
  for (double x = -700; x <= 0; x += 0.0137) {
    EXPECT_NEAR(exp_neg(x) / std::exp(x), 1, 1e-15) << x;
  }
  EXPECT_EQ(exp_neg(0), 1);
  EXPECT_LT(exp_neg(-1000), 1e-300);
  EXPECT_LT(exp_neg(-std::numeric_limits<double>::infinity()), 1e-300);
  for (double x = 1e-3; x < 1e6; x *= 1.00173) {
    EXPECT_NEAR(log_pos(x), std::log(x), 1e-15 * std::max(1.0, std::fabs(std::log(x)))) << x;
  }
  EXPECT_EQ(log_pos(1), 0);
}

TEST(Weight, IsAnIntegerOf44Bits) {
  EXPECT_EQ(fixed_weight(1), uint64_t{1} << 44);
  EXPECT_EQ(fixed_weight(0.375), uint64_t{3} << 41);
  EXPECT_EQ(fixed_weight(0), 0u);
  EXPECT_EQ(weight_of(2, 2, 0.7), uint64_t{1} << 44);
  EXPECT_EQ(weight_of(-kInfinity, 2, 100), 0u);
  for (double x = 0; x < 30; x += 0.0173) {
    const double exact = std::exp(-x) * kUnitWeight;
    EXPECT_NEAR(static_cast<double>(fixed_weight(exp_neg(-x))), exact, 0.5 + 1e-14 * exact) << x;
  }
}

TEST(Weight, IsScaledWithoutOverflow) {
  __extension__ using Wide = unsigned __int128;
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000; ++i) {
    const uint64_t bits = i % 7 == 0 ? ~uint64_t{0} >> (i % 64) : random();
    const uint64_t total = i % 5 == 0 ? ~uint64_t{0} << (i % 64) : random() >> (i % 61);
    EXPECT_EQ(scaled(bits, total), static_cast<uint64_t>(Wide{bits} * total >> 64));
  }
  EXPECT_EQ(scaled(~uint64_t{0}, 1000), 999u);
  EXPECT_EQ(scaled(0, 1000), 0u);
}

TEST(Greedy, TakesTheLargestAndTheLowestIdOnATie) {
  const std::vector<float> logits = {-1, 3, 2, 3, -0.0f};
  EXPECT_EQ(sample(logits, row_for(logits)).token_id, 1);
  const std::vector<float> zeros = {-1, -0.0f, 0.0f};
  EXPECT_EQ(sample(zeros, row_for(zeros)).token_id, 1);
  const std::vector<float> negative = {-5, -2, -2, -9};
  EXPECT_EQ(sample(negative, row_for(negative)).token_id, 1);
}

TEST(Greedy, IgnoresTheSeedAndEveryFilter) {
  const std::vector<float> logits = random_logits(97, 1);
  SampleRow row = row_for(logits);
  const int32_t best = sample(logits, row).token_id;
  row.top_k = 3;
  row.top_p = 0.2f;
  row.min_p = 0.5f;
  EXPECT_EQ(drawn(logits, row), std::set<int32_t>{best});
}

TEST(Filters, NeutralValuesAreNeutral) {
  const std::vector<float> logits = random_logits(97, 2, 1);
  SampleRow row = row_for(logits);
  row.temperature = 1;
  const std::set<int32_t> all = drawn(logits, row);
  EXPECT_GT(all.size(), 60u);
  for (const int32_t top_k : {0, 97, 97 + 5, std::numeric_limits<int32_t>::max()}) {
    SampleRow same = row;
    same.top_k = top_k;
    EXPECT_EQ(drawn(logits, same), all) << top_k;
  }
}

TEST(Filters, TheEndsOfTheirRanges) {
  const std::vector<float> logits = {1, 4, 4, 3.99f, 0};
  SampleRow row = row_for(logits);
  row.temperature = 2;
  SampleRow one = row;
  one.top_p = 0;
  EXPECT_EQ(drawn(logits, one), (std::set<int32_t>{1}));
  SampleRow ties = row;
  ties.min_p = 1;
  EXPECT_EQ(drawn(logits, ties), (std::set<int32_t>{1, 2}));
  SampleRow first = row;
  first.top_k = 1;
  EXPECT_EQ(drawn(logits, first), (std::set<int32_t>{1}));
  SampleRow three = row;
  three.top_k = 3;
  EXPECT_EQ(drawn(logits, three), (std::set<int32_t>{1, 2, 3}));
}

TEST(Filters, TemperatureComesBeforeTopP) {
  const std::vector<float> logits = {2.0f, 1.2f, 0.1f};
  SampleRow row = row_for(logits);
  row.temperature = 0.4f;
  row.top_p = 0.75f;
  EXPECT_EQ(drawn(logits, row), (std::set<int32_t>{0}));
  row.temperature = 1;  // as if it came last
  EXPECT_EQ(drawn(logits, row), (std::set<int32_t>{0, 1}));
}

// The rule as it is written, with a full sort.
std::set<int32_t> plain_top_p(const std::vector<float> &logits, int k, double top_p, double min_p,
                              double temperature) {
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  if (k > 0 && k < static_cast<int>(ids.size())) ids.resize(static_cast<size_t>(k));
  const double best = logits[static_cast<size_t>(ids[0])];
  double total = 0;
  const auto weight = [&](int32_t id) {
    return std::exp((logits[static_cast<size_t>(id)] - best) / temperature);
  };
  for (const int32_t id : ids) total += weight(id);
  std::set<int32_t> kept;
  double sum = 0;
  for (const int32_t id : ids) {
    if (weight(id) >= min_p) kept.insert(id);
    sum += weight(id);
    if (sum >= top_p * total) break;
  }
  return kept;
}

TEST(Filters, KeepWhatTheRuleSaysWithoutSortingTheVocabulary) {
  for (unsigned round = 0; round < 30; ++round) {
    const std::vector<float> logits = random_logits(60, round, 0.7f);
    SampleRow row = row_for(logits);
    row.temperature = 0.5f + 0.1f * static_cast<float>(round % 7);
    row.top_k = static_cast<int32_t>(round % 3) * 15;
    row.top_p = 0.3f + 0.02f * static_cast<float>(round % 10);
    row.min_p = 0.2f;
    const std::set<int32_t> kept =
        plain_top_p(logits, row.top_k, row.top_p, row.min_p, row.temperature);
    std::set<int32_t> found;
    for (uint64_t seed = 0; seed < 3000; ++seed) {
      row.seed = seed;
      found.insert(sample(logits, row).token_id);
    }
    EXPECT_EQ(found, kept) << round;
  }
}

TEST(Draw, FollowsTheDistribution) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.2f)};
  SampleRow row = row_for(logits);
  row.temperature = 1;
  std::vector<int> counts(3);
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    row.seed = 7;
    row.position = static_cast<uint64_t>(i);
    ++counts[static_cast<size_t>(sample(logits, row).token_id)];
  }
  EXPECT_NEAR(counts[0], 0.5 * kDraws, 0.02 * kDraws);
  EXPECT_NEAR(counts[1], 0.3 * kDraws, 0.02 * kDraws);
  EXPECT_NEAR(counts[2], 0.2 * kDraws, 0.02 * kDraws);
}

TEST(Draw, IsAFunctionOfSeedAndPosition) {
  const std::vector<float> logits = random_logits(200, 3, 1);
  SampleRow row = row_for(logits);
  row.temperature = 1;
  Sampler used;
  std::set<int32_t> by_position;
  for (uint64_t position = 0; position < 50; ++position) {
    row.position = position;
    row.seed = 11;
    const int32_t id = used.sample(logits.data(), row).token_id;
    EXPECT_EQ(id, sample(logits, row).token_id);  // a sampler keeps nothing between rows
    by_position.insert(id);
  }
  EXPECT_GT(by_position.size(), 20u);
}

// A prompt holds id 40 five times and id 41 never; the model prefers 40, narrowly.
TEST(Penalties, CountTheRightTokens) {
  std::vector<float> logits(97, 0);
  logits[40] = 5.0f;
  logits[41] = 4.9f;
  std::vector<TokenCount> counts = {{40, 5, 0}};
  SampleRow row = row_for(logits);
  row.counts = counts;
  row.frequency_penalty = 2;
  row.presence_penalty = 2;
  EXPECT_EQ(sample(logits, row).token_id, 40);  // both count generated tokens only
  counts = {{40, 5, 1}};
  row.counts = counts;
  EXPECT_EQ(sample(logits, row).token_id, 41);
  SampleRow repetition = row_for(logits);
  counts = {{40, 5, 0}};
  repetition.counts = counts;
  repetition.repetition_penalty = 1.3f;
  EXPECT_EQ(sample(logits, repetition).token_id, 41);  // repetition counts the prompt too
}

TEST(Penalties, HaveTheStatedSizes) {
  const std::vector<float> logits = {4, -4, 1, 0};
  std::vector<TokenCount> counts = {{0, 1, 3}, {1, 1, 0}};
  SampleRow row = row_for(logits);
  row.counts = counts;
  row.repetition_penalty = 2;
  row.frequency_penalty = 0.25f;
  row.presence_penalty = 0.5f;
  row.num_logprobs = 5;
  const Sampled sampled = sample(logits, row);
  ASSERT_EQ(sampled.candidates.size(), 4u);
  // 4 / 2 - 3 * 0.25 - 0.5 = 0.75; -4 * 2 = -8
  EXPECT_EQ(sampled.candidates[0].token_id, 2);
  EXPECT_EQ(sampled.candidates[1].token_id, 0);
  EXPECT_EQ(sampled.candidates[3].token_id, 1);
  EXPECT_NEAR(sampled.candidates[0].logprob - sampled.candidates[1].logprob, 0.25, 1e-6);
  EXPECT_NEAR(sampled.candidates[0].logprob - sampled.candidates[3].logprob, 9, 1e-6);
}

// 100 rows, 97 real tokens; the padding has the highest logits.
TEST(Padding, IsNeverChosenListedOrCounted) {
  std::vector<float> logits = random_logits(100, 4);
  logits[97] = logits[98] = logits[99] = 50;
  const std::vector<float> real(logits.begin(), logits.begin() + 97);
  SampleRow row = row_for(logits);
  row.num_choosable = 97;
  row.num_logprobs = 21;
  const Sampled with = sample(logits, row);
  SampleRow without_row = row_for(real);
  without_row.num_logprobs = 21;
  const Sampled without = sample(real, without_row);
  EXPECT_EQ(with.token_id, without.token_id);
  EXPECT_EQ(with.logprob, without.logprob);
  ASSERT_EQ(with.candidates.size(), 20u);
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(with.candidates[i].token_id, without.candidates[i].token_id);
    EXPECT_EQ(with.candidates[i].logprob, without.candidates[i].logprob);
  }
  row.temperature = 100;
  for (const int32_t id : drawn(logits, row)) EXPECT_LT(id, 97);
}

TEST(Padding, MayLieBetweenRealTokensAndHoldAnything) {
  std::vector<float> logits = {1, 50, 2, 3};
  TokenMask mask(4, true);
  mask.set(1, false);
  SampleRow row = row_for(logits);
  row.mask = mask.words();
  row.num_logprobs = 5;
  const Sampled sampled = sample(logits, row);
  EXPECT_EQ(sampled.token_id, 3);
  EXPECT_EQ(sampled.candidates.size(), 3u);
  EXPECT_NEAR(sampled.logprob, -std::log(1 + std::exp(-1.0) + std::exp(-2.0)), 1e-6);
  logits.push_back(kInfinity);  // behind num_choosable: no logit of a token
  EXPECT_EQ(sample(logits, row).outcome, SampleOutcome::kChosen);
}

// The best of a mask is found without a copy of the row unless more is asked for: both ways, and
// the plain one.
TEST(Masks, TheLowestOfTheBestWithinIsChosen) {
  std::mt19937 random(7);
  for (const int size : {1, 31, 32, 33, 64, 1000, 1023, 1024, 1025, 5000}) {
    for (const double share : {0.0, 0.002, 0.5, 0.98, 1.0}) {
      for (const float spread : {0.001f, 4.0f}) {  // rounded: nearly all are tied, or few
        std::vector<float> logits = random_logits(size, random(), spread);
        for (float &logit : logits) logit = std::round(logit * 8);
        TokenMask mask(size, false);
        int32_t expected = -1;
        for (int32_t id = 0; id < size; ++id) {
          mask.set(id, std::uniform_real_distribution<>()(random) < share);
          if (!mask.is_allowed(id)) continue;
          const bool is_first = expected < 0;
          if (is_first || logits[static_cast<size_t>(id)] > logits[static_cast<size_t>(expected)])
            expected = id;
        }
        SampleRow row = row_for(logits);
        row.mask = mask.words();
        const Sampled plain = sample(logits, row);
        row.num_logprobs = 1;
        const Sampled listed = sample(logits, row);
        EXPECT_EQ(plain.token_id, expected) << size << " ids, " << share << " of them allowed";
        EXPECT_EQ(listed.token_id, expected) << size << " ids, " << share << " of them allowed";
        EXPECT_EQ(plain.outcome,
                  expected < 0 ? SampleOutcome::kAllForbidden : SampleOutcome::kChosen);
        EXPECT_EQ(listed.outcome, plain.outcome);
        row.temperature = 50;
        for (int i = 0; i < 20 && expected >= 0; ++i) {
          row.seed = random();
          EXPECT_TRUE(mask.is_allowed(sample(logits, row).token_id));
        }
      }
    }
  }
}

TEST(Biases, AddAndForbid) {
  const std::vector<float> logits = {1, 2, 3};
  std::vector<TokenBias> biases = {{0, 2.5f}, {2, -kInfinity}};
  SampleRow row = row_for(logits);
  row.biases = biases;
  row.num_logprobs = 4;
  const Sampled sampled = sample(logits, row);
  EXPECT_EQ(sampled.token_id, 0);
  EXPECT_EQ(sampled.candidates.size(), 2u);  // what is forbidden is no candidate
  row.temperature = 50;
  EXPECT_EQ(drawn(logits, row), (std::set<int32_t>{0, 1}));
  biases = {{0, -kInfinity}, {1, -kInfinity}, {2, -kInfinity}};
  row.biases = biases;
  EXPECT_EQ(sample(logits, row).outcome, SampleOutcome::kAllForbidden);
}

TEST(Biases, BeyondTheRangeOfFloatsStayOrdered) {
  const std::vector<float> logits = {1e38f, 2, -1e38f};
  std::vector<TokenBias> biases = {{0, 3e38f}, {2, -3e38f}};
  SampleRow row = row_for(logits);
  row.biases = biases;
  row.temperature = 1;
  row.num_logprobs = 4;
  const Sampled sampled = sample(logits, row);
  EXPECT_EQ(sampled.outcome, SampleOutcome::kChosen);
  EXPECT_EQ(sampled.token_id, 0);
  EXPECT_EQ(sampled.logprob, 0);
}

TEST(Logits, ThatAreNotFiniteAreReported) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
    for (const size_t place : {size_t{0}, size_t{50}, size_t{96}}) {
      std::vector<float> logits = random_logits(97, 5);
      logits[place] = bad;
      const Sampled sampled = sample(logits, row_for(logits));
      EXPECT_EQ(sampled.outcome, SampleOutcome::kNotFinite);
      EXPECT_EQ(sampled.token_id, -1);
    }
  }
}

TEST(Logprobs, AreThoseOfTheWholeDistributionBeforeTemperature) {
  const std::vector<float> logits = {3, 1, 3, 0};
  SampleRow row = row_for(logits);
  row.temperature = 0.1f;
  row.top_k = 1;
  row.num_logprobs = 3;
  const Sampled sampled = sample(logits, row);
  const double sum = 2 * std::exp(3.0) + std::exp(1.0) + 1;
  EXPECT_NEAR(sampled.logprob, 3 - std::log(sum), 1e-6);
  ASSERT_EQ(sampled.candidates.size(), 2u);
  EXPECT_EQ(sampled.candidates[0].token_id, 0);  // the lowest id first on a tie
  EXPECT_EQ(sampled.candidates[1].token_id, 2);
  row.num_logprobs = 1;
  EXPECT_TRUE(sample(logits, row).candidates.empty());
  EXPECT_EQ(sample(logits, row).logprob, sampled.logprob);
}

TEST(Params, OutOfRangeAreRefusedByName) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto field = [](auto set) -> std::string {
    SamplingParams params;
    set(&params);
    try {
      validate(params);
    } catch (const Error &error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      return error.details()[0].second;
    }
    return "";
  };
  for (const float bad : {nan, kInfinity, -1.0f, 101.0f}) {
    EXPECT_EQ(field([&](SamplingParams *p) { p->temperature = bad; }), "temperature");
  }
  EXPECT_EQ(field([](SamplingParams *p) { p->top_k = -5; }), "top_k");
  for (const float bad : {nan, -1.0f, 1.5f}) {
    EXPECT_EQ(field([&](SamplingParams *p) { p->top_p = bad; }), "top_p");
    EXPECT_EQ(field([&](SamplingParams *p) { p->min_p = bad; }), "min_p");
  }
  for (const float bad : {nan, 0.0f, -1.0f, kInfinity}) {
    EXPECT_EQ(field([&](SamplingParams *p) { p->repetition_penalty = bad; }), "repetition_penalty");
  }
  EXPECT_EQ(field([](SamplingParams *p) { p->frequency_penalty = 101; }), "frequency_penalty");
  EXPECT_EQ(field([&](SamplingParams *p) { p->presence_penalty = nan; }), "presence_penalty");
  EXPECT_EQ(field([](SamplingParams *p) { p->top_p = 0; }), "");
}

}  // namespace
}  // namespace xllm
