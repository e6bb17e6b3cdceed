// What a failure tells besides its status, and what it leaves alone.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine_fixture.h"

namespace xllm {
namespace {

TEST(EngineFailures, AStepWithoutMemoryEndsTheRequestThatAskedForMostOfIt) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(small_config(), control);
  const uint64_t steady = engine->submit(request(prompt_of(6), 60));
  wait_until([&] { return engine->stats().num_generated_tokens > 3; });
  control->most_rows_with_memory = 20;
  const uint64_t large = engine->submit(request(prompt_of(100, 1), 5));
  const Answer failed = wait_for(engine.get(), large);
  EXPECT_EQ(failed.finished.status, Status::kMemory);
  EXPECT_EQ(failed.finished.details, "bytes_needed=1000\n");
  EXPECT_EQ(wait_for(engine.get(), steady).ids, expected_greedy(prompt_of(6), 60));
  // The engine lives: what fits is served.
  EXPECT_EQ(run(engine.get(), request(prompt_of(15, 2), 5)).ids,
            expected_greedy(prompt_of(15, 2), 5));
  EXPECT_FALSE(engine->stats().has_failed);
  expect_nothing_held(*engine);
}

TEST(EngineFailures, AmongRowsOfOneEachTheYoungestEnds) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  auto engine = make_engine(small_config(), control);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(engine->submit(request(prompt_of(1, i), 9)));
  control->most_rows_with_memory = 2;
  control->gate.open();
  EXPECT_EQ(wait_for(engine.get(), ids[2]).finished.status, Status::kMemory);
  for (int i = 0; i < 2; ++i) {
    const Answer answer = wait_for(engine.get(), ids[static_cast<size_t>(i)]);
    EXPECT_EQ(answer.ids, expected_greedy(prompt_of(1, i), 9));
  }
}

TEST(EngineFailures, KvExhaustedTellsHowManyBlocks) {
  auto engine = make_engine(small_config(/*num_blocks=*/3));
  const Answer outgrown = run(engine.get(), request(prompt_of(40), 100));
  EXPECT_EQ(outgrown.finished.details, "blocks_needed=4\nblocks_free=3\nblocks_total=3\n");
  const SlotRef first = acquire(engine.get());
  const SlotRef second = acquire(engine.get());
  prefill(engine.get(), first, prompt_of(30));
  prefill(engine.get(), second, prompt_of(15, 1));
  const Answer refused = decode(engine.get(), second, request({}, 5));
  EXPECT_EQ(refused.finished.status, Status::kKvExhausted);
  EXPECT_EQ(refused.finished.details, "blocks_needed=2\nblocks_free=0\nblocks_total=3\n");
}

TEST(EngineFailures, NonFiniteLogitsTellThePosition) {
  auto control = std::make_shared<Control>();
  control->logits = [](const Ids &context, float *logits) {
    RecallBackend::hashed_logits(context, logits);
    if (context.size() == 12) logits[3] = NAN;
  };
  auto engine = make_engine(small_config(), control);
  const Answer answer = run(engine.get(), request(prompt_of(10), 9));
  EXPECT_EQ(answer.finished.status, Status::kNonFiniteLogits);
  EXPECT_EQ(answer.finished.details, "position=12\n");
}

TEST(EngineReports, TheRankOfEachTokenAndHowOftenARequestWasPreempted) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(small_config(/*num_blocks=*/7), control);
  control->gate.close();  // until both are there: only together do they need more than the pool
  std::vector<uint64_t> ids;
  for (int i = 0; i < 2; ++i) {
    ids.push_back(engine->submit(sampled(request(prompt_of(33, i), 40), static_cast<uint64_t>(i))));
  }
  control->gate.open();
  uint32_t num_preemptions = 0;
  bool has_other_than_best = false;
  for (int i = 0; i < 2; ++i) {
    bool is_finished = false;
    while (!is_finished) {
      for (const Event &event : engine->take_events(ids[static_cast<size_t>(i)], kSoon)) {
        is_finished = event.kind == EventKind::kFinished;
        if (is_finished) num_preemptions += event.num_preemptions;
        if (event.kind != EventKind::kToken) continue;
        // Among the two best candidates its place is known; behind them it is further down.
        const auto place = std::find_if(
            event.candidates.begin(), event.candidates.end(),
            [&](const Candidate &candidate) { return candidate.token_id == event.token_id; });
        if (place != event.candidates.end()) {
          EXPECT_EQ(event.rank, static_cast<uint32_t>(place - event.candidates.begin()) + 1);
        } else {
          EXPECT_GT(event.rank, 2u);
        }
        has_other_than_best |= event.rank > 1;
      }
    }
  }
  EXPECT_TRUE(has_other_than_best);
  EXPECT_EQ(num_preemptions, engine->stats().num_preemptions);
  EXPECT_GT(num_preemptions, 0u);
  const Answer plain = run(engine.get(), request(prompt_of(5), 1));
  EXPECT_EQ(plain.ids.size(), 1u);
}

}  // namespace
}  // namespace xllm
