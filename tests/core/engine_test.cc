// The engine end to end over a small device that answers from what lies in its cache
// (recall_backend.h), and over the CPU backend with tiny models.

#include "engine/engine.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backend/factory.h"
#include "recall_backend.h"

namespace xllm {
namespace {

using Control = RecallBackend::Control;
using Ids = std::vector<int32_t>;

constexpr int kBlockSize = 16;
constexpr double kSoon = 20;  // seconds that no test should ever wait

// ---- a vocabulary: 0..25 letters, 26 <|end|>, 27..30 the bytes of one emoji, 31.. capital
// letters; rows from 56 on are padding ----

constexpr int32_t kEnd = 26;
constexpr int32_t kEmoji = 27;

std::shared_ptr<const Tokenizer> make_tokenizer() {
  std::vector<std::string> tokens;
  for (char c = 'a'; c <= 'z'; ++c) tokens.emplace_back(1, c);
  tokens.emplace_back("<|end|>");
  // F0 9F 98 80 in the alphabet of byte-level vocabularies.
  for (const char *byte : {"\xC3\xB0", "\xC5\x81", "\xC4\xBA", "\xC4\xA2"})
    tokens.emplace_back(byte);
  for (char c = 'A'; c < 'A' + 25; ++c) tokens.emplace_back(1, c);
  std::vector<int32_t> types(tokens.size(), 1);
  types[kEnd] = 3;
  VocabSource source;
  source.model = "gpt2";
  source.pre = "gpt-2";
  source.tokens.assign(tokens.begin(), tokens.end());
  source.types = types;
  source.num_rows = RecallBackend::kVocabSize;
  source.eos = kEnd;
  return Tokenizer::create(source);
}

EngineModel recall_model(std::shared_ptr<const Tokenizer> tokenizer = make_tokenizer()) {
  EngineModel model;
  model.config.context_length = 512;
  model.dims.num_layers = 1;
  model.dims.hidden_size = 32;
  model.dims.intermediate_size = 32;
  model.dims.num_heads = 1;
  model.dims.num_kv_heads = 1;
  model.dims.head_dim = 32;
  model.dims.vocab_size = RecallBackend::kVocabSize;
  model.tokenizer = tokenizer.get();
  model.keep_alive = std::move(tokenizer);
  return model;
}

uint64_t pool_bytes(int num_blocks) {
  KvLayout layout;
  layout.num_layers = 1;
  layout.num_kv_heads = 1;
  layout.head_dim = 32;
  layout.block_size = kBlockSize;
  return layout.block_bytes() * static_cast<uint64_t>(num_blocks);
}

EngineConfig small_config(int num_blocks = 256) {
  EngineConfig config;
  config.block_size = kBlockSize;
  config.kv_memory = pool_bytes(num_blocks);
  return config;
}

std::unique_ptr<Engine> make_engine(
    const EngineConfig &config = small_config(),
    std::shared_ptr<Control> control = std::make_shared<Control>()) {
  return std::make_unique<Engine>(recall_model(), config,
                                  std::make_unique<RecallBackend>(std::move(control)));
}

RequestOptions request(Ids prompt, uint32_t max_tokens = 12) {
  RequestOptions options;
  options.prompt = std::move(prompt);
  options.max_tokens = max_tokens;
  options.delivery = Delivery::kPrivate;
  options.ignore_eos = true;
  return options;
}

Ids prompt_of(int length, int seed = 0) {
  Ids ids;
  for (int i = 0; i < length; ++i) ids.push_back((i * 7 + seed * 5 + i * i % 11) % 26);
  return ids;
}

RequestOptions sampled(RequestOptions options, uint64_t seed) {
  options.sampling.temperature = 0.9f;
  options.sampling.top_p = 0.9f;
  options.sampling.repetition_penalty = 1.1f;
  options.sampling.frequency_penalty = 0.2f;
  options.sampling.seed = seed;
  options.num_logprobs = 2;
  return options;
}

struct Answer {
  Ids ids;
  std::vector<float> logprobs;
  std::string text;
  std::vector<std::string> texts;
  Event accepted;
  Event finished;
  int num_accepted = 0;
  std::vector<uint32_t> prefills;
};

bool operator==(const Answer &a, const Answer &b) {
  return a.ids == b.ids && a.logprobs == b.logprobs && a.text == b.text &&
         a.finished.status == b.finished.status &&
         a.finished.finish_reason == b.finished.finish_reason;
}

void add(const Event &event, Answer *answer) {
  if (event.kind == EventKind::kAccepted) {
    answer->accepted = event;
    ++answer->num_accepted;
  }
  if (event.kind == EventKind::kPrefill) answer->prefills.push_back(event.num_computed_tokens);
  if (event.kind == EventKind::kToken) {
    EXPECT_EQ(event.token_index, answer->ids.size());
    answer->ids.push_back(event.token_id);
    answer->logprobs.push_back(event.logprob);
    for (const Candidate &candidate : event.candidates) {
      answer->logprobs.push_back(candidate.logprob);
    }
    answer->texts.push_back(event.text);
  }
  answer->text += event.text;
  if (event.kind == EventKind::kFinished) answer->finished = event;
}

Answer wait_for(Engine *engine, uint64_t id) {
  Answer answer;
  while (answer.finished.kind != EventKind::kFinished) {
    const std::vector<Event> events = engine->take_events(id, kSoon);
    if (events.empty()) {
      ADD_FAILURE() << "no event in time";
      return answer;
    }
    for (const Event &event : events) add(event, &answer);
  }
  return answer;
}

Answer run(Engine *engine, const RequestOptions &options) {
  return wait_for(engine, engine->submit(options));
}

Status status_of(const std::function<void()> &call, std::string *field = nullptr) {
  try {
    call();
  } catch (const Error &error) {
    for (const auto &[key, value] : error.details()) {
      if (field != nullptr && key == "field") *field = value;
    }
    return error.status();
  }
  return Status::kOk;
}

// What the device says, one token after the other, without an engine.
Ids expected_greedy(Ids context, int count, const std::shared_ptr<Control> &control = nullptr) {
  Ids out;
  for (int i = 0; i < count; ++i) {
    float logits[RecallBackend::kVocabSize];
    if (control && control->logits) {
      control->logits(context, logits);
    } else {
      RecallBackend::hashed_logits(context, logits);
    }
    out.push_back(static_cast<int32_t>(std::max_element(logits, logits + 56) - logits));
    context.push_back(out.back());
  }
  return out;
}

// Says the tokens of a script, by the number of tokens that lie before.
std::shared_ptr<Control> scripted(size_t num_prompt, Ids script) {
  auto control = std::make_shared<Control>();
  control->logits = [=](const Ids &context, float *logits) {
    std::fill(logits, logits + RecallBackend::kVocabSize, 0.0f);
    const size_t index = context.size() - num_prompt;
    logits[index < script.size() ? script[index] : 25] = 9;
  };
  return control;
}

Ids spell(const std::string &text) {
  Ids ids;
  for (const char c : text) {
    ids.push_back(c >= 'a' ? c - 'a' : c - 'A' + 31);
  }
  return ids;
}

void expect_nothing_held(const Engine &engine) {
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.blocks_used, 0u);
  EXPECT_EQ(stats.slots_used, 0u);
  EXPECT_EQ(stats.num_running, 0u);
  EXPECT_EQ(stats.num_waiting, 0u);
}

// ---- what comes out ----

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
    auto engine = make_engine(config);
    std::vector<uint64_t> ids;
    for (const RequestOptions &options : requests) ids.push_back(engine->submit(options));
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

// ---- cancel, deadlines, limits ----

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

