// Cancel, deadlines, queues, refusals, failures and the end of engines: nothing is leaked, nobody
// waits for the device, neighbours keep their bytes.

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/event_queue.h"
#include "engine_fixture.h"

namespace xllm {
namespace {

TEST(Engine, ARequestHearsOfItsSeatBeforeItsPromptIsComputed) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  auto engine = make_engine(small_config(), control);
  const uint64_t id = engine->submit(request(prompt_of(6), 4));
  control->gate.wait_until_begun(1);  // and held there
  const std::vector<Event> events = engine->take_events(id, kSoon);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, EventKind::kAccepted);
  EXPECT_EQ(engine->stats().slots_used, 1u);
  control->gate.open();
  EXPECT_EQ(wait_for(engine.get(), id).ids, expected_greedy(prompt_of(6), 4));
}

TEST(Engine, CancelInEveryStateFreesSlotAndBlocksWithinAStep) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  EngineConfig config = small_config();
  config.max_slots = 2;
  config.prefill_chunk = 8;
  auto engine = make_engine(config, control);
  const Ids steady_prompt = prompt_of(6);
  const uint64_t steady = engine->submit(request(steady_prompt, 40));
  control->gate.wait_until_begun(1);
  const uint64_t other = engine->submit(request(prompt_of(64, 1), 40));
  const uint64_t queued = engine->submit(request(prompt_of(64, 2), 40));
  control->gate.allow(2);
  control->gate.wait_until_begun(3);  // `other` is in the middle of its prompt

  SlotSnapshot slot;
  ASSERT_TRUE(engine->get_slot(1, &slot));
  EXPECT_EQ(slot.state, SlotState::kPrefilling);
  EXPECT_EQ(slot.request_id, other);
  engine->cancel(other);
  engine->cancel(other);
  engine->cancel(queued);
  ASSERT_TRUE(engine->get_slot(1, &slot));
  EXPECT_EQ(slot.state, SlotState::kCancelling);
  control->gate.allow(1);
  control->gate.wait_until_begun(4);  // the step after the one in progress
  const Answer cancelled = wait_for(engine.get(), other);
  EXPECT_EQ(cancelled.finished.status, Status::kCancelled);
  EXPECT_FALSE(cancelled.prefills.empty());
  const Answer never_ran = wait_for(engine.get(), queued);
  EXPECT_EQ(never_ran.finished.status, Status::kCancelled);
  EXPECT_EQ(never_ran.num_accepted, 0);

  control->gate.allow(1);
  control->gate.wait_until_begun(5);
  ASSERT_TRUE(engine->get_slot(1, &slot));
  EXPECT_EQ(slot.state, SlotState::kFree);
  EXPECT_EQ(engine->stats().slots_used, 1u);
  EXPECT_EQ(engine->stats().blocks_used, 1u);

  engine->cancel(steady);  // while decoding
  control->gate.open();
  const Answer decoding = wait_for(engine.get(), steady);
  EXPECT_EQ(decoding.finished.status, Status::kCancelled);
  // What came before the cancel is what would have come anyway.
  const Ids whole = expected_greedy(steady_prompt, 40);
  EXPECT_EQ(decoding.ids,
            Ids(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(decoding.ids.size())));
  EXPECT_LE(engine->stats().cancel_steps_max, 1u);
  EXPECT_EQ(engine->stats().num_requests_cancelled, 3u);
  expect_nothing_held(*engine);
  engine->cancel(steady);  // it has ended: harmless
  EXPECT_EQ(status_of([&] { engine->cancel(99); }), Status::kNotFound);
  EXPECT_EQ(status_of([&] { engine->cancel(0); }), Status::kNotFound);
}

TEST(Engine, CancelTogetherWithTheLastTokenReleasesOnce) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(small_config(), control);
  for (int round = 0; round < 50; ++round) {
    const uint64_t id = engine->submit(request(prompt_of(3, round), 1));
    engine->cancel(id);
    const Answer answer = wait_for(engine.get(), id);
    EXPECT_TRUE(answer.finished.status == Status::kCancelled ||
                answer.finished.finish_reason == FinishReason::kMaxTokens);
  }
  expect_nothing_held(*engine);
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.num_requests_cancelled + stats.num_requests_finished, 50u);
}

