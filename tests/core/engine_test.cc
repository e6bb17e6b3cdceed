// What an engine answers and how an answer ends: the same bytes alone, in company, preempted and
// from the cache.

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine_fixture.h"

namespace xllm {
namespace {

TEST(Engine, SaysWhatTheDeviceSays) {
  auto engine = make_engine();
  for (const int length : {1, 15, 16, 17, 33}) {
    const Answer answer = run(engine.get(), request(prompt_of(length), 20));
    EXPECT_EQ(answer.ids, expected_greedy(prompt_of(length), 20)) << length;
    EXPECT_EQ(answer.finished.finish_reason, FinishReason::kMaxTokens);
    EXPECT_EQ(answer.finished.num_generated_tokens, 20u);
    EXPECT_EQ(answer.finished.num_prompt_tokens, static_cast<uint32_t>(length));
  }
  expect_nothing_held(*engine);
}

TEST(Engine, EchoesWhatIsInEffect) {
  auto engine = make_engine();
  RequestOptions options = request(prompt_of(5), 3);
  options.sampling.seed = 42;
  const Answer seeded = run(engine.get(), options);
  EXPECT_EQ(seeded.num_accepted, 1);
  EXPECT_EQ(seeded.accepted.seed, 42u);
  EXPECT_EQ(seeded.accepted.max_tokens, 3u);
  EXPECT_EQ(seeded.accepted.decode_mode, DecodeMode::kBatched);
  EXPECT_EQ(seeded.accepted.slot, 0);
  EXPECT_EQ(seeded.accepted.epoch, 1u);
  // A drawn seed is echoed, and asking for it again gives the same answer.
  RequestOptions drawn = sampled(request(prompt_of(5), 20), 0);
  drawn.sampling.seed.reset();
  const Answer first = run(engine.get(), drawn);
  const Answer other = run(engine.get(), drawn);
  EXPECT_NE(first.accepted.seed, other.accepted.seed);
  EXPECT_EQ(other.accepted.epoch, 3u);
  drawn.sampling.seed = first.accepted.seed;
  EXPECT_EQ(run(engine.get(), drawn), first);
}

// The promise: a request's bytes do not depend on what else runs, nor on how the engine is set up.
TEST(Engine, SameBytesAloneAndBesideSevenOthers) {
  for (const bool is_greedy : {true, false}) {
    const RequestOptions mine =
        is_greedy ? request(prompt_of(37), 30) : sampled(request(prompt_of(37), 30), 5);
    const Answer alone = run(make_engine().get(), mine);
    ASSERT_EQ(alone.ids.size(), 30u);
    for (const int chunk : {1, 7, 64, 512}) {
      for (const int max_slots : {1, 3, 8}) {
        EngineConfig config = small_config();
        config.prefill_chunk = chunk;
        config.max_slots = max_slots;
        auto engine = make_engine(config);
        std::vector<uint64_t> others;
        for (int i = 0; i < 7; ++i) {
          others.push_back(
              engine->submit(sampled(request(prompt_of(20 + 9 * i, i), 10 + 5 * i), 70 + i)));
        }
        EXPECT_EQ(run(engine.get(), mine), alone) << chunk << " " << max_slots;
        for (const uint64_t id : others) wait_for(engine.get(), id);
        expect_nothing_held(*engine);
      }
    }
  }
}

TEST(Engine, SameBytesAfterPreemption) {
  std::vector<RequestOptions> requests;
  std::vector<Answer> alone;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(sampled(request(prompt_of(30 + i, i), 60), static_cast<uint64_t>(i)));
    alone.push_back(run(make_engine().get(), requests.back()));
  }
  for (const bool use_cache : {false, true}) {
    EngineConfig config = small_config(/*num_blocks=*/13);  // two of them fit to their end
    config.use_prefix_cache = use_cache;
    config.prefill_chunk = 16;
    auto control = std::make_shared<Control>();
    auto engine = make_engine(config, control);
    control->gate.close();  // until all are there
    std::vector<uint64_t> ids;
    for (const RequestOptions &options : requests) ids.push_back(engine->submit(options));
    control->gate.open();
    for (size_t i = 0; i < ids.size(); ++i) {
      const Answer answer = wait_for(engine.get(), ids[i]);
      EXPECT_EQ(answer, alone[i]) << i;
      EXPECT_EQ(answer.num_accepted, 1);
    }
    EXPECT_GT(engine->stats().num_preemptions, 0u);
    expect_nothing_held(*engine);
  }
}

// Prompts around whole blocks, each sent twice: same bytes and logprobs, at least one token
// computed.
TEST(Engine, SameBytesFromTheCache) {
  auto engine = make_engine();
  for (const int length : {1, kBlockSize - 1, kBlockSize, kBlockSize + 1, 3 * kBlockSize}) {
    const RequestOptions options = sampled(request(prompt_of(length, length), 10), 3);
    const Answer cold = run(engine.get(), options);
    const Answer warm = run(engine.get(), options);
    EXPECT_EQ(cold, warm) << length;
    EXPECT_EQ(cold.accepted.num_cached_tokens, 0u);
    const int cached = (length - 1) / kBlockSize * kBlockSize;
    EXPECT_EQ(warm.accepted.num_cached_tokens, static_cast<uint32_t>(cached)) << length;
    EXPECT_EQ(warm.finished.num_cached_tokens, warm.accepted.num_cached_tokens);
  }
  EXPECT_GT(engine->stats().num_cached_tokens, 0u);
  EXPECT_GT(engine->stats().blocks_cached, 0u);
  expect_nothing_held(*engine);
}

TEST(Engine, ReportsTheChunksOfALongPromptOnly) {
  EngineConfig config = small_config();
  config.prefill_chunk = 20;
  auto engine = make_engine(config);
  EXPECT_EQ(run(engine.get(), request(prompt_of(50), 2)).prefills,
            (std::vector<uint32_t>{20, 40, 50}));
  EXPECT_TRUE(run(engine.get(), request(prompt_of(19, 3), 2)).prefills.empty());
}

TEST(Engine, AStepHoldsNoMoreThanAChunkAndOneRowPerSlot) {
  auto control = std::make_shared<Control>();
  EngineConfig config = small_config();
  config.prefill_chunk = 10;
  config.max_slots = 4;
  auto engine = make_engine(config, control);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 12; ++i) ids.push_back(engine->submit(request(prompt_of(25, i), 8)));
  for (const uint64_t id : ids) wait_for(engine.get(), id);
  EXPECT_LE(control->most_rows, 10 + 3);
  EXPECT_EQ(control->most_seqs, 4);
}

