// The table of decode modes, engine by request, and what each mode loads.

#include "engine/decode_mode.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine_fixture.h"

namespace xllm {
namespace {

TEST(DecodeModes, TheWholeTable) {
  const DecodeMode modes[] = {DecodeMode::kAuto, DecodeMode::kBatched, DecodeMode::kPerSlot};
  const DecodeMode refused = static_cast<DecodeMode>(-1);
  const DecodeMode expected[3][3] = {
      {DecodeMode::kBatched, DecodeMode::kBatched, DecodeMode::kPerSlot},
      {DecodeMode::kBatched, DecodeMode::kBatched, refused},
      {DecodeMode::kPerSlot, refused, DecodeMode::kPerSlot}};
  for (const DecodeMode mode : modes) {
    EngineConfig config = small_config();
    config.decode_mode = mode;
    auto engine = make_engine(config);
    for (const DecodeMode requested : modes) {
      const DecodeMode cell = expected[static_cast<int>(mode)][static_cast<int>(requested)];
      RequestOptions options = request(prompt_of(20), 6);
      options.decode_mode = requested;
      if (cell != refused) {
        const Answer answer = run(engine.get(), options);
        EXPECT_EQ(answer.accepted.decode_mode, cell);
        EXPECT_EQ(answer.ids, expected_greedy(prompt_of(20), 6));
        continue;
      }
      try {
        engine->submit(options);
        ADD_FAILURE() << "not refused";
      } catch (const Error &error) {
        EXPECT_EQ(error.status(), Status::kDecodeModeMismatch);
        const Error::Details expected_details = {{"engine_mode", decode_mode_name(mode)},
                                                 {"requested_mode", decode_mode_name(requested)},
                                                 {"call", "xllm_engine_submit"},
                                                 {"remedy", error.details()[3].second}};
        EXPECT_EQ(error.details(), expected_details);
      }
      EXPECT_EQ(engine->stats().slots_used, 0u);
    }
  }
}

void expect_refused(const std::function<void()> &call, const Error::Details &expected) {
  try {
    call();
    ADD_FAILURE() << "not refused";
  } catch (const Error &error) {
    EXPECT_EQ(error.status(), Status::kDecodeModeMismatch);
    Error::Details details = error.details();
    ASSERT_GE(details.size(), 4u);
    EXPECT_EQ(details[3].first, "remedy");
    EXPECT_FALSE(details[3].second.empty());
    details.erase(details.begin() + 3);
    EXPECT_EQ(details, expected);
  }
}

TEST(DecodeModes, TheWholeTableOfSlotsAndTheirCalls) {
  using M = DecodeMode;
  for (const M mode : {M::kAuto, M::kBatched, M::kPerSlot}) {
    EngineConfig config = small_config();
    config.decode_mode = mode;
    for (const M requested : {M::kAuto, M::kBatched, M::kPerSlot}) {
      auto engine = make_engine(config);
      const std::string engine_name = decode_mode_name(mode);
      const auto cell = effective_decode_mode(mode, requested);
      if (!cell) {
        expect_refused([&] { engine->acquire(requested, -1, 60); },
                       {{"engine_mode", engine_name},
                        {"requested_mode", decode_mode_name(requested)},
                        {"call", "xllm_engine_acquire"}});
        expect_nothing_held(*engine);
        continue;
      }
      const SlotRef ref = acquire(engine.get(), requested);
      EXPECT_EQ(look(*engine, ref).decode_mode, *cell);
      prefill(engine.get(), ref, prompt_of(20));
      const M other = *cell == M::kBatched ? M::kPerSlot : M::kBatched;
      const SamplingParams greedy;
      const auto stream = [&](M api, M asked) {
        RequestOptions how = request({}, 3);
        how.decode_mode = asked;
        const uint64_t id = api == M::kPerSlot ? engine->decode_slot(ref, how)
                                               : engine->decode_batch({&ref, 1}, {how}).front();
        EXPECT_EQ(wait_for(engine.get(), id).accepted.decode_mode, *cell);
      };
      const auto step = [&](M api) {
        const SlotStep chosen = api == M::kPerSlot
                                    ? engine->step_slot(ref, greedy, false)
                                    : engine->step_batch({&ref, 1}, {&greedy, 1}, false).front();
        EXPECT_EQ(chosen.status, Status::kOk);
      };
      const auto mismatch = [&](const std::string &call, const Error::Details &more = {}) {
        Error::Details details = {{"engine_mode", engine_name},
                                  {"requested_mode", decode_mode_name(other)},
                                  {"call", call},
                                  {"slot_mode", decode_mode_name(*cell)}};
        details.insert(details.end(), more.begin(), more.end());
        return details;
      };
      const bool is_batch = other == M::kBatched;
      const Error::Details entry = {{"entry", "0"}};
      expect_refused([&] { stream(other, M::kAuto); },
                     mismatch(is_batch ? "xllm_engine_decode_batch" : "xllm_engine_decode_slot",
                              is_batch ? entry : Error::Details()));
      expect_refused([&] { stream(*cell, other); },
                     mismatch(is_batch ? "xllm_engine_decode_slot" : "xllm_engine_decode_batch",
                              is_batch ? Error::Details() : entry));
      expect_refused([&] { step(other); }, mismatch(is_batch ? "xllm_engine_decode_step_batch"
                                                             : "xllm_engine_decode_step_slot",
                                                    is_batch ? entry : Error::Details()));
      EXPECT_EQ(look(*engine, ref).state, SlotState::kReady);
      EXPECT_EQ(look(*engine, ref).num_tokens, 20);
      EXPECT_EQ(engine->stats().num_generated_tokens, 0u);
      stream(*cell, M::kAuto);
      stream(*cell, *cell);
      step(*cell);
      EXPECT_EQ(look(*engine, ref).num_tokens, 27);
    }
  }
}

TEST(DecodeModes, ASetThatAutoCannotLoadIsRefusedAtTheFirstCall) {
  auto control = std::make_shared<Control>();
  EngineConfig config = small_config();
  config.decode_mode = DecodeMode::kAuto;
  auto engine = make_engine(config, control);
  run(engine.get(), request(prompt_of(4), 2));
  control->free_bytes = 500;
  const auto refused = [&](const std::function<void()> &call) {
    try {
      call();
      ADD_FAILURE() << "not refused";
    } catch (const Error &error) {
      EXPECT_EQ(error.status(), Status::kMemory);
      ASSERT_EQ(error.details().size(), 3u);
      EXPECT_EQ(error.details()[0].first, "bytes_needed");
      EXPECT_EQ(error.details()[1], (std::pair<std::string, std::string>{"bytes_free", "500"}));
      EXPECT_EQ(error.details()[2].first, "remedy");
    }
  };
  RequestOptions per_slot = request(prompt_of(4), 2);
  per_slot.decode_mode = DecodeMode::kPerSlot;
  refused([&] { engine->submit(per_slot); });
  refused([&] { engine->acquire(DecodeMode::kPerSlot, -1, 60); });
  EXPECT_EQ(control->num_loaded, 1);
  expect_nothing_held(*engine);
  // The slot was acquired while there was room, and the first call finds none.
  control->free_bytes = uint64_t{1} << 30;
  const SlotRef ref = acquire(engine.get(), DecodeMode::kPerSlot);
  control->free_bytes = 500;
  refused([&] { engine->prefill(ref, request(prompt_of(4))); });
  EXPECT_EQ(look(*engine, ref).state, SlotState::kAcquired);
  EXPECT_EQ(control->num_loaded, 1);
  control->free_bytes = uint64_t{1} << 30;
  EXPECT_EQ(prefill(engine.get(), ref, prompt_of(4)).finished.status, Status::kOk);
  EXPECT_EQ(control->num_loaded, 2);
}

TEST(DecodeModes, AutoLoadsEachSetOnFirstUse) {
  auto control = std::make_shared<Control>();
  EngineConfig config = small_config();
  config.decode_mode = DecodeMode::kAuto;
  auto engine = make_engine(config, control);
  EXPECT_EQ(control->num_loaded, 0);
  run(engine.get(), request(prompt_of(4), 2));
  EXPECT_EQ(control->num_loaded, 1);
  RequestOptions per_slot = request(prompt_of(4), 2);
  per_slot.decode_mode = DecodeMode::kPerSlot;
  run(engine.get(), per_slot);
  run(engine.get(), per_slot);
  EXPECT_EQ(control->num_loaded, 2);
}

TEST(DecodeModes, PerSlotRunsOneSlotAtATime) {
  auto control = std::make_shared<Control>();
  EngineConfig config = small_config();
  config.decode_mode = DecodeMode::kPerSlot;
  auto engine = make_engine(config, control);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(engine->submit(request(prompt_of(10, i), 10)));
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(wait_for(engine.get(), ids[static_cast<size_t>(i)]).ids,
              expected_greedy(prompt_of(10, i), 10));
  }
  EXPECT_EQ(control->most_seqs, 1);
}

TEST(DecodeModes, WhatTheBackendLacksIsRefusedByName) {
  auto control = std::make_shared<Control>();
  control->has_per_slot = false;
  EngineConfig config = small_config();
  config.decode_mode = DecodeMode::kPerSlot;
  EXPECT_EQ(status_of([&] { make_engine(config, control); }), Status::kUnimplemented);
  config.decode_mode = DecodeMode::kAuto;
  auto engine = make_engine(config, control);
  RequestOptions per_slot = request(prompt_of(4), 2);
  per_slot.decode_mode = DecodeMode::kPerSlot;
  EXPECT_EQ(status_of([&] { engine->submit(per_slot); }), Status::kUnimplemented);
  EXPECT_EQ(run(engine.get(), request(prompt_of(4), 2)).finished.status, Status::kOk);
}

TEST(DecodeModes, AKvTypeThatTheBackendLacksIsRefusedBeforeLoading) {
  auto control = std::make_shared<Control>();
  control->has_int8 = false;
  for (const DecodeMode mode : {DecodeMode::kBatched, DecodeMode::kAuto}) {
    EngineConfig config = small_config();
    config.decode_mode = mode;
    config.kv_type = KvType::kInt8;
    EXPECT_EQ(status_of([&] { make_engine(config, control); }), Status::kUnimplemented);
  }
  EXPECT_EQ(control->num_loaded, 0);
}

TEST(DecodeModes, WhatDoesNotFitIsRefusedBeforeAnythingIsLoaded) {
  auto control = std::make_shared<Control>();
  control->free_bytes = 500;
  EXPECT_EQ(status_of([&] { make_engine(small_config(), control); }), Status::kMemory);
  EXPECT_EQ(control->num_loaded, 0);
}

}  // namespace
}  // namespace xllm
