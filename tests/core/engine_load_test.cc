// The load of a second weight set, in pieces: what runs goes on, what comes meanwhile is served,
// and what waits for the set can be ended.
#include "engine_fixture.h"

namespace xllm {
namespace {

EngineConfig auto_config() {
  EngineConfig config = small_config();
  config.decode_mode = DecodeMode::kAuto;
  config.max_token_gap_s = 0.004;  // a slice of a load is a quarter of it
  return config;
}

RequestOptions per_slot(Ids prompt, uint32_t max_tokens) {
  RequestOptions options = request(std::move(prompt), max_tokens);
  options.decode_mode = DecodeMode::kPerSlot;
  return options;
}

// Pieces go on until something holds, or for so long that the test fails.
std::function<bool()> until(std::function<bool()> holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  return [=, holds = std::move(holds)] {
    if (std::chrono::steady_clock::now() > end) {
      ADD_FAILURE() << "it never came to hold while the set was loaded";
      return false;
    }
    return !holds();
  };
}

TEST(LoadByPieces, StreamsOfTheOtherSetGoOn) {
  auto control = std::make_shared<Control>();
  control->step_ms = 1;  // the stream is not over before it begins
  auto engine = make_engine(auto_config(), control);
  const uint64_t steady = engine->submit(request(prompt_of(6), 400));
  wait_until([&] { return engine->stats().num_generated_tokens >= 3; });
  uint64_t before = 0;
  control->on_load = [&] { before = engine->stats().num_generated_tokens; };
  control->has_piece = until([&] { return engine->stats().num_generated_tokens >= before + 10; });
  EXPECT_EQ(run(engine.get(), per_slot(prompt_of(9, 1), 5)).ids,
            expected_greedy(prompt_of(9, 1), 5));
  EXPECT_EQ(wait_for(engine.get(), steady).ids, expected_greedy(prompt_of(6), 400));
  EXPECT_EQ(control->num_loaded, 2);
  expect_nothing_held(*engine);
}

TEST(LoadByPieces, RequestsOfTheOtherSetComeAndGo) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(auto_config(), control);
  run(engine.get(), request(prompt_of(6), 3));
  uint64_t other = 0;
  control->on_load = [&] { other = engine->submit(request(prompt_of(7, 2), 6)); };
  control->has_piece = until([&] { return engine->stats().num_requests_finished >= 2; });
  EXPECT_EQ(run(engine.get(), per_slot(prompt_of(9, 1), 5)).ids,
            expected_greedy(prompt_of(9, 1), 5));
  EXPECT_EQ(wait_for(engine.get(), other).ids, expected_greedy(prompt_of(7, 2), 6));
}

TEST(LoadByPieces, WhatWaitsForTheSetCanBeEndedMeanwhile) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(auto_config(), control);
  run(engine.get(), request(prompt_of(6), 3));
  const SlotRef slot = acquire(engine.get(), DecodeMode::kPerSlot);
  uint64_t first = 0, on_slot = 0;
  std::atomic<bool> is_loading{false}, may_end{false};
  control->on_load = [&] { is_loading = true; };
  control->has_piece = [&] { return !may_end; };
  first = engine->submit(per_slot(prompt_of(9, 1), 5));
  wait_until([&] { return is_loading.load(); });
  // Memory that the load has taken already is no reason to refuse who comes for the same set.
  control->free_bytes = 0;
  const uint64_t second = engine->submit(per_slot(prompt_of(8, 3), 4));
  RequestOptions hurried = per_slot(prompt_of(8, 4), 4);
  hurried.max_duration_s = 0.01;
  const uint64_t late = engine->submit(hurried);
  on_slot = engine->prefill(slot, request(prompt_of(5)));
  engine->cancel(first);
  engine->release(slot);
  EXPECT_EQ(wait_for(engine.get(), first).finished.status, Status::kCancelled);
  EXPECT_EQ(wait_for(engine.get(), late).finished.status, Status::kDeadlineExceeded);
  EXPECT_EQ(wait_for(engine.get(), on_slot).finished.status, Status::kLeaseLost);
  EXPECT_EQ(engine->stats().num_waiting, 1u);
  control->free_bytes = uint64_t{1} << 30;
  may_end = true;
  EXPECT_EQ(wait_for(engine.get(), second).ids, expected_greedy(prompt_of(8, 3), 4));
  wait_until([&] { return engine->stats().slots_used == 0; });
  expect_nothing_held(*engine);
}

TEST(LoadByPieces, OneThatFailsEndsAllThatWaitForItAndNothingElse) {
  auto control = std::make_shared<Control>();
  control->step_ms = 1;  // the stream is not over before it begins
  auto engine = make_engine(auto_config(), control);
  const uint64_t steady = engine->submit(request(prompt_of(6), 200));
  wait_until([&] { return engine->stats().num_generated_tokens >= 3; });
  uint64_t second = 0;
  control->on_load = [&] { second = engine->submit(per_slot(prompt_of(8, 3), 4)); };
  control->has_piece = [&, num = 0]() mutable {
    if (++num < 50) return true;
    throw Error(Status::kMemory, "no memory for the rest");
  };
  const uint64_t first = engine->submit(per_slot(prompt_of(9, 1), 5));
  EXPECT_EQ(wait_for(engine.get(), first).finished.status, Status::kMemory);
  EXPECT_EQ(wait_for(engine.get(), second).finished.status, Status::kMemory);
  control->on_load = nullptr;
  control->has_piece = nullptr;
  EXPECT_EQ(run(engine.get(), per_slot(prompt_of(9, 1), 5)).ids,
            expected_greedy(prompt_of(9, 1), 5));
  EXPECT_EQ(wait_for(engine.get(), steady).ids, expected_greedy(prompt_of(6), 200));
}

TEST(LoadByPieces, AFaultOfTheDeviceMeanwhileEndsTheEngine) {
  auto control = std::make_shared<Control>();
  control->step_ms = 1;  // the stream is not over before it begins
  auto engine = make_engine(auto_config(), control);
  const uint64_t steady = engine->submit(request(prompt_of(6), 400));
  wait_until([&] { return engine->stats().num_generated_tokens >= 3; });
  control->on_load = [&] { control->fails = true; };
  control->has_piece = [num = 0]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return ++num < 100;
  };
  const uint64_t waiting = engine->submit(per_slot(prompt_of(9, 1), 5));
  for (const uint64_t id : {steady, waiting}) {
    EXPECT_EQ(wait_for(engine.get(), id).finished.status, Status::kEngineFailed);
  }
  EXPECT_TRUE(engine->stats().has_failed);
}

}  // namespace
}  // namespace xllm