// ---- how it ends ----

TEST(Engine, EndsAtTheTokenLimitOrTheContextExactly) {
  EngineConfig config = small_config();
  config.max_seq_len = 20;
  auto engine = make_engine(config);
  const auto ends = [&](uint32_t max_tokens) {
    const Answer answer = run(engine.get(), request(prompt_of(12), max_tokens));
    EXPECT_EQ(answer.ids.size(), answer.finished.num_generated_tokens);
    return std::make_pair(answer.ids.size(), answer.finished.finish_reason);
  };
  EXPECT_EQ(ends(7), std::make_pair(size_t{7}, FinishReason::kMaxTokens));
  EXPECT_EQ(ends(8), std::make_pair(size_t{8}, FinishReason::kMaxTokens));
  EXPECT_EQ(ends(9), std::make_pair(size_t{8}, FinishReason::kContextFull));
  EXPECT_EQ(ends(0), std::make_pair(size_t{8}, FinishReason::kContextFull));
  EXPECT_EQ(run(engine.get(), request(prompt_of(19), 5)).ids.size(), 1u);
  EXPECT_EQ(status_of([&] { engine->submit(request(prompt_of(20), 1)); }), Status::kPromptTooLong);
}

TEST(Engine, EndsAtAnEndTokenWithoutItsText) {
  Ids script = spell("ok");
  script.push_back(kEnd);
  auto engine = make_engine(small_config(), scripted(4, script));
  RequestOptions options = request(prompt_of(4), 30);
  options.ignore_eos = false;
  const Answer answer = run(engine.get(), options);
  EXPECT_EQ(answer.text, "ok");
  EXPECT_EQ(answer.finished.finish_reason, FinishReason::kEos);
  EXPECT_EQ(answer.finished.matched_token_id, kEnd);
  EXPECT_EQ(answer.finished.num_generated_tokens, 3u);
  // Ignored, it is a token like any other whose text is not sent.
  options.ignore_eos = true;
  options.max_tokens = 5;
  const Answer ignored = run(engine.get(), options);
  EXPECT_EQ(ignored.text, "okzz");
  EXPECT_EQ(ignored.finished.finish_reason, FinishReason::kMaxTokens);
  EXPECT_EQ(ignored.finished.matched_token_id, -1);
}

