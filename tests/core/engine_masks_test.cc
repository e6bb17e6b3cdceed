// Masks of constrained requests: what is chosen within them, who waits for them and who does not.

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "masked_requests.h"

namespace xllm {
namespace {

TEST(EngineMasks, EachTokenIsTheBestOfItsMask) {
  auto engine = make_engine();
  const std::vector<Ids> allowed = pairs(12);
  const Answer answer = run_masked(engine.get(), engine->submit(constrained(prompt_of(20))),
                                   [&](uint32_t index) { return only(allowed[index]); });
  EXPECT_EQ(answer.finished.status, Status::kOk);
  EXPECT_EQ(answer.ids, expected_within(prompt_of(20), allowed));
  expect_nothing_held(*engine);
}

TEST(EngineMasks, WhatAMaskLeavesOutHasNoPartInLogprobsOrDraws) {
  auto engine = make_engine();
  RequestOptions options = sampled(constrained(prompt_of(20), 40), 5);
  options.num_logprobs = 3;
  const std::vector<Ids> allowed(40, Ids{2, 7, 40});
  const uint64_t id = engine->submit(options);
  std::vector<Event> tokens;
  engine->push_masks({{id, 0, only(allowed[0])}});
  while (tokens.size() < 40) {
    for (const Event &event : engine->take_events(id, kSoon)) {
      if (event.kind != EventKind::kToken) continue;
      tokens.push_back(event);
      if (event.wants_mask) engine->push_masks({{id, event.token_index + 1, only({2, 7, 40})}});
    }
  }
  for (const Event &event : tokens) {
    EXPECT_TRUE(event.token_id == 2 || event.token_id == 7 || event.token_id == 40);
    ASSERT_EQ(event.candidates.size(), 3u);  // there are no others
    double sum = 0;
    for (const Candidate &candidate : event.candidates) sum += std::exp(candidate.logprob);
    EXPECT_NEAR(sum, 1, 1e-5);
  }
}

TEST(EngineMasks, AMaskOfEverythingChangesNothing) {
  // Prompts of a block less one, a block and more, in chunks: the last token waits for its mask.
  for (const int length : {1, 2, 15, 16, 17, 40}) {
    for (const int chunk : {1, 7, 64}) {
      EngineConfig config = small_config();
      config.prefill_chunk = chunk;
      auto engine = make_engine(config);
      const Answer free = run(engine.get(), sampled(request(prompt_of(length)), 3));
      const Answer masked =
          run_masked(engine.get(), engine->submit(sampled(constrained(prompt_of(length)), 3)),
                     [](uint32_t) { return everything(); });
      EXPECT_TRUE(masked == free) << length << " tokens in chunks of " << chunk;
    }
  }
}

TEST(EngineMasks, WhoWaitsForItsMaskHoldsNobodyUp) {
  auto engine = make_engine();
  const uint64_t held = engine->submit(constrained(prompt_of(20), 6));
  const Answer free = run(engine.get(), request(prompt_of(9, 1), 30));
  EXPECT_EQ(free.ids, expected_greedy(prompt_of(9, 1), 30));
  SlotSnapshot slot;
  ASSERT_TRUE(engine->get_slot(0, &slot));
  EXPECT_EQ(slot.request_id, held);
  EXPECT_EQ(slot.num_tokens, 19);  // all but the last one
  EXPECT_EQ(engine->stats().num_running, 1u);
  const Answer answer =
      run_masked(engine.get(), held, [](uint32_t index) { return only({index == 0 ? 4 : 5}); });
  EXPECT_EQ(answer.ids, (Ids{4, 5, 5, 5, 5, 5}));
}

TEST(EngineMasks, MasksMayComeAheadOfTheirTurnAndTheLaterOneCounts) {
  auto engine = make_engine();
  const uint64_t id = engine->submit(constrained(prompt_of(5), 3));
  engine->push_masks({{id, 2, only({3})}, {id, 1, only({9})}, {id, 1, only({2})}});
  engine->push_masks({{id, 0, only({1})}});
  const Answer answer = wait_for(engine.get(), id);
  EXPECT_EQ(answer.ids, (Ids{1, 2, 3}));
  engine->push_masks({{id, 1, everything()}});  // too late, and harmless
}

TEST(EngineMasks, AnEventSaysWhetherAMaskIsWanted) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  auto engine = make_engine(small_config(), control);
  // Keeps the loop in a step while a request and its masks come in.
  const uint64_t other = engine->submit(request(prompt_of(4), 20));
  control->gate.wait_until_begun(1);
  const uint64_t id = engine->submit(constrained(prompt_of(5), 3));
  engine->push_masks({{id, 0, only({1})}, {id, 1, only({2})}});
  const uint64_t unmasked = engine->submit(constrained(prompt_of(5), 3));
  control->gate.open();
  std::vector<bool> wants;
  bool is_finished = false;
  while (!is_finished) {
    for (const Event &event : engine->take_events(id, kSoon)) {
      is_finished = event.kind == EventKind::kFinished;
      if (is_finished) continue;
      wants.push_back(event.wants_mask);
      if (event.wants_mask) engine->push_masks({{id, event.token_index + 1, only({3})}});
    }
  }
  EXPECT_EQ(wants, (std::vector<bool>{false, false, true, false}));  // accepted, three tokens
  const std::vector<Event> events = engine->take_events(unmasked, kSoon);
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events.front().kind, EventKind::kAccepted);
  EXPECT_TRUE(events.front().wants_mask);
  engine->cancel(unmasked);
  EXPECT_EQ(wait_for(engine.get(), other).finished.status, Status::kOk);
}

