// The prefix cache as requests and slots see it: who shares with whom, and that sharing shows in
// counts alone.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine_fixture.h"

namespace xllm {
namespace {

RequestOptions salted(Ids prompt, const std::string &salt) {
  RequestOptions options = sampled(request(std::move(prompt), 6), 9);
  options.cache_salt = salt;
  return options;
}

uint32_t cached_of(Engine *engine, const RequestOptions &options) {
  return run(engine, options).accepted.num_cached_tokens;
}

TEST(EngineCache, BlocksAreSharedOnlyWithinASalt) {
  auto engine = make_engine();
  const Ids prompt = prompt_of(40);
  const Answer cold = run(engine.get(), salted(prompt, "a"));
  EXPECT_EQ(cached_of(engine.get(), salted(prompt, "b")), 0u);
  EXPECT_EQ(cached_of(engine.get(), salted(prompt, "")), 0u);
  EXPECT_EQ(cached_of(engine.get(), salted(prompt, std::string("a\0b", 3))), 0u);
  for (const char *salt : {"a", "b", ""}) {
    const Answer warm = run(engine.get(), salted(prompt, salt));
    EXPECT_EQ(warm.accepted.num_cached_tokens, 32u) << salt;
    EXPECT_EQ(warm, cold) << salt;
  }
  expect_nothing_held(*engine);
}

TEST(EngineCache, WhoBypassesItNeitherReadsNorLeavesAnything) {
  auto engine = make_engine();
  RequestOptions bypassing = salted(prompt_of(40), "");
  bypassing.bypasses_cache = true;
  const Answer alone = run(engine.get(), bypassing);
  EXPECT_EQ(engine->stats().blocks_cached, 0u);
  EXPECT_EQ(cached_of(engine.get(), salted(prompt_of(40), "")), 0u);
  const Answer beside = run(engine.get(), bypassing);  // although it is there now
  EXPECT_EQ(beside.accepted.num_cached_tokens, 0u);
  EXPECT_EQ(beside, alone);
}

TEST(EngineCache, SaltAndBypassHoldThroughAPreemption) {
  for (const bool bypasses : {false, true}) {
    EngineConfig config = small_config(/*num_blocks=*/7);
    auto control = std::make_shared<Control>();
    auto engine = make_engine(config, control);
    control->gate.close();  // until both are there: only together do they need more than the pool
    std::vector<uint64_t> ids;
    for (int i = 0; i < 2; ++i) {
      RequestOptions options = request(prompt_of(33), 40);  // the same prompt, different salts
      options.cache_salt = std::string(1, static_cast<char>('a' + i));
      options.bypasses_cache = bypasses;
      ids.push_back(engine->submit(options));
    }
    control->gate.open();
    for (const uint64_t id : ids) {
      const Answer answer = wait_for(engine.get(), id);
      EXPECT_EQ(answer.ids, expected_greedy(prompt_of(33), 40));
      EXPECT_EQ(answer.accepted.num_cached_tokens, 0u);
    }
    EXPECT_GT(engine->stats().num_preemptions, 0u);
    EXPECT_EQ(engine->stats().blocks_cached == 0, bypasses);
  }
}

TEST(EngineCache, ASlotsFirstPromptDecidesAndTheOthersStayOut) {
  auto engine = make_engine();
  const auto fill = [&](SlotRef ref, int length, const std::string &salt, bool bypasses) {
    RequestOptions options = request(prompt_of(length));
    options.cache_salt = salt;
    options.bypasses_cache = bypasses;
    return wait_for(engine.get(), engine->prefill(ref, options)).finished.num_cached_tokens;
  };
  const SlotRef first = acquire(engine.get());
  EXPECT_EQ(fill(first, 40, "a", false), 0u);
  EXPECT_EQ(fill(first, 40, "b", false), 0u);  // appended: of no interest to the cache
  const SlotRef second = acquire(engine.get());
  EXPECT_EQ(fill(second, 40, "b", true), 0u);
  EXPECT_EQ(cached_of(engine.get(), salted(prompt_of(40), "b")), 0u);
  EXPECT_EQ(cached_of(engine.get(), salted(prompt_of(40), "a")), 32u);
  engine->release(second);
  const SlotRef third = acquire(engine.get());
  EXPECT_EQ(fill(third, 40, "a", false), 32u);
}

TEST(EngineCache, CountCachedTellsWhatARequestThenFinds) {
  auto engine = make_engine();
  const auto count = [&](const Ids &prompt, const std::string &salt) {
    return static_cast<uint32_t>(engine->count_cached(prompt, DecodeMode::kAuto, salt));
  };
  EXPECT_EQ(count(prompt_of(40), "a"), 0u);
  run(engine.get(), salted(prompt_of(40), "a"));
  for (const int length : {1, 15, 16, 17, 32, 33, 40}) {
    EXPECT_EQ(count(prompt_of(length), "b"), 0u) << length;
    const uint32_t told = count(prompt_of(length), "a");
    EXPECT_EQ(told, static_cast<uint32_t>((length - 1) / 16 * 16)) << length;
    EXPECT_EQ(cached_of(engine.get(), salted(prompt_of(length), "a")), told) << length;
  }
  EXPECT_EQ(status_of([&] { count(prompt_of(512), "a"); }), Status::kPromptTooLong);
  EXPECT_EQ(status_of([&] { engine->count_cached(prompt_of(5), DecodeMode::kPerSlot, ""); }),
            Status::kDecodeModeMismatch);
}

TEST(EngineCache, CountCachedMayBeAskedWhileTheLoopRuns) {
  auto engine = make_engine(small_config(/*num_blocks=*/12));  // evicts all the time
  std::vector<uint64_t> ids;
  for (int i = 0; i < 60; ++i) ids.push_back(engine->submit(request(prompt_of(70, i % 7), 3)));
  while (engine->stats().num_requests_finished < 60) {
    for (int i = 0; i < 7; ++i) {
      const int found = engine->count_cached(prompt_of(70, i), DecodeMode::kAuto, "");
      ASSERT_TRUE(found >= 0 && found <= 64 && found % 16 == 0);
    }
  }
  int sum = 0;  // what the last ones have left
  for (int i = 0; i < 7; ++i) sum += engine->count_cached(prompt_of(70, i), DecodeMode::kAuto, "");
  EXPECT_GT(sum, 0);
  for (const uint64_t id : ids) EXPECT_EQ(wait_for(engine.get(), id).finished.status, Status::kOk);
}

TEST(EngineCache, TooLongASaltIsRefused) {
  auto engine = make_engine();
  std::string field;
  const RequestOptions options = salted(prompt_of(5), std::string(4097, 'x'));
  EXPECT_EQ(status_of([&] { engine->submit(options); }, &field), Status::kInvalidArgument);
  EXPECT_EQ(field, "cache_salt");
}

}  // namespace
}  // namespace xllm