TEST(Engine, MinTokensForbidsEveryEndBeforeIt) {
  auto control = std::make_shared<Control>();
  control->logits = [](const Ids &, float *logits) {
    std::fill(logits, logits + RecallBackend::kVocabSize, 0.0f);
    logits[kEnd] = 9;
    logits[3] = 8;  // d
    logits[4] = 7;  // e
  };
  auto engine = make_engine(small_config(), control);
  RequestOptions options = request(prompt_of(4), 10);
  options.ignore_eos = false;
  options.min_tokens = 3;
  options.stop_token_ids = {3};
  options.stop_strings = {"ee"};
  const Answer answer = run(engine.get(), options);
  EXPECT_EQ(answer.ids, (Ids{4, 4, 4, kEnd}));
  EXPECT_EQ(answer.finished.finish_reason, FinishReason::kEos);
  options.min_tokens = 10;
  EXPECT_EQ(run(engine.get(), options).finished.finish_reason, FinishReason::kMaxTokens);
}

TEST(Engine, StopTokenAndBias) {
  auto engine = make_engine(small_config(), scripted(4, spell("abcabc")));
  RequestOptions options = request(prompt_of(4), 30);
  options.stop_token_ids = {2};
  const Answer answer = run(engine.get(), options);
  EXPECT_EQ(answer.text, "ab");
  EXPECT_EQ(answer.finished.finish_reason, FinishReason::kStopToken);
  EXPECT_EQ(answer.finished.matched_token_id, 2);
  options.biases = {{2, -std::numeric_limits<float>::infinity()}, {7, 1}};
  EXPECT_EQ(run(engine.get(), options).text.substr(0, 3), "abh");
}

TEST(Engine, StopStringSpreadOverTokensIsNotSent) {
  auto engine = make_engine(small_config(), scripted(4, spell("anSTOSTOPxyz")));
  RequestOptions options = request(prompt_of(4), 30);
  options.stop_strings = {"nothing", "STOP"};
  const Answer answer = run(engine.get(), options);
  EXPECT_EQ(answer.text, "anSTO");
  EXPECT_EQ(answer.finished.finish_reason, FinishReason::kStopString);
  EXPECT_EQ(answer.finished.matched_stop, 1);
  EXPECT_EQ(answer.finished.num_generated_tokens, 9u);
  // Cut short inside a near-match: what was held back is text.
  options.max_tokens = 4;
  const Answer cut = run(engine.get(), options);
  EXPECT_EQ(cut.text, "anST");
  EXPECT_EQ(cut.texts.back(), "");
  EXPECT_EQ(cut.finished.text, "ST");
}