TEST(Engine, CancelLeavesTheNeighboursBytesAlone) {
  auto engine = make_engine();
  const uint64_t kept = engine->submit(request(prompt_of(20), 60));
  for (int i = 0; i < 20; ++i) {
    const uint64_t id = engine->submit(request(prompt_of(30, i), 60));
    engine->cancel(id);
    wait_for(engine.get(), id);
  }
  EXPECT_EQ(wait_for(engine.get(), kept).ids, expected_greedy(prompt_of(20), 60));
}

TEST(Engine, DeadlinesEndRequestsWhereverTheyAre) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  EngineConfig config = small_config();
  config.max_slots = 1;
  auto engine = make_engine(config, control);
  RequestOptions running = request(prompt_of(6), 200);
  running.max_duration_s = 1e-3;
  const uint64_t decoding = engine->submit(request(prompt_of(5), 200));
  control->gate.wait_until_begun(1);
  RequestOptions waiting = request(prompt_of(6), 200);
  waiting.max_queue_s = 1e-3;
  const uint64_t late = engine->submit(running);
  const uint64_t queued = engine->submit(waiting);
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(3)) {
    std::this_thread::yield();
  }
  control->gate.allow(1);
  const Answer expired = wait_for(engine.get(), late);
  EXPECT_EQ(expired.finished.status, Status::kDeadlineExceeded);
  EXPECT_EQ(expired.num_accepted, 0);  // expired work is never started
  EXPECT_EQ(wait_for(engine.get(), queued).finished.status, Status::kQueueTimeout);
  engine->cancel(decoding);
  control->gate.open();
  wait_for(engine.get(), decoding);
  expect_nothing_held(*engine);
}

TEST(Engine, AFullQueueRefusesAndRecovers) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  EngineConfig config = small_config();
  config.max_slots = 1;
  config.max_queue = 2;
  auto engine = make_engine(config, control);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(engine->submit(request(prompt_of(4, i), 2)));
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(status_of([&] { engine->submit(request(prompt_of(4), 2)); }), Status::kQueueFull);
  }
  control->gate.open();
  for (const uint64_t id : ids) {
    EXPECT_EQ(wait_for(engine.get(), id).finished.status, Status::kOk);
  }
  EXPECT_EQ(run(engine.get(), request(prompt_of(4), 2)).finished.status, Status::kOk);
}

TEST(Engine, WhatCanNeverFitIsRefusedAndTheNextMovesOn) {
  auto engine = make_engine(small_config(/*num_blocks=*/3));
  EXPECT_EQ(status_of([&] { engine->submit(request(prompt_of(48), 1)); }), Status::kNeverFits);
  EXPECT_EQ(run(engine.get(), request(prompt_of(47), 1)).finished.status, Status::kOk);
}

TEST(Engine, RefusesFieldsOutOfRangeByName) {
  auto engine = make_engine();
  const auto field = [&](const std::function<void(RequestOptions *)> &change) {
    RequestOptions options = request(prompt_of(4), 4);
    change(&options);
    std::string name;
    EXPECT_EQ(status_of([&] { engine->submit(options); }, &name), Status::kInvalidArgument);
    return name;
  };
  using R = RequestOptions;
  EXPECT_EQ(field([](R *r) { r->prompt.clear(); }), "prompt");
  EXPECT_EQ(field([](R *r) { r->prompt[2] = -1; }), "prompt[2]");
  EXPECT_EQ(field([](R *r) { r->prompt[3] = 64; }), "prompt[3]");
  EXPECT_EQ(field([](R *r) { r->sampling.top_p = -1; }), "top_p");
  EXPECT_EQ(field([](R *r) { r->min_tokens = 5; }), "min_tokens");
  EXPECT_EQ(field([](R *r) { r->num_logprobs = 21; }), "num_logprobs");
  EXPECT_EQ(field([](R *r) { r->stop_strings = {""}; }), "stop_strings[0]");
  EXPECT_EQ(field([](R *r) { r->stop_strings = {"a", std::string(257, 'x')}; }), "stop_strings[1]");
  EXPECT_EQ(field([](R *r) { r->stop_strings = {"\xFF"}; }), "stop_strings[0]");
  EXPECT_EQ(field([](R *r) { r->stop_strings.assign(17, "x"); }), "stop_strings");
  EXPECT_EQ(field([](R *r) { r->stop_token_ids = {1, 64}; }), "stop_token_ids[1]");
  EXPECT_EQ(field([](R *r) { r->biases = {{64, 0}}; }), "logit_biases[0]");
  EXPECT_EQ(field([](R *r) { r->biases = {{1, 0}, {1, 2}}; }), "logit_biases");
  EXPECT_EQ(field([](R *r) { r->biases = {{1, std::numeric_limits<float>::infinity()}}; }),
            "logit_biases[0]");
  EXPECT_EQ(field([](R *r) { r->max_queue_s = -1; }), "max_queue_s");
  EXPECT_EQ(field([](R *r) { r->max_duration_s = std::numeric_limits<double>::quiet_NaN(); }),
            "max_duration_s");
  EXPECT_EQ(engine->stats().num_waiting, 0u);
}

