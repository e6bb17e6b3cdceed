// What the engine tests share: a small model over RecallBackend, requests for it, and answers put
// together from events.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "recall_backend.h"

namespace xllm {

using Control = RecallBackend::Control;
using Ids = std::vector<int32_t>;

constexpr int kBlockSize = 16;
constexpr double kSoon = 20;  // seconds that no test should ever wait

// ---- a vocabulary: 0..25 letters, 26 <|end|>, 27..30 the bytes of one emoji, 31.. capital
// letters; rows from 56 on are padding ----

constexpr int32_t kEnd = 26;
constexpr int32_t kEmoji = 27;

inline std::shared_ptr<const Tokenizer> make_tokenizer() {
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

inline EngineModel recall_model(std::shared_ptr<const Tokenizer> tokenizer = make_tokenizer()) {
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

inline uint64_t pool_bytes(int num_blocks) {
  KvLayout layout;
  layout.num_layers = 1;
  layout.num_kv_heads = 1;
  layout.head_dim = 32;
  layout.block_size = kBlockSize;
  return layout.block_bytes() * static_cast<uint64_t>(num_blocks);
}

inline EngineConfig small_config(int num_blocks = 256) {
  EngineConfig config;
  config.block_size = kBlockSize;
  config.kv_memory = pool_bytes(num_blocks);
  return config;
}

inline std::unique_ptr<Engine> make_engine(
    const EngineConfig &config = small_config(),
    std::shared_ptr<Control> control = std::make_shared<Control>()) {
  return std::make_unique<Engine>(recall_model(), config,
                                  std::make_unique<RecallBackend>(std::move(control)));
}

inline RequestOptions request(Ids prompt, uint32_t max_tokens = 12) {
  RequestOptions options;
  options.prompt = std::move(prompt);
  options.max_tokens = max_tokens;
  options.delivery = Delivery::kPrivate;
  options.ignore_eos = true;
  return options;
}

inline Ids prompt_of(int length, int seed = 0) {
  Ids ids;
  for (int i = 0; i < length; ++i) ids.push_back((i * 7 + seed * 5 + i * i % 11) % 26);
  return ids;
}

inline RequestOptions sampled(RequestOptions options, uint64_t seed) {
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

inline bool operator==(const Answer &a, const Answer &b) {
  return a.ids == b.ids && a.logprobs == b.logprobs && a.text == b.text &&
         a.finished.status == b.finished.status &&
         a.finished.finish_reason == b.finished.finish_reason;
}

inline void add(const Event &event, Answer *answer) {
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

inline Answer wait_for(Engine *engine, uint64_t id) {
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

inline Answer run(Engine *engine, const RequestOptions &options) {
  return wait_for(engine, engine->submit(options));
}

inline Status status_of(const std::function<void()> &call, std::string *field = nullptr) {
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
inline Ids expected_greedy(Ids context, int count,
                           const std::shared_ptr<Control> &control = nullptr) {
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
inline std::shared_ptr<Control> scripted(size_t num_prompt, Ids script) {
  auto control = std::make_shared<Control>();
  control->logits = [=](const Ids &context, float *logits) {
    std::fill(logits, logits + RecallBackend::kVocabSize, 0.0f);
    const size_t index = context.size() - num_prompt;
    logits[index < script.size() ? script[index] : 25] = 9;
  };
  return control;
}

inline Ids spell(const std::string &text) {
  Ids ids;
  for (const char c : text) {
    ids.push_back(c >= 'a' ? c - 'a' : c - 'A' + 31);
  }
  return ids;
}

// ---- slots ----

inline SlotRef acquire(Engine *engine, DecodeMode mode = DecodeMode::kAuto, double lease_s = 60) {
  const SlotSnapshot slot = engine->acquire(mode, -1, lease_s);
  return {slot.index, slot.epoch};
}

inline SlotSnapshot look(const Engine &engine, SlotRef ref) {
  SlotSnapshot out;
  EXPECT_TRUE(engine.get_slot(ref.slot, &out));
  return out;
}

inline Answer prefill(Engine *engine, SlotRef ref, const Ids &prompt) {
  return wait_for(engine, engine->prefill(ref, request(prompt)));
}

inline uint64_t start_decode(Engine *engine, SlotRef ref, const RequestOptions &how) {
  if (look(*engine, ref).decode_mode == DecodeMode::kPerSlot) return engine->decode_slot(ref, how);
  return engine->decode_batch({&ref, 1}, {how}).front();
}

inline Answer decode(Engine *engine, SlotRef ref, const RequestOptions &how) {
  return wait_for(engine, start_decode(engine, ref, how));
}

// Gives other threads their turn until it holds; fails the test when it never does.
inline void wait_until(const std::function<bool()> &holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!holds()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "it never came to hold";
    std::this_thread::yield();
  }
}

// A caller may see a seat free just before the loop has published the rest of what it let go.
inline void expect_nothing_held(const Engine &engine) {
  wait_until([&] {
    const EngineStats now = engine.stats();
    return now.blocks_used == 0 && now.slots_used == 0 && now.num_running + now.num_waiting == 0;
  });
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.blocks_used, 0u);
  EXPECT_EQ(stats.slots_used, 0u);
  EXPECT_EQ(stats.num_running, 0u);
  EXPECT_EQ(stats.num_waiting, 0u);
}

}  // namespace xllm
