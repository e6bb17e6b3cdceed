// Blocks with several users: forked slots, and the outputs of one request. Nobody's bytes change,
// and what is shared is computed and stored once.

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine_fixture.h"

namespace xllm {
namespace {

SlotRef fork(Engine *engine, SlotRef ref, double lease_s = 60) {
  const SlotSnapshot slot = engine->fork(ref, lease_s);
  EXPECT_EQ(slot.state, SlotState::kReady);
  return {slot.index, slot.epoch};
}

Ids operator+(Ids a, const Ids &b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(ForkedSlots, ContinueAsTheirOriginalWouldAndLeaveItAsItIs) {
  for (const DecodeMode mode : {DecodeMode::kBatched, DecodeMode::kPerSlot}) {
    // The last block just begun, partly filled, and filled.
    for (const int length : {17, 24, 32, 33}) {
      EngineConfig config = small_config();
      config.decode_mode = mode;
      auto engine = make_engine(config);
      const SlotRef first = acquire(engine.get());
      prefill(engine.get(), first, prompt_of(length));
      const Ids said = decode(engine.get(), first, request({}, 5)).ids;
      const SlotRef second = fork(engine.get(), first);
      EXPECT_EQ(look(*engine, second).num_tokens, length + 5);
      EXPECT_EQ(look(*engine, second).decode_mode, mode);
      const SlotRef third = fork(engine.get(), second);
      const Ids history = prompt_of(length) + said;
      // They go different ways, one step after the other.
      prefill(engine.get(), second, {3, 4, 5});
      for (const SlotRef ref : {first, third}) {
        EXPECT_EQ(decode(engine.get(), ref, request({}, 30)).ids, expected_greedy(history, 30))
            << length;
      }
      EXPECT_EQ(decode(engine.get(), second, request({}, 30)).ids,
                expected_greedy(history + Ids{3, 4, 5}, 30));
      for (const SlotRef ref : {first, second, third}) engine->release(ref);
      wait_until([&] { return engine->stats().blocks_used == 0; });
      expect_nothing_held(*engine);
    }
  }
}

TEST(ForkedSlots, ShareWholeBlocksAndCopyThePartlyFilledOne) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(small_config(), control);
  const SlotRef first = acquire(engine.get());
  prefill(engine.get(), first, prompt_of(40));  // two blocks, and half of a third
  EXPECT_EQ(engine->stats().blocks_used, 3u);
  const SlotRef second = fork(engine.get(), first);
  EXPECT_EQ(decode(engine.get(), second, request({}, 4)).ids, expected_greedy(prompt_of(40), 4));
  EXPECT_EQ(engine->stats().blocks_used, 4u);
  EXPECT_EQ(control->num_copied_blocks, 1);
  EXPECT_EQ(decode(engine.get(), first, request({}, 4)).ids, expected_greedy(prompt_of(40), 4));
  EXPECT_EQ(control->num_copied_blocks, 1);  // it is the only user by now
  EXPECT_EQ(engine->stats().blocks_used, 4u);
}

TEST(ForkedSlots, MayEndInAnyOrder) {
  auto engine = make_engine();
  const SlotRef first = acquire(engine.get());
  prefill(engine.get(), first, prompt_of(40));
  const SlotRef second = fork(engine.get(), first);
  engine->release(first);  // before the loop has seen the fork, perhaps
  const Ids expected = expected_greedy(prompt_of(40), 20);
  EXPECT_EQ(decode(engine.get(), second, request({}, 20)).ids, expected);
  const SlotRef third = fork(engine.get(), second, 1e-9);  // a lease that is over at once
  wait_until([&] { return look(*engine, third).state == SlotState::kFree; });
  EXPECT_EQ(status_of([&] { engine->fork(first, 60); }), Status::kStaleEpoch);
  engine->release(second);
  wait_until([&] { return engine->stats().blocks_used == 0; });
}

// The loop takes in what has come, and only then ends ownerships: what is forked and released in
// between must not be ended before it has been forked.
TEST(ForkedSlots, AreEndedOnlyAfterTheLoopHasForkedThem) {
  for (const bool releases_original : {false, true}) {
    EngineConfig config = small_config();
    std::function<void()> between;
    std::atomic<bool> is_due{false};
    config.on_taken = [&] {
      if (is_due.exchange(false)) between();
    };
    auto engine = make_engine(config);
    const SlotRef first = acquire(engine.get());
    prefill(engine.get(), first, prompt_of(40));
    SlotRef second;
    between = [&] {
      second = fork(engine.get(), first);
      engine->release(releases_original ? first : second);
    };
    is_due = true;
    run(engine.get(), request(prompt_of(5), 2));  // a step of which is the one in between
    EXPECT_FALSE(is_due);
    const SlotRef ended = releases_original ? first : second;
    const SlotRef kept = releases_original ? second : first;
    wait_until([&] { return look(*engine, ended).state == SlotState::kFree; });
    EXPECT_EQ(decode(engine.get(), kept, request({}, 20)).ids, expected_greedy(prompt_of(40), 20));
    // The next owner of that seat finds nothing in it.
    const SlotSnapshot next = engine->acquire(DecodeMode::kBatched, ended.slot, 60);
    const SlotRef again{next.index, next.epoch};
    prefill(engine.get(), again, prompt_of(20, 3));
    EXPECT_EQ(look(*engine, again).num_tokens, 20);
    EXPECT_EQ(decode(engine.get(), again, request({}, 20)).ids,
              expected_greedy(prompt_of(20, 3), 20));
    engine->release(kept);
    engine->release(again);
    wait_until([&] { return engine->stats().slots_used == 0; });
    expect_nothing_held(*engine);
  }
}

TEST(ForkedSlots, DecodeInLockStepWithTheirOriginal) {
  auto engine = make_engine();
  const SlotRef first = acquire(engine.get());
  prefill(engine.get(), first, prompt_of(40));
  const SlotRef refs[] = {first, fork(engine.get(), first), fork(engine.get(), first)};
  std::vector<RequestOptions> how;
  for (uint64_t i = 0; i < 3; ++i) how.push_back(sampled(request({}, 30), i));
  const std::vector<uint64_t> ids = engine->decode_batch({refs, 3}, how);
  for (size_t i = 0; i < 3; ++i) {
    const Answer answer = wait_for(engine.get(), ids[i]);
    const Answer alone = run(make_engine().get(), sampled(request(prompt_of(40), 30), i));
    EXPECT_EQ(answer.ids, alone.ids) << i;
    EXPECT_EQ(answer.logprobs, alone.logprobs) << i;
  }
}

TEST(ForkedSlots, AreRefusedWhereThereIsNoneToForkOrNoSeat) {
  EngineConfig config = small_config();
  config.max_slots = 2;
  auto control = std::make_shared<Control>();
  auto engine = make_engine(config, control);
  const SlotRef first = acquire(engine.get());
  EXPECT_EQ(status_of([&] { engine->fork(first, 60); }), Status::kSlotState);  // ACQUIRED
  prefill(engine.get(), first, prompt_of(20));
  EXPECT_EQ(status_of([&] { engine->fork(first, 0); }), Status::kInvalidArgument);
  EXPECT_EQ(status_of([&] { engine->fork({first.slot, first.epoch + 1}, 60); }),
            Status::kStaleEpoch);
  EXPECT_EQ(status_of([&] { engine->fork({7, 1}, 60); }), Status::kNotFound);
  const SlotRef second = fork(engine.get(), first);
  EXPECT_EQ(status_of([&] { engine->fork(first, 60); }), Status::kNoFreeSlot);
  engine->release(second);
  control->gate.close();
  const uint64_t id = start_decode(engine.get(), first, request({}, 5));
  EXPECT_EQ(status_of([&] { engine->fork(first, 60); }), Status::kSlotState);  // DECODING
  control->gate.open();
  wait_for(engine.get(), id);
}

TEST(ForkedSlots, WithoutABlockForItsCopyTheCallEndsAndTheOthersGoOn) {
  EngineConfig config = small_config(/*num_blocks=*/3);
  auto engine = make_engine(config);
  const SlotRef first = acquire(engine.get());
  prefill(engine.get(), first, prompt_of(40));
  const SlotRef second = fork(engine.get(), first);
  const Answer refused = decode(engine.get(), second, request({}, 4));
  EXPECT_EQ(refused.finished.status, Status::kKvExhausted);
  engine->release(second);
  wait_until([&] { return look(*engine, second).state == SlotState::kFree; });
  EXPECT_EQ(decode(engine.get(), first, request({}, 4)).ids, expected_greedy(prompt_of(40), 4));
}

// ---- outputs ----

std::vector<Answer> run_outputs(Engine *engine, const RequestOptions &options, int count) {
  std::vector<Answer> answers;
  for (const uint64_t id : engine->submit(options, count)) answers.push_back(wait_for(engine, id));
  return answers;
}

TEST(Outputs, HaveTheBytesOfRequestsOfTheirOwn) {
  for (const bool bypasses : {false, true}) {
    for (const int length : {1, 15, 16, 17, 40, 48}) {
      for (const int chunk : {7, 64}) {
        EngineConfig config = small_config();
        config.prefill_chunk = chunk;
        auto engine = make_engine(config);
        RequestOptions options = sampled(request(prompt_of(length), 20), 50);
        options.bypasses_cache = bypasses;
        const std::vector<Answer> answers = run_outputs(engine.get(), options, 4);
        for (size_t i = 0; i < 4; ++i) {
          const Answer alone =
              run(make_engine().get(), sampled(request(prompt_of(length), 20), 50 + i));
          EXPECT_EQ(answers[i], alone) << length << " " << i;
          EXPECT_EQ(answers[i].accepted.seed, 50 + i);
        }
        expect_nothing_held(*engine);
      }
    }
  }
}

TEST(Outputs, ComputeAndStoreTheirPromptOnce) {
  auto control = std::make_shared<Control>();
  EngineConfig config = small_config();
  config.prefill_chunk = 16;
  auto engine = make_engine(config, control);
  RequestOptions options = request(prompt_of(100), 10);
  options.bypasses_cache = true;  // sharing is not the cache's doing
  const std::vector<uint64_t> ids = engine->submit(options, 4);
  std::vector<Answer> answers;
  for (const uint64_t id : ids) answers.push_back(wait_for(engine.get(), id));
  // The prompt once, and for each of the others its last token; then one row for each token but the
  // last.
  EXPECT_EQ(control->num_rows, 100 + 3 + 4 * 9);
  EXPECT_EQ(answers[0].accepted.num_cached_tokens, 0u);
  for (size_t i = 1; i < 4; ++i) EXPECT_EQ(answers[i].accepted.num_cached_tokens, 99u);
  EXPECT_EQ(control->num_copied_blocks, 3);
}

TEST(Outputs, GoOnWhenTheFirstOneEndsOrIsCancelled) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  EngineConfig config = small_config();
  config.prefill_chunk = 16;
  config.max_slots = 2;  // so the last ones wait longer than the first one lives
  auto engine = make_engine(config, control);
  const std::vector<uint64_t> ids = engine->submit(request(prompt_of(100), 10), 5);
  control->gate.allow(2);
  control->gate.wait_until_begun(3);
  engine->cancel(ids[0]);  // in the middle of the prompt
  control->gate.open();
  EXPECT_EQ(wait_for(engine.get(), ids[0]).finished.status, Status::kCancelled);
  for (size_t i = 1; i < ids.size(); ++i) {
    EXPECT_EQ(wait_for(engine.get(), ids[i]).ids, expected_greedy(prompt_of(100), 10)) << i;
  }
  expect_nothing_held(*engine);
}

TEST(Outputs, GoOnWhenTheFirstOneIsCancelledBeforeTheLoopHasSeenIt) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  auto engine = make_engine(small_config(), control);
  const uint64_t other = engine->submit(request(prompt_of(5), 2));
  control->gate.wait_until_begun(1);
  const std::vector<uint64_t> ids = engine->submit(request(prompt_of(40), 10), 3);
  engine->cancel(ids[0]);
  control->gate.open();
  wait_for(engine.get(), other);
  EXPECT_EQ(wait_for(engine.get(), ids[0]).finished.status, Status::kCancelled);
  for (size_t i = 1; i < ids.size(); ++i) {
    EXPECT_EQ(wait_for(engine.get(), ids[i]).ids, expected_greedy(prompt_of(40), 10)) << i;
  }
  expect_nothing_held(*engine);
}