TEST(Engine, RefusesConfigurationsByName) {
  const auto field = [](const std::function<void(EngineConfig *)> &change) {
    EngineConfig config = small_config();
    change(&config);
    std::string name;
    EXPECT_EQ(status_of([&] { make_engine(config); }, &name), Status::kInvalidArgument);
    return name;
  };
  using C = EngineConfig;
  EXPECT_EQ(field([](C *c) { c->max_slots = 0; }), "max_slots");
  EXPECT_EQ(field([](C *c) { c->max_slots = 1025; }), "max_slots");
  EXPECT_EQ(field([](C *c) { c->prefill_chunk = 0; }), "prefill_chunk");
  EXPECT_EQ(field([](C *c) { c->block_size = 48; }), "block_size");
  EXPECT_EQ(field([](C *c) { c->max_queue = -1; }), "max_queue");
  EXPECT_EQ(field([](C *c) { c->max_seq_len = 513; }), "max_seq_len");
  EXPECT_EQ(field([](C *c) { c->max_seq_len = 1; }), "max_seq_len");
  EXPECT_EQ(field([](C *c) { c->kv_memory = 1; }), "kv_memory");
}

// ---- several engines, the end of engines ----

TEST(Engine, TwoEnginesGiveTheBytesTheyGiveAlone) {
  const RequestOptions options = sampled(request(prompt_of(30), 40), 9);
  const Answer alone = run(make_engine().get(), options);
  EngineConfig other_config = small_config(30);
  other_config.max_slots = 2;
  other_config.decode_mode = DecodeMode::kPerSlot;
  auto one = make_engine();
  auto two = make_engine(other_config);
  const uint64_t first = one->submit(options);
  for (int i = 0; i < 5; ++i) two->submit(request(prompt_of(20, i), 30));
  two.reset();  // in the middle of its work
  EXPECT_EQ(wait_for(one.get(), first), alone);
}

TEST(Engine, IsDestroyedWithLiveRequests) {
  for (const int num_steps : {0, 1, 5}) {
    auto control = std::make_shared<Control>();
    control->gate.close();
    auto engine = make_engine(small_config(), control);
    for (int i = 0; i < 12; ++i) engine->submit(request(prompt_of(20, i), 100));
    control->gate.wait_until_begun(1);
    control->gate.allow(num_steps);
    control->gate.wait_until_begun(1 + num_steps);
    control->gate.open();
    engine.reset();
  }
}

TEST(EventQueue, CloseTurnsWaitingThreadsAwayBeforeItReturns) {
  EventQueue queue;
  queue.open_private(3);
  std::atomic<int> num_told{0};
  std::vector<std::thread> threads;
  for (const uint64_t id : {0, 3, 3}) {
    threads.emplace_back([&, id] {
      const bool is_told = status_of([&] { queue.take(id, -1); }) == Status::kEngineFailed;
      num_told += is_told ? 1 : 0;
    });
  }
  while (queue.num_waiting() < 3) std::this_thread::yield();
  queue.close();
  EXPECT_EQ(queue.num_waiting(), 0);
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(num_told, 3);
}