TEST(Engine, ACharacterOverFourTokensComesWholeOrAsAReplacement) {
  auto engine =
      make_engine(small_config(), scripted(4, {0, kEmoji, kEmoji + 1, kEmoji + 2, kEmoji + 3, 1}));
  const Answer whole = run(engine.get(), request(prompt_of(4), 6));
  EXPECT_EQ(whole.texts, (std::vector<std::string>{"a", "", "", "", "\xF0\x9F\x98\x80", "b"}));
  const Answer cut = run(engine.get(), request(prompt_of(4), 4));
  EXPECT_EQ(cut.text, "a\xEF\xBF\xBD");
}

TEST(Engine, PaddingRowsAreNeverChosen) {
  auto control = std::make_shared<Control>();
  control->logits = [](const Ids &, float *logits) {
    for (int v = 0; v < RecallBackend::kVocabSize; ++v) logits[v] = static_cast<float>(v);
  };
  auto engine = make_engine(small_config(), control);
  RequestOptions options = request({60, 63}, 4);  // as prompt ids they are accepted
  options.num_logprobs = 3;
  const Answer answer = run(engine.get(), options);
  EXPECT_EQ(answer.ids, (Ids{55, 55, 55, 55}));
}

TEST(Engine, PenaltiesCountAcrossPromptCacheAndResumption) {
  auto control = std::make_shared<Control>();
  control->logits = [](const Ids &, float *logits) {
    std::fill(logits, logits + RecallBackend::kVocabSize, 0.0f);
    logits[20] = 5.0f;
    logits[21] = 4.9f;
  };
  auto engine = make_engine(small_config(), control);
  Ids prompt(40, 1);
  std::fill(prompt.begin(), prompt.begin() + 5, 20);
  RequestOptions generated = request(prompt, 3);
  generated.sampling.frequency_penalty = 2;
  generated.sampling.presence_penalty = 2;
  RequestOptions repeated = request(prompt, 1);
  repeated.sampling.repetition_penalty = 1.3f;
  for (int round = 0; round < 2; ++round) {  // cold, then from the cache
    EXPECT_EQ(run(engine.get(), generated).ids, (Ids{20, 21, 20}));
    EXPECT_EQ(run(engine.get(), repeated).ids, (Ids{21}));
  }
}

TEST(Engine, EndsTheRequestWhoseLogitsAreNotFinite) {
  auto control = std::make_shared<Control>();
  control->logits = [](const Ids &context, float *logits) {
    RecallBackend::hashed_logits(context, logits);
    if (context[0] == 9 && context.size() == 7) {
      logits[3] = std::numeric_limits<float>::quiet_NaN();
    }
  };
  auto engine = make_engine(small_config(), control);
  const uint64_t bad = engine->submit(request({9, 1, 2, 3}, 10));
  const uint64_t good = engine->submit(request({8, 1, 2, 3}, 10));
  const Answer ended = wait_for(engine.get(), bad);
  EXPECT_EQ(ended.finished.status, Status::kNonFiniteLogits);
  EXPECT_EQ(ended.finished.finish_reason, FinishReason::kNone);
  EXPECT_EQ(ended.ids.size(), 3u);
  EXPECT_EQ(wait_for(engine.get(), good).ids, expected_greedy({8, 1, 2, 3}, 10));
  expect_nothing_held(*engine);
}

TEST(Engine, EndsTheRequestThatForbidsEveryToken) {
  auto engine = make_engine();
  RequestOptions options = request(prompt_of(4), 5);
  for (int32_t id = 0; id < RecallBackend::kVocabSize; ++id) {
    options.biases.push_back({id, -std::numeric_limits<float>::infinity()});
  }
  EXPECT_EQ(run(engine.get(), options).finished.status, Status::kInvalidArgument);
}

TEST(Engine, EndsWhatOutgrowsThePool) {
  auto engine = make_engine(small_config(/*num_blocks=*/3));
  const Answer answer = run(engine.get(), request(prompt_of(40), 100));
  EXPECT_EQ(answer.finished.status, Status::kKvExhausted);
  EXPECT_EQ(answer.ids.size(), 9u);  // 48 positions, and the token after the last
  expect_nothing_held(*engine);
}

}  // namespace
}  // namespace xllm
