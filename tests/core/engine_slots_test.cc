// Slots as a resource: what a caller does with one gives the tokens that a request gives, whatever
// ends a call leaves the slot usable, and whatever ends an ownership gives everything back.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine_fixture.h"

namespace xllm {
namespace {

const DecodeMode kModes[] = {DecodeMode::kBatched, DecodeMode::kPerSlot};

EngineConfig config_of(DecodeMode mode, int num_blocks = 256) {
  EngineConfig config = small_config(num_blocks);
  config.decode_mode = mode;
  return config;
}

Ids join(std::initializer_list<Ids> parts) {
  Ids all;
  for (const Ids &part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

RequestOptions decode_of(uint32_t max_tokens) { return request({}, max_tokens); }

SlotStep step(Engine *engine, SlotRef ref, bool wants_logits = false) {
  const SamplingParams greedy;
  if (look(*engine, ref).decode_mode == DecodeMode::kPerSlot) {
    return engine->step_slot(ref, greedy, wants_logits);
  }
  return engine->step_batch({&ref, 1}, {&greedy, 1}, wants_logits).front();
}

// ---- tokens ----

TEST(Slots, PrefillAndDecodeGiveTheTokensOfARequest) {
  for (const DecodeMode mode : kModes) {
    for (const uint64_t seed : {0, 7}) {
      const auto with_seed = [&](const RequestOptions &options) {
        return seed == 0 ? options : sampled(options, seed);
      };
      auto engine = make_engine(config_of(mode));
      const Answer expected = run(engine.get(), with_seed(request(prompt_of(40), 12)));
      const SlotRef ref = acquire(engine.get());
      const Answer filled = prefill(engine.get(), ref, prompt_of(40));
      EXPECT_EQ(filled.finished.finish_reason, FinishReason::kPrefilled);
      EXPECT_EQ(filled.num_accepted, 1);
      EXPECT_EQ(filled.finished.num_cached_tokens, 32u);  // of the request before
      EXPECT_EQ(look(*engine, ref).num_tokens, 40);
      EXPECT_EQ(look(*engine, ref).state, SlotState::kReady);
      EXPECT_EQ(decode(engine.get(), ref, with_seed(decode_of(12))), expected);
      EXPECT_EQ(look(*engine, ref).num_tokens, 52);
      EXPECT_EQ(look(*engine, ref).state, SlotState::kReady);
      engine->release(ref);
      wait_until([&] { return engine->stats().blocks_used == 0; });
      expect_nothing_held(*engine);
    }
  }
}

TEST(Slots, SeveralDecodesContinueOneAnotherWithPenalties) {
  for (const DecodeMode mode : kModes) {
    auto engine = make_engine(config_of(mode));
    const Answer whole = run(engine.get(), sampled(request(prompt_of(20), 15), 3));
    const SlotRef ref = acquire(engine.get());
    prefill(engine.get(), ref, prompt_of(20));
    Ids ids;
    for (const uint32_t count : {1, 4, 10}) {
      const Answer part = decode(engine.get(), ref, sampled(decode_of(count), 3));
      EXPECT_EQ(part.finished.finish_reason, FinishReason::kMaxTokens);
      ids = join({ids, part.ids});
    }
    EXPECT_EQ(ids, whole.ids);
  }
}

TEST(Slots, APromptAppendedContinuesTheHistory) {
  for (const DecodeMode mode : kModes) {
    for (const int chunk : {1, 7, 512}) {
      EngineConfig config = config_of(mode);
      config.prefill_chunk = chunk;
      auto engine = make_engine(config);
      const SlotRef ref = acquire(engine.get());
      prefill(engine.get(), ref, prompt_of(30));
      const Ids first = decode(engine.get(), ref, decode_of(5)).ids;
      EXPECT_EQ(first, expected_greedy(prompt_of(30), 5));
      const Answer appended = prefill(engine.get(), ref, prompt_of(21, 3));
      EXPECT_EQ(appended.finished.num_prompt_tokens, 21u);
      EXPECT_EQ(appended.finished.num_cached_tokens, 0u);
      const Ids history = join({prompt_of(30), first, prompt_of(21, 3)});
      EXPECT_EQ(look(*engine, ref).num_tokens, static_cast<int>(history.size()));
      EXPECT_EQ(decode(engine.get(), ref, decode_of(6)).ids, expected_greedy(history, 6));
    }
  }
}

TEST(Slots, StepsGiveOneTokenEachAndItsLogits) {
  for (const DecodeMode mode : kModes) {
    auto engine = make_engine(config_of(mode));
    const SlotRef ref = acquire(engine.get());
    prefill(engine.get(), ref, prompt_of(17));
    Ids context = prompt_of(17);
    for (int i = 0; i < 6; ++i) {
      const SlotStep chosen = step(engine.get(), ref, i % 2 == 0);
      EXPECT_EQ(chosen.status, Status::kOk);
      if (i % 2 == 0) {
        std::vector<float> logits(RecallBackend::kVocabSize);
        RecallBackend::hashed_logits(context, logits.data());
        EXPECT_EQ(chosen.logits, logits);
      } else {
        EXPECT_TRUE(chosen.logits.empty());
      }
      context.push_back(chosen.token_id);
    }
    EXPECT_EQ(Ids(context.begin() + 17, context.end()), expected_greedy(prompt_of(17), 6));
  }
}

TEST(Slots, AOneTokenPromptNeedsNoPrefillStep) {
  auto engine = make_engine();
  const SlotRef ref = acquire(engine.get());
  EXPECT_EQ(prefill(engine.get(), ref, {4}).finished.finish_reason, FinishReason::kPrefilled);
  EXPECT_EQ(engine->stats().num_steps, 0u);
  EXPECT_EQ(decode(engine.get(), ref, decode_of(3)).ids, expected_greedy({4}, 3));
}

TEST(Slots, ABatchAdvancesInLockStep) {
  auto control = std::make_shared<Control>();
  EngineConfig config = small_config();
  config.prefill_chunk = 1;  // the last tokens of three prompts all the same fall into one step
  auto engine = make_engine(config, control);
  std::vector<SlotRef> refs;
  for (int i = 0; i < 3; ++i) {
    refs.push_back(acquire(engine.get()));
    prefill(engine.get(), refs.back(), prompt_of(5 + 9 * i, i));
  }
  const uint64_t before = engine->stats().num_steps;
  control->gate.close();
  const int begun = control->gate.num_begun();
  const std::vector<uint64_t> ids =
      engine->decode_batch(refs, {decode_of(4), decode_of(8), decode_of(8)});
  std::vector<Answer> answers(3);
  for (int i = 1; i <= 8; ++i) {
    control->gate.wait_until_begun(begun + i);
    control->gate.allow(1);
    if (i < 8) control->gate.wait_until_begun(begun + i + 1);
    for (size_t m = 0; m < 3; ++m) {
      if (answers[m].finished.kind == EventKind::kFinished) continue;
      while (static_cast<int>(answers[m].ids.size()) < i) {
        for (const Event &event : engine->take_events(ids[m], kSoon)) add(event, &answers[m]);
      }
      EXPECT_EQ(static_cast<int>(answers[m].ids.size()), i);  // and not one more
    }
  }
  control->gate.open();
  for (size_t m = 0; m < 3; ++m) {
    const Ids prompt = prompt_of(5 + 9 * static_cast<int>(m), static_cast<int>(m));
    EXPECT_EQ(answers[m].ids, expected_greedy(prompt, m == 0 ? 4 : 8));
  }
  wait_until([&] { return look(*engine, refs[2]).state == SlotState::kReady; });
  EXPECT_EQ(engine->stats().num_steps - before, 8u);
  EXPECT_EQ(control->most_seqs, 3);
}

TEST(Slots, EachTokenKeepsThePathOfItsOwnPrompt) {
  auto control = std::make_shared<Control>();
  control->has_segments = true;
  EngineConfig config = small_config();
  config.prefill_chunk = 100;
  auto engine = make_engine(config, control);
  const SlotRef ref = acquire(engine.get());
  // Two whole segments: the last token, which the first decode computes, lies in a segment.
  prefill(engine.get(), ref, prompt_of(256));
  const Ids first = decode(engine.get(), ref, decode_of(3)).ids;
  prefill(engine.get(), ref, prompt_of(128, 2));
  prefill(engine.get(), ref, prompt_of(10, 3));
  const Ids history = join({prompt_of(256), first, prompt_of(128, 2), prompt_of(10, 3)});
  EXPECT_EQ(decode(engine.get(), ref, decode_of(2)).ids, expected_greedy(history, 2));
  const auto path_of = [](int position) {
    const bool is_segment = position < 256 || (position >= 259 && position < 259 + 128);
    return is_segment ? TokenPath::kSegment : TokenPath::kInteger;
  };
  ASSERT_EQ(control->paths.size(), history.size() + 1);
  for (const auto &[position, path] : control->paths) {
    EXPECT_EQ(path, path_of(position)) << position;
  }
}

TEST(Slots, OnlyTheFirstPromptMeetsThePrefixCache) {
  auto engine = make_engine();
  const SlotRef first = acquire(engine.get());
  prefill(engine.get(), first, prompt_of(33));
  prefill(engine.get(), first, prompt_of(64, 1));
  decode(engine.get(), first, decode_of(40));
  const SlotRef second = acquire(engine.get());
  EXPECT_EQ(prefill(engine.get(), second, prompt_of(33)).finished.num_cached_tokens, 32u);
  const Ids both = join({prompt_of(33), prompt_of(64, 1), prompt_of(5, 2)});
  EXPECT_EQ(run(engine.get(), request(both, 4)).finished.num_cached_tokens, 32u);
  EXPECT_EQ(decode(engine.get(), second, decode_of(5)).ids, expected_greedy(prompt_of(33), 5));
}

// ---- refusals ----

TEST(Slots, CallsInTheWrongStateAreRefusedAndChangeNothing) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(small_config(), control);
  const SlotRef ref = acquire(engine.get());
  const auto refused = [&](SlotRef slot) {
    return status_of([&] { engine->decode_batch({&slot, 1}, {decode_of(3)}); });
  };
  EXPECT_EQ(refused(ref), Status::kSlotState);  // no prompt yet
  EXPECT_EQ(look(*engine, ref).state, SlotState::kAcquired);
  prefill(engine.get(), ref, prompt_of(6));
  control->gate.close();
  const uint64_t id = start_decode(engine.get(), ref, decode_of(9));
  EXPECT_EQ(refused(ref), Status::kSlotState);
  EXPECT_EQ(status_of([&] { engine->prefill(ref, request(prompt_of(3))); }), Status::kSlotState);
  EXPECT_EQ(look(*engine, ref).request_id, id);
  control->gate.open();
  EXPECT_EQ(wait_for(engine.get(), id).ids, expected_greedy(prompt_of(6), 9));
  EXPECT_EQ(refused({ref.slot, ref.epoch + 1}), Status::kStaleEpoch);
  EXPECT_EQ(refused({ref.slot, ref.epoch - 1}), Status::kStaleEpoch);
  EXPECT_EQ(refused({99, 1}), Status::kNotFound);
  EXPECT_EQ(status_of([&] { engine->renew({ref.slot, 99}, 5); }), Status::kStaleEpoch);
  EXPECT_EQ(status_of([&] { engine->release({ref.slot, 99}); }), Status::kStaleEpoch);
  std::string field;
  const auto acquire_for = [&](double lease_s) {
    return status_of([&] { engine->acquire(DecodeMode::kAuto, -1, lease_s); }, &field);
  };
  for (const double lease_s : {0.0, -1.0, 1e7, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(acquire_for(lease_s), Status::kInvalidArgument);
    EXPECT_EQ(field, "lease_s");
  }
  RequestOptions with_prompt = request(prompt_of(3), 2);
  EXPECT_EQ(status_of([&] { engine->decode_batch({&ref, 1}, {with_prompt}); }, &field),
            Status::kInvalidArgument);
  EXPECT_EQ(field, "prompt");
  const std::vector<SlotRef> twice = {ref, ref};
  EXPECT_EQ(status_of([&] { engine->decode_batch(twice, {decode_of(1), decode_of(1)}); }, &field),
            Status::kInvalidArgument);
  EXPECT_EQ(field, "slots");
  EXPECT_EQ(look(*engine, ref).state, SlotState::kReady);
  EXPECT_EQ(look(*engine, ref).num_tokens, 15);
}

TEST(Slots, ABatchIsRefusedAsAWhole) {
  auto engine = make_engine();
  const std::vector<SlotRef> refs = {acquire(engine.get()), acquire(engine.get())};
  prefill(engine.get(), refs[0], prompt_of(6));
  try {
    engine->decode_batch(refs, {decode_of(3), decode_of(3)});
    ADD_FAILURE() << "not refused";
  } catch (const Error &error) {
    EXPECT_EQ(error.status(), Status::kSlotState);
    EXPECT_EQ(error.details().back(), (std::pair<std::string, std::string>{"entry", "1"}));
  }
  EXPECT_EQ(look(*engine, refs[0]).state, SlotState::kReady);
  EXPECT_EQ(look(*engine, refs[0]).num_tokens, 6);
  EXPECT_EQ(engine->stats().num_generated_tokens, 0u);
}

TEST(Slots, WhatDoesNotFitTheContextOrThePoolIsRefused) {
  auto engine = make_engine(small_config(/*num_blocks=*/40));
  const SlotRef ref = acquire(engine.get());
  EXPECT_EQ(status_of([&] { engine->prefill(ref, request(prompt_of(512))); }),
            Status::kPromptTooLong);
  prefill(engine.get(), ref, prompt_of(500));
  EXPECT_EQ(status_of([&] { engine->prefill(ref, request(prompt_of(12))); }),
            Status::kPromptTooLong);
  EXPECT_EQ(prefill(engine.get(), ref, prompt_of(11)).finished.status, Status::kOk);
  const Answer last = decode(engine.get(), ref, decode_of(5));
  EXPECT_EQ(last.finished.finish_reason, FinishReason::kContextFull);
  EXPECT_EQ(last.ids.size(), 1u);
  EXPECT_EQ(status_of([&] { engine->decode_batch({&ref, 1}, {decode_of(1)}); }),
            Status::kSlotState);  // full

  auto small = make_engine(small_config(/*num_blocks=*/3));
  const SlotRef tight = acquire(small.get());
  EXPECT_EQ(status_of([&] { small->prefill(tight, request(prompt_of(48))); }), Status::kNeverFits);
  EXPECT_EQ(look(*small, tight).state, SlotState::kAcquired);
}

TEST(Slots, ADrainingEngineTakesNoNewWorkAndGivesSlotsBack) {
  auto engine = make_engine();
  const SlotRef ref = acquire(engine.get());
  prefill(engine.get(), ref, prompt_of(6));
  engine->drain();
  EXPECT_EQ(status_of([&] { acquire(engine.get()); }), Status::kDraining);
  EXPECT_EQ(status_of([&] { start_decode(engine.get(), ref, decode_of(2)); }), Status::kDraining);
  engine->renew(ref, 5);
  engine->release(ref);
  wait_until([&] { return engine->stats().slots_used == 0; });
}

// ---- the end of calls ----

TEST(Slots, ACancelledOrLateDecodeLeavesTheSlotReadyToGoOn) {
  for (const DecodeMode mode : kModes) {
    for (const bool is_cancel : {true, false}) {
      auto control = std::make_shared<Control>();
      auto engine = make_engine(config_of(mode), control);
      const SlotRef ref = acquire(engine.get());
      prefill(engine.get(), ref, prompt_of(6));
      control->gate.close();
      const int begun = control->gate.num_begun();
      RequestOptions how = decode_of(100);
      if (!is_cancel) how.max_duration_s = 1e-9;
      const uint64_t id = start_decode(engine.get(), ref, how);
      if (is_cancel) {
        control->gate.allow(3);
        control->gate.wait_until_begun(begun + 4);
        engine->cancel(id);
        EXPECT_EQ(look(*engine, ref).state, SlotState::kCancelling);
      }
      control->gate.open();
      const Answer cut = wait_for(engine.get(), id);
      EXPECT_EQ(cut.finished.status, is_cancel ? Status::kCancelled : Status::kDeadlineExceeded);
      EXPECT_EQ(cut.ids.size(), is_cancel ? 4u : 0u);
      EXPECT_EQ(look(*engine, ref).state, SlotState::kReady);
      EXPECT_GT(look(*engine, ref).lease_left_s, 1);
      const Ids rest = decode(engine.get(), ref, decode_of(5)).ids;
      EXPECT_EQ(join({cut.ids, rest}),
                expected_greedy(prompt_of(6), 5 + static_cast<int>(cut.ids.size())));
    }
  }
}

TEST(Slots, ACancelledPrefillLeavesTheSlotAsItWas) {
  auto control = std::make_shared<Control>();
  EngineConfig config = small_config();
  config.prefill_chunk = 16;
  auto engine = make_engine(config, control);
  const SlotRef ref = acquire(engine.get());
  const auto cancel_in_the_middle = [&](int num_prompt) {
    control->gate.close();
    const int begun = control->gate.num_begun();
    const uint64_t id = engine->prefill(ref, request(prompt_of(num_prompt, 4)));
    control->gate.allow(1);
    control->gate.wait_until_begun(begun + 2);
    EXPECT_EQ(look(*engine, ref).state, SlotState::kPrefilling);
    engine->cancel(id);
    control->gate.open();
    const Answer answer = wait_for(engine.get(), id);
    EXPECT_EQ(answer.finished.status, Status::kCancelled);
    EXPECT_FALSE(answer.prefills.empty());
  };
  cancel_in_the_middle(90);
  EXPECT_EQ(look(*engine, ref).state, SlotState::kAcquired);
  EXPECT_EQ(look(*engine, ref).num_tokens, 0);
  EXPECT_EQ(engine->stats().blocks_used, 0u);
  prefill(engine.get(), ref, prompt_of(32));
  cancel_in_the_middle(90);
  EXPECT_EQ(look(*engine, ref).state, SlotState::kReady);
  EXPECT_EQ(look(*engine, ref).num_tokens, 32);
  EXPECT_EQ(engine->stats().blocks_used, 2u);
  EXPECT_EQ(decode(engine.get(), ref, decode_of(20)).ids, expected_greedy(prompt_of(32), 20));
}

TEST(Slots, LogitsThatAreNoNumbersEndTheCallAlone) {
  auto control = std::make_shared<Control>();
  std::atomic<bool> is_broken{false};
  control->logits = [&](const Ids &context, float *logits) {
    RecallBackend::hashed_logits(context, logits);
    if (is_broken) logits[3] = std::numeric_limits<float>::quiet_NaN();
  };
  auto engine = make_engine(small_config(), control);
  const SlotRef ref = acquire(engine.get());
  prefill(engine.get(), ref, prompt_of(16));
  is_broken = true;
  EXPECT_EQ(step(engine.get(), ref).status, Status::kNonFiniteLogits);
  is_broken = false;
  EXPECT_EQ(look(*engine, ref).state, SlotState::kReady);
  EXPECT_EQ(decode(engine.get(), ref, decode_of(5)).ids, expected_greedy(prompt_of(16), 5));
}

// ---- the end of ownerships ----

TEST(Slots, TheEndOfALeaseEndsTheCallAndFreesEverything) {
  for (const DecodeMode mode : kModes) {
    for (const bool is_running : {true, false}) {
      auto control = std::make_shared<Control>();
      auto engine = make_engine(config_of(mode), control);
      const SlotRef ref = acquire(engine.get());
      prefill(engine.get(), ref, prompt_of(20));
      uint64_t id = 0;
      int begun = 0;
      if (is_running) {
        control->gate.close();
        begun = control->gate.num_begun();
        id = start_decode(engine.get(), ref, decode_of(400));
        control->gate.wait_until_begun(begun + 1);
      }
      engine->renew(ref, 1e-3);
      wait_until([&] { return look(*engine, ref).lease_left_s == 0; });
      EXPECT_EQ(status_of([&] { engine->renew(ref, 5); }), Status::kLeaseLost);
      if (is_running) {
        control->gate.allow(1);  // the step in progress, and none after it
        const Answer lost = wait_for(engine.get(), id);
        EXPECT_EQ(lost.finished.status, Status::kLeaseLost);
        EXPECT_EQ(lost.ids.size(), 1u);
        EXPECT_EQ(control->gate.num_begun(), begun + 1);
      }
      wait_until([&] { return engine->stats().slots_used == 0; });
      wait_until([&] { return engine->stats().blocks_used == 0; });
      EXPECT_EQ(status_of([&] { engine->release(ref); }), Status::kLeaseLost);
      control->gate.open();
      const SlotRef next = acquire(engine.get());
      EXPECT_EQ(next.slot, ref.slot);
      EXPECT_EQ(status_of([&] { engine->release(ref); }), Status::kStaleEpoch);
      prefill(engine.get(), next, prompt_of(9));
      EXPECT_EQ(decode(engine.get(), next, decode_of(4)).ids, expected_greedy(prompt_of(9), 4));
    }
  }
}

TEST(Slots, ReleaseEndsTheCallAndFreesWithinAStep) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(small_config(), control);
  const SlotRef unused = acquire(engine.get());
  EXPECT_EQ(engine->release(unused).state, SlotState::kFree);  // at once: it holds nothing
  const SlotRef ref = acquire(engine.get());
  prefill(engine.get(), ref, prompt_of(20));
  control->gate.close();
  const int begun = control->gate.num_begun();
  const uint64_t id = start_decode(engine.get(), ref, decode_of(400));
  control->gate.wait_until_begun(begun + 1);
  EXPECT_EQ(engine->release(ref).state, SlotState::kCancelling);
  EXPECT_EQ(status_of([&] { engine->release(ref); }), Status::kStaleEpoch);
  control->gate.allow(1);
  EXPECT_EQ(wait_for(engine.get(), id).finished.status, Status::kLeaseLost);
  expect_nothing_held(*engine);
}

TEST(Slots, AFailedEngineGivesItsSlotsBack) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(small_config(), control);
  const SlotRef idle = acquire(engine.get());
  prefill(engine.get(), idle, prompt_of(20));
  const SlotRef ref = acquire(engine.get());
  prefill(engine.get(), ref, prompt_of(20));
  control->fails = true;
  EXPECT_EQ(step(engine.get(), ref).status, Status::kEngineFailed);
  expect_nothing_held(*engine);
  EXPECT_EQ(status_of([&] { acquire(engine.get()); }), Status::kEngineFailed);
}

// ---- company ----

TEST(Slots, RequestsWaitForSeatsThatSlotsHoldWithoutBurningTheProcessor) {
  EngineConfig config = small_config();
  config.max_slots = 2;
  auto engine = make_engine(config);
  const std::vector<SlotRef> refs = {acquire(engine.get()), acquire(engine.get())};
  prefill(engine.get(), refs[0], prompt_of(20));
  EXPECT_EQ(status_of([&] { acquire(engine.get()); }), Status::kNoFreeSlot);
  EXPECT_EQ(status_of([&] { engine->acquire(DecodeMode::kAuto, 1, 5); }), Status::kNoFreeSlot);
  const uint64_t id = engine->submit(request(prompt_of(10), 5));
  RequestOptions impatient = request(prompt_of(10), 5);
  impatient.max_queue_s = 0.2;
  const std::clock_t before = std::clock();
  EXPECT_EQ(run(engine.get(), impatient).finished.status, Status::kQueueTimeout);
  EXPECT_LT(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC, 0.02);
  EXPECT_TRUE(engine->take_events(id, 0).empty());
  engine->release(refs[1]);
  EXPECT_EQ(wait_for(engine.get(), id).ids, expected_greedy(prompt_of(10), 5));
}

TEST(Slots, RequestsArePreemptedForSlotsAndSlotsAreExhausted) {
  for (const DecodeMode mode : kModes) {
    // Ten blocks of 16: the request takes four and grows, the slot wants more and more.
    auto control = std::make_shared<Control>();
    // (Keys and values of the per-slot way are twice as long.)
    auto engine = make_engine(config_of(mode, mode == DecodeMode::kPerSlot ? 20 : 10), control);
    const SlotRef ref = acquire(engine.get());
    const SlotRef other = acquire(engine.get());
    prefill(engine.get(), other, prompt_of(30));  // two blocks that stay
    control->gate.close();
    const int begun = control->gate.num_begun();
    const uint64_t id = engine->submit(request(prompt_of(60), 30));
    control->gate.wait_until_begun(begun + 1);  // it has its blocks
    const uint64_t filling = engine->prefill(ref, request(prompt_of(100, 1)));
    control->gate.open();
    EXPECT_EQ(wait_for(engine.get(), filling).finished.status, Status::kOk);
    const Answer outgrown = decode(engine.get(), ref, decode_of(100));
    EXPECT_EQ(outgrown.finished.status, Status::kKvExhausted);
    EXPECT_GT(engine->stats().num_preemptions, 0u);
    EXPECT_EQ(look(*engine, ref).state, SlotState::kReady);
    // Eight blocks hold 128 positions, and the token chosen last has no place yet.
    EXPECT_EQ(look(*engine, ref).num_tokens, 129);
    EXPECT_EQ(outgrown.ids, expected_greedy(prompt_of(100, 1), 29));
    EXPECT_EQ(step(engine.get(), ref).status, Status::kKvExhausted);
    engine->release(other);
    const Answer more = decode(engine.get(), ref, decode_of(8));
    EXPECT_EQ(join({outgrown.ids, more.ids}), expected_greedy(prompt_of(100, 1), 37));
    engine->release(ref);
    EXPECT_EQ(wait_for(engine.get(), id).ids, expected_greedy(prompt_of(60), 30));
    wait_until([&] { return engine->stats().blocks_used == 0; });
    expect_nothing_held(*engine);
  }
}

TEST(Slots, SlotsDoNotTakeBlocksFromEachOther) {
  auto engine = make_engine(small_config(/*num_blocks=*/4));
  std::vector<SlotRef> refs;
  for (int i = 0; i < 2; ++i) {
    refs.push_back(acquire(engine.get()));
    prefill(engine.get(), refs.back(), prompt_of(20, i));
  }
  const std::vector<uint64_t> ids = engine->decode_batch(refs, {decode_of(30), decode_of(30)});
  for (int i = 0; i < 2; ++i) {
    const Answer answer = wait_for(engine.get(), ids[static_cast<size_t>(i)]);
    EXPECT_EQ(answer.finished.status, Status::kKvExhausted);
    EXPECT_EQ(answer.ids, expected_greedy(prompt_of(20, i), 13));
    EXPECT_EQ(look(*engine, refs[static_cast<size_t>(i)]).num_blocks, 2);
  }
  engine->release(refs[1]);
  const Ids more = decode(engine.get(), refs[0], decode_of(17)).ids;
  EXPECT_EQ(join({expected_greedy(prompt_of(20), 13), more}), expected_greedy(prompt_of(20), 30));
}

TEST(Slots, PerSlotSequencesTakeTurns) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(config_of(DecodeMode::kPerSlot), control);
  const uint64_t endless = engine->submit(request(prompt_of(10), 450));
  const std::vector<SlotRef> refs = {acquire(engine.get()), acquire(engine.get())};
  prefill(engine.get(), refs[0], prompt_of(20));
  prefill(engine.get(), refs[1], prompt_of(20, 1));
  const uint64_t long_one = start_decode(engine.get(), refs[0], decode_of(300));
  EXPECT_EQ(decode(engine.get(), refs[1], decode_of(5)).ids, expected_greedy(prompt_of(20, 1), 5));
  EXPECT_EQ(wait_for(engine.get(), long_one).ids, expected_greedy(prompt_of(20), 300));
  EXPECT_EQ(wait_for(engine.get(), endless).ids, expected_greedy(prompt_of(10), 450));
  EXPECT_EQ(control->most_seqs, 1);
}

TEST(Slots, SlotsAndRequestsKeepTheirBytesBesideEachOther) {
  EngineConfig config = config_of(DecodeMode::kAuto);
  config.prefill_chunk = 8;
  auto engine = make_engine(config);
  std::vector<uint64_t> requests;
  for (int i = 0; i < 3; ++i) requests.push_back(engine->submit(request(prompt_of(40, i), 60)));
  const SlotRef batched = acquire(engine.get(), DecodeMode::kBatched);
  const SlotRef per_slot = acquire(engine.get(), DecodeMode::kPerSlot);
  const uint64_t fill = engine->prefill(per_slot, request(prompt_of(50)));
  prefill(engine.get(), batched, prompt_of(50, 9));
  wait_for(engine.get(), fill);
  const uint64_t one = start_decode(engine.get(), per_slot, decode_of(40));
  EXPECT_EQ(decode(engine.get(), batched, decode_of(40)).ids,
            expected_greedy(prompt_of(50, 9), 40));
  EXPECT_EQ(wait_for(engine.get(), one).ids, expected_greedy(prompt_of(50), 40));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(wait_for(engine.get(), requests[static_cast<size_t>(i)]).ids,
              expected_greedy(prompt_of(40, i), 60));
  }
}

}  // namespace
}  // namespace xllm
