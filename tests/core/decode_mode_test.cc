// The table of decode modes, engine by request, and what each mode loads.

#include "engine/decode_mode.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
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