  Slot slot;
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

// ---- decode modes ----

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
  Slot slot;
  EXPECT_TRUE(engine->get_slot(0, &slot));
  EXPECT_FALSE(engine->get_slot(8, &slot));
  EXPECT_FALSE(engine->get_slot(-1, &slot));
  EXPECT_EQ(engine->stats().slots_total, 8u);
  control->gate.open();
  wait_for(engine.get(), id);
  EXPECT_EQ(engine->stats().num_steps, 3u);
}

// ---- the CPU backend ----

std::filesystem::path tiny_model(const std::string &name) {
  return std::filesystem::path(__FILE__).parent_path().parent_path() / "data" / "forward" /
         (name + ".gguf");
}

class CpuEngine : public testing::TestWithParam<std::string> {};

std::unique_ptr<Engine> make_cpu_engine(const std::string &name, DecodeMode mode, int num_threads,
                                        const std::string &instruction_set, EngineConfig config) {
  config.decode_mode = mode;
  BackendOptions options;
  options.num_threads = num_threads;
  options.instruction_set = instruction_set;
  return std::make_unique<Engine>(make_engine_model(ModelFile::open(tiny_model(name).string())),
                                  config, make_backend(BackendKind::kCpu, options));
}

TEST_P(CpuEngine, SameBytesAloneBesideSevenOthersPreemptedAndFromTheCache) {
  Ids prompt;
  for (int i = 0; i < 37; ++i) prompt.push_back((7 * i + i * i / 3) % 48);
  EngineConfig config;
  config.block_size = 16;
  config.kv_memory = 4 << 20;
  for (const DecodeMode mode : {DecodeMode::kBatched, DecodeMode::kPerSlot}) {
    for (const uint64_t seed : {0, 7}) {
      const RequestOptions mine =
          seed == 0 ? request(prompt, 24) : sampled(request(prompt, 24), seed);
      const Answer alone = run(make_cpu_engine(GetParam(), mode, 1, "scalar", config).get(), mine);
      ASSERT_EQ(alone.ids.size(), 24u);
      for (const int num_threads : {1, 3}) {
        EngineConfig busy = config;
        busy.prefill_chunk = num_threads == 1 ? 9 : 64;
        auto engine = make_cpu_engine(GetParam(), mode, num_threads, "", busy);
        busy.kv_memory = 16 * engine->info().plan.sets[0].kv_layout.block_bytes();
        engine = make_cpu_engine(GetParam(), mode, num_threads, "", busy);
        std::vector<uint64_t> others;
        for (int i = 0; i < 7; ++i) {
          Ids other = prompt;
          other[0] = i;
          others.push_back(
              engine->submit(sampled(request(other, 30), 70 + static_cast<uint64_t>(i))));
        }
        EXPECT_EQ(run(engine.get(), mine), alone);
        EXPECT_EQ(run(engine.get(), mine), alone);
        for (const uint64_t id : others) {
          EXPECT_EQ(wait_for(engine.get(), id).finished.status, Status::kOk);
        }
        if (mode == DecodeMode::kBatched) {
          EXPECT_GT(engine->stats().num_preemptions, 0u);
        }
        expect_nothing_held(*engine);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(TinyModels, CpuEngine, testing::Values("llama", "llama_q4_1", "qwen3"),
                         [](const auto &info) { return info.param; });

}  // namespace
}  // namespace xllm
