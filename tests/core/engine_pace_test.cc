// Deadlines that cannot be met, turns of tenants, and the gap between tokens, in a running engine.

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine_fixture.h"

namespace xllm {
namespace {

// A device whose every step takes so long, at least.
std::shared_ptr<Control> slow(int step_ms) {
  auto control = std::make_shared<Control>();
  control->step_ms = step_ms;
  return control;
}

TEST(EngineDeadlines, WhatCannotStartInTimeIsRefusedAtOnce) {
  EngineConfig config = small_config();
  config.prefill_chunk = 8;
  auto engine = make_engine(config, slow(10));
  RequestOptions hurried = request(prompt_of(200, 1), 2);
  hurried.max_duration_s = 0.02;
  // Nothing is measured yet: it is tried, and ends late.
  EXPECT_EQ(run(engine.get(), hurried).finished.status, Status::kDeadlineExceeded);
  const uint64_t long_one = engine->submit(request(prompt_of(400), 2));
  wait_until([&] { return engine->stats().prefill_tokens_per_s > 0; });
  // 25 steps of its own, 10 ms each at least, and those of the one before it.
  std::string estimated;
  try {
    engine->submit(hurried);
    ADD_FAILURE() << "it was queued";
  } catch (const Error &error) {
    EXPECT_EQ(error.status(), Status::kDeadlineUnreachable);
    for (const auto &[key, value] : error.details()) {
      if (key == "estimated_wait_s") estimated = value;
    }
  }
  EXPECT_GT(std::stod("0" + estimated), 0.2);
  hurried.max_duration_s = 600;
  const uint64_t patient = engine->submit(hurried);
  RequestOptions unhurried = request(prompt_of(10, 2), 2);
  EXPECT_EQ(run(engine.get(), unhurried).finished.status, Status::kOk);
  for (const uint64_t id : {long_one, patient}) {
    EXPECT_EQ(wait_for(engine.get(), id).finished.status, Status::kOk);
  }
}

TEST(EngineDeadlines, WhatIsCachedCountsAsComputed) {
  EngineConfig config = small_config();
  config.prefill_chunk = 8;
  auto engine = make_engine(config, slow(10));
  const Answer cold = run(engine.get(), request(prompt_of(200), 1));
  EXPECT_EQ(cold.finished.status, Status::kOk);
  RequestOptions again = request(prompt_of(200), 1);
  again.max_duration_s = 0.1;  // less than half of what it took, and enough for what is left
  EXPECT_NO_THROW(wait_for(engine.get(), engine->submit(again)));
  again.bypasses_cache = true;
  EXPECT_EQ(status_of([&] { engine->submit(again); }), Status::kDeadlineUnreachable);
}

TEST(EngineDeadlines, ShortPromptsMakeNoLongOneLookSlow) {
  auto engine = make_engine(small_config(), slow(10));
  for (int i = 0; i < 5; ++i) run(engine.get(), request(prompt_of(4, i), 1));
  RequestOptions longer = request(prompt_of(400), 1);
  longer.max_duration_s = 0.3;  // two steps, some 20 ms; by the short ones' rows it would be 1 s
  EXPECT_EQ(status_of([&] { wait_for(engine.get(), engine->submit(longer)); }), Status::kOk);
}

TEST(EngineTenants, TakeTurns) {
  EngineConfig config = small_config();
  config.max_slots = 1;
  auto control = std::make_shared<Control>();
  control->gate.close();
  auto engine = make_engine(config, control);
  const auto submit = [&](uint64_t tenant, int seed) {
    RequestOptions options = request(prompt_of(6, seed), 3);
    options.tenant = tenant;
    return engine->submit(options);
  };
  std::vector<uint64_t> ids = {submit(1, 0)};
  control->gate.wait_until_begun(1);
  for (int i = 1; i < 4; ++i) ids.push_back(submit(1, i));
  ids.push_back(submit(2, 9));
  control->gate.open();
  double queued_s[5];
  for (size_t i = 0; i < 5; ++i) queued_s[i] = wait_for(engine.get(), ids[i]).finished.queue_s;
  EXPECT_LT(queued_s[4], queued_s[1]);  // who came last, but alone
}

TEST(EngineGap, AStreamsTokensAreApartByAStepAndPromptsComeInPieces) {
  EngineConfig config = small_config();
  config.prefill_chunk = 200;
  config.max_token_gap_s = 0.05;
  auto control = slow(1);
  control->row_us = 1000;  // 200 rows would take four times the bound
  auto engine = make_engine(config, control);
  const uint64_t steady = engine->submit(request(prompt_of(6), 400));
  wait_until([&] { return engine->stats().num_generated_tokens >= 3; });
  control->most_rows = 0;
  const Answer answer = run(engine.get(), request(prompt_of(400, 1), 3));
  EXPECT_EQ(answer.ids, expected_greedy(prompt_of(400, 1), 3));
  EXPECT_LT(control->most_rows, 100);
  EXPECT_GT(engine->stats().token_gap_max_s, 0);
  EXPECT_EQ(engine->stats().token_gap_bound_s, 0.05);
  EXPECT_EQ(wait_for(engine.get(), steady).ids, expected_greedy(prompt_of(6), 400));
  // With nobody beside it, a prompt takes whole chunks.
  control->most_rows = 0;
  EXPECT_EQ(run(engine.get(), request(prompt_of(400, 2), 3)).ids,
            expected_greedy(prompt_of(400, 2), 3));
  EXPECT_EQ(control->most_rows, 200);
}

TEST(EngineGap, ABoundOutOfRangeIsRefused) {
  for (const double bound : {-1.0, 3601.0, static_cast<double>(NAN)}) {
    EngineConfig config = small_config();
    config.max_token_gap_s = bound;
    std::string field;
    EXPECT_EQ(status_of([&] { make_engine(config); }, &field), Status::kInvalidArgument);
    EXPECT_EQ(field, "max_token_gap_s");
  }
}

}  // namespace
}  // namespace xllm