TEST(EngineMasks, AnEndIsAllowedOnlyWhereTheMaskSaysSoAndEndsTheAnswer) {
  auto engine = make_engine(small_config(), scripted(5, {kEnd, kEnd, kEnd, kEnd}));
  RequestOptions options = constrained(prompt_of(5), 12);
  options.ignore_eos = false;
  const Answer answer = run_masked(engine.get(), engine->submit(options), [](uint32_t index) {
    return index < 2 ? only({1, 2}) : only({1, kEnd});
  });
  EXPECT_EQ(answer.ids, (Ids{1, 1, kEnd}));
  EXPECT_EQ(answer.finished.finish_reason, FinishReason::kEos);
  EXPECT_EQ(answer.finished.matched_token_id, kEnd);
  EXPECT_EQ(answer.text, "bb");
}

TEST(EngineMasks, PaddingIsNeverChosenWhateverAMaskSays) {
  auto control = std::make_shared<Control>();
  control->logits = [](const Ids &, float *logits) {
    for (int i = 0; i < kVocab; ++i) logits[i] = static_cast<float>(i);
  };
  auto engine = make_engine(small_config(), control);
  RequestOptions options = constrained(prompt_of(5), 2);
  options.num_logprobs = 20;
  const Answer answer = run_masked(engine.get(), engine->submit(options),
                                   [](uint32_t) { return only({3, 55, 56, 60, 63}); });
  EXPECT_EQ(answer.ids, (Ids{55, 55}));
  EXPECT_EQ(answer.logprobs.size(), 6u);  // of the chosen one and of the two that exist
  const Answer none = run_masked(engine.get(), engine->submit(constrained(prompt_of(5), 2)),
                                 [](uint32_t) { return only({56, 63}); });
  EXPECT_EQ(none.finished.status, Status::kInvalidArgument);
}

TEST(EngineMasks, WhatLeavesNoTokenEndsThatRequestAlone) {
  auto engine = make_engine();
  const uint64_t neighbour = engine->submit(request(prompt_of(9, 1), 30));
  const Answer empty = run_masked(engine.get(), engine->submit(constrained(prompt_of(5), 4)),
                                  [](uint32_t index) { return index < 2 ? only({1}) : only({}); });
  EXPECT_EQ(empty.finished.status, Status::kInvalidArgument);
  EXPECT_NE(empty.finished.message.find("mask"), std::string::npos);
  EXPECT_EQ(empty.ids, (Ids{1, 1}));
  RequestOptions biased = constrained(prompt_of(5), 4);
  biased.biases = {{1, -std::numeric_limits<float>::infinity()}};
  const Answer both =
      run_masked(engine.get(), engine->submit(biased), [](uint32_t) { return only({1}); });
  EXPECT_EQ(both.finished.status, Status::kInvalidArgument);
  EXPECT_EQ(wait_for(engine.get(), neighbour).ids, expected_greedy(prompt_of(9, 1), 30));
  expect_nothing_held(*engine);
}

TEST(EngineMasks, APreemptedRequestGoesOnWithinItsMasks) {
  EngineConfig config = small_config(5);  // of 16 tokens each: not enough for two of 60
  config.use_prefix_cache = false;
  auto engine = make_engine(config);
  const std::vector<Ids> allowed = pairs(40);
  const auto mask_of = [&](uint32_t index) { return only(allowed[index]); };
  const uint64_t senior = engine->submit(constrained(prompt_of(20, 1), 40));
  const uint64_t junior = engine->submit(constrained(prompt_of(20, 2), 40));
  Answer second;
  std::thread other([&] { second = run_masked(engine.get(), junior, mask_of); });
  const Answer first = run_masked(engine.get(), senior, mask_of);
  other.join();
  EXPECT_EQ(first.ids, expected_within(prompt_of(20, 1), allowed));
  EXPECT_EQ(second.ids, expected_within(prompt_of(20, 2), allowed));
  EXPECT_GT(engine->stats().num_preemptions, 0u);
}