TEST(Outputs, SurvivePreemption) {
  EngineConfig config = small_config(/*num_blocks=*/9);
  auto engine = make_engine(config);
  const std::vector<Answer> answers =
      run_outputs(engine.get(), sampled(request(prompt_of(40), 60), 5), 4);
  for (size_t i = 0; i < answers.size(); ++i) {
    const Answer alone = run(make_engine().get(), sampled(request(prompt_of(40), 60), 5 + i));
    EXPECT_EQ(answers[i], alone) << i;
  }
  EXPECT_GT(engine->stats().num_preemptions, 0u);
  expect_nothing_held(*engine);
}

TEST(Outputs, AreQueuedAllOrNone) {
  EngineConfig config = small_config();
  config.max_slots = 1;
  config.max_queue = 3;
  auto control = std::make_shared<Control>();
  control->gate.close();
  auto engine = make_engine(config, control);
  const uint64_t first = engine->submit(request(prompt_of(5), 5));
  EXPECT_EQ(status_of([&] { engine->submit(request(prompt_of(5), 5), 4); }), Status::kQueueFull);
  EXPECT_EQ(engine->submit(request(prompt_of(5), 5), 3).size(), 3u);
  std::string field;
  for (const int count : {0, -1, 129, 5}) {  // 5: more than there will ever be places for
    EXPECT_EQ(status_of([&] { engine->submit(request(prompt_of(5), 5), count); }, &field),
              Status::kInvalidArgument);
    EXPECT_EQ(field, "num_outputs");
  }
  control->gate.open();
  wait_for(engine.get(), first);
}

}  // namespace
}  // namespace xllm