TEST(EventQueue, ATimeoutGivesNothing) {
  EventQueue queue;
  queue.open_private(3);
  EXPECT_TRUE(queue.take(0, 0).empty());
  EXPECT_TRUE(queue.take(3, 1e-4).empty());
  EXPECT_EQ(status_of([&] { queue.take(4, 1e-4); }), Status::kNotFound);
}

TEST(Engine, AFailedDeviceEndsEverythingAsEngineFailed) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  EngineConfig config = small_config();
  config.max_slots = 1;
  auto engine = make_engine(config, control);
  const uint64_t running = engine->submit(request(prompt_of(4), 50));
  control->gate.wait_until_begun(1);
  const uint64_t queued = engine->submit(request(prompt_of(4), 50));
  control->fails = true;
  control->gate.open();
  EXPECT_EQ(wait_for(engine.get(), running).finished.status, Status::kEngineFailed);
  EXPECT_EQ(wait_for(engine.get(), queued).finished.status, Status::kEngineFailed);
  EXPECT_EQ(status_of([&] { engine->take_events(0, -1); }), Status::kEngineFailed);
  EXPECT_EQ(status_of([&] { engine->submit(request(prompt_of(4))); }), Status::kEngineFailed);
  EXPECT_TRUE(engine->stats().has_failed);
  expect_nothing_held(*engine);
}

TEST(Engine, DrainingLetsRunningRequestsEnd) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  auto engine = make_engine(small_config(), control);
  const uint64_t id = engine->submit(request(prompt_of(4), 10));
  engine->drain();
  EXPECT_EQ(status_of([&] { engine->submit(request(prompt_of(4))); }), Status::kDraining);
  control->gate.open();
  EXPECT_EQ(wait_for(engine.get(), id).ids.size(), 10u);
  EXPECT_TRUE(engine->stats().is_draining);
}

// ---- events ----

TEST(Engine, SharedEventsMakeTheDescriptorReadableUntilTaken) {
  auto engine = make_engine();
  pollfd poll_fd = {engine->event_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&poll_fd, 1, 0), 0);
  RequestOptions options = request(prompt_of(4), 5);
  options.delivery = Delivery::kShared;
  const uint64_t first = engine->submit(options);
  const uint64_t second = engine->submit(options);
  size_t num_tokens = 0;
  int num_finished = 0;
  while (num_finished < 2) {
    ASSERT_EQ(poll(&poll_fd, 1, static_cast<int>(kSoon * 1000)), 1);
    for (const Event &event : engine->take_events(0, 0)) {
      EXPECT_TRUE(event.request_id == first || event.request_id == second);
      num_tokens += event.kind == EventKind::kToken;
      num_finished += event.kind == EventKind::kFinished;
    }
  }
  EXPECT_EQ(num_tokens, 10u);
  EXPECT_EQ(poll(&poll_fd, 1, 0), 0);
  EXPECT_TRUE(engine->take_events(0, 0).empty());
  // A shared request is no private one, and a private one is gone with its last event.
  EXPECT_EQ(status_of([&] { engine->take_events(first, 0); }), Status::kNotFound);
  const uint64_t own = engine->submit(request(prompt_of(4), 2));
  wait_for(engine.get(), own);
  EXPECT_EQ(status_of([&] { engine->take_events(own, 0); }), Status::kNotFound);
}

TEST(Engine, SnapshotsDoNotWaitForAStepInProgress) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  auto engine = make_engine(small_config(), control);
  const uint64_t id = engine->submit(request(prompt_of(4), 3));
  control->gate.wait_until_begun(1);
  const double before = engine->stats().heartbeat_age_s;
  EXPECT_GE(engine->stats().heartbeat_age_s, before);  // the loop is stuck, and this says so
  SlotSnapshot slot;
  EXPECT_TRUE(engine->get_slot(0, &slot));
  EXPECT_FALSE(engine->get_slot(8, &slot));
  EXPECT_FALSE(engine->get_slot(-1, &slot));
  EXPECT_EQ(engine->stats().slots_total, 8u);
  control->gate.open();
  wait_for(engine.get(), id);
  EXPECT_EQ(engine->stats().num_steps, 3u);
}

}  // namespace
}  // namespace xllm