// The one who computes masks cancels where a constraint is complete: no answer fails before that.
TEST(EngineMasks, WhoFillsThePoolWaitsForItsMaskBeforeItIsExhausted) {
  for (const bool is_complete : {true, false}) {
    std::atomic<int> num_taken{0};
    EngineConfig config = small_config(2);  // of 16 tokens each
    config.on_taken = [&] { ++num_taken; };
    auto engine = make_engine(config);
    const uint64_t id = engine->submit(constrained(prompt_of(20), 30));
    std::vector<PositionMask> masks;
    for (uint32_t index = 0; index < 13; ++index) masks.push_back({id, index, only({4})});
    engine->push_masks(std::move(masks));
    Answer answer;
    while (answer.ids.size() < 13) {  // the last of them has no place in the pool
      for (const Event &event : engine->take_events(id, kSoon)) add(event, &answer);
    }
    for (int i = 0; i < 2; ++i) {  // a whole step lies between
      const int num_before = num_taken;
      engine->push_masks({{id, 20, only({4})}});
      wait_until([&] { return num_taken > num_before; });
    }
    ASSERT_EQ(engine->stats().num_running, 1u);
    if (is_complete) {
      engine->cancel(id);
    } else {
      engine->push_masks({{id, 13, only({4})}});
    }
    EXPECT_EQ(wait_for(engine.get(), id).finished.status,
              is_complete ? Status::kCancelled : Status::kKvExhausted);
  }
}

TEST(EngineMasks, CancelAndDeadlineEndWhoWaitsForAMask) {
  auto engine = make_engine();
  const uint64_t id = engine->submit(constrained(prompt_of(20)));
  wait_until([&] { return engine->stats().blocks_used > 0; });
  engine->cancel(id);
  EXPECT_EQ(wait_for(engine.get(), id).finished.status, Status::kCancelled);
  RequestOptions late = constrained(prompt_of(20));
  late.max_duration_s = 0.01;
  EXPECT_EQ(run(engine.get(), late).finished.status, Status::kDeadlineExceeded);
  expect_nothing_held(*engine);
}

TEST(EngineMasks, DecodesOfSlotsWaitForTheirsToo) {
  for (const DecodeMode mode : {DecodeMode::kBatched, DecodeMode::kPerSlot}) {
    EngineConfig config = small_config();
    config.decode_mode = mode;
    auto engine = make_engine(config);
    const SlotRef held = acquire(engine.get());
    const SlotRef free = acquire(engine.get());
    prefill(engine.get(), held, prompt_of(20));
    prefill(engine.get(), free, prompt_of(9, 1));
    const uint64_t id = start_decode(engine.get(), held, constrained({}, 4));
    EXPECT_EQ(decode(engine.get(), free, request({}, 20)).ids,
              expected_greedy(prompt_of(9, 1), 20));
    const std::vector<Ids> allowed = pairs(4);
    engine->push_masks({{id, 0, only(allowed[0])}});
    const Answer answer =
        run_masked(engine.get(), id, [&](uint32_t index) { return only(allowed[index]); });
    EXPECT_EQ(answer.ids, expected_within(prompt_of(20), allowed));
    // The next decode in the slot is a request of its own, unconstrained, and counts from 0.
    Ids history = prompt_of(20);
    history.insert(history.end(), answer.ids.begin(), answer.ids.end());
    EXPECT_EQ(decode(engine.get(), held, request({}, 5)).ids, expected_greedy(history, 5));
  }
}

TEST(EngineMasks, WrongMasksAreRefusedAsAWhole) {
  auto engine = make_engine();
  const uint64_t id = engine->submit(constrained(prompt_of(5), 1));
  const auto entry_of = [&](std::vector<PositionMask> masks, Status expected) {
    try {
      engine->push_masks(std::move(masks));
    } catch (const Error &error) {
      EXPECT_EQ(error.status(), expected);
      for (const auto &[key, value] : error.details()) {
        if (key == "entry") return value;
      }
    }
    return std::string("none");
  };
  EXPECT_EQ(entry_of({{id, 0, everything()}, {id + 1, 0, everything()}}, Status::kNotFound), "1");
  EXPECT_EQ(entry_of({{id, 0, everything()}, {0, 0, everything()}}, Status::kNotFound), "1");
  EXPECT_EQ(entry_of({{id, 512, everything()}, {id, 0, everything()}}, Status::kInvalidArgument),
            "0");
  EXPECT_TRUE(engine->take_events(id, 0).empty() || engine->stats().num_generated_tokens == 0);
  engine->push_masks({{id, 0, only({7})}});
  EXPECT_EQ(wait_for(engine.get(), id).ids, (Ids{7}));
}

}  // namespace
}  // namespace xllm
