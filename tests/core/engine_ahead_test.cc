// Steps that are started before the tokens of the step before are known: the same answers, and
// nothing of what was computed once too often remains.
#include "engine_fixture.h"

namespace xllm {
namespace {

std::shared_ptr<Control> device(bool samples) {
  auto control = std::make_shared<Control>();
  control->samples_on_device = samples;
  return control;
}

// Requests that end in every way and differ in what they allow: i-th of many.
RequestOptions varied(int i) {
  RequestOptions options =
      request(prompt_of(3 + 11 * (i % 7), i), 5 + static_cast<uint32_t>(i % 40));
  if (i % 3 == 1) {
    options.sampling.temperature = 0.8f;
    options.sampling.top_k = i % 2 == 0 ? 12 : 0;
    options.sampling.top_p = 0.9f;
    options.sampling.seed = static_cast<uint64_t>(i);
  }
  if (i % 4 == 2) options.ignore_eos = false;
  if (i % 5 == 3) options.stop_token_ids = {static_cast<int32_t>(i % 26), 4, 9, 17};
  if (i % 6 == 4) options.stop_strings = {"a", "q"};
  if (i % 8 == 5) options.min_tokens = 4;
  if (i % 9 == 6) options.sampling.presence_penalty = 0.5f;
  if (i % 10 == 7) options.num_logprobs = 1;
  return options;
}

std::vector<Answer> run_all(Engine *engine, int count) {
  std::vector<uint64_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(engine->submit(varied(i)));
  std::vector<Answer> answers;
  for (const uint64_t id : ids) answers.push_back(wait_for(engine, id));
  return answers;
}

TEST(Ahead, AnswersAreTheSame) {
  constexpr int kCount = 60;
  std::vector<Answer> expected, alone;
  for (const int num_blocks : {256, 14}) {  // with room for all, and with preemptions
    EngineConfig config = small_config(num_blocks);
    config.max_slots = 6;
    config.prefill_chunk = 16;
    auto plain = make_engine(config, device(false));
    const std::vector<Answer> before = run_all(plain.get(), kCount);
    const auto control = device(true);
    auto engine = make_engine(config, control);
    const std::vector<Answer> after = run_all(engine.get(), kCount);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(after[i] == before[i]) << i;
    wait_until([&] { return engine->stats().slots_used == 0; });
    expect_nothing_held(*engine);
    // One after the other, nearly every step is started ahead.
    const int num_before = control->num_ahead;
    for (int i = 0; i < 12; ++i)
      EXPECT_TRUE(run(engine.get(), varied(i)) == before[static_cast<size_t>(i)]) << i;
    EXPECT_GT(control->num_ahead, num_before + 20);
  }
}

TEST(Ahead, ALoneRequestIsAlwaysAStepAhead) {
  const auto control = device(true);
  auto engine = make_engine(small_config(), control);
  EXPECT_EQ(run(engine.get(), request(prompt_of(9), 30)).ids, expected_greedy(prompt_of(9), 30));
  EXPECT_EQ(control->num_ahead, 29);  // all but the first
  // The last token is known to be the last: nothing is computed after it.
  EXPECT_EQ(control->gate.num_begun(), 30);
}

TEST(Ahead, WhereATokenHasASayInTheNextOneItsRowIsAheadAndItsChoiceIsNot) {
  const auto control = device(true);
  auto engine = make_engine(small_config(), control);
  RequestOptions options = request(prompt_of(9), 30);
  options.sampling.presence_penalty = 0.5f;
  auto plain = make_engine(small_config(), device(false));
  EXPECT_TRUE(run(engine.get(), options) == run(plain.get(), options));
  EXPECT_EQ(control->num_rows_ahead, 29);
  EXPECT_EQ(control->num_ahead, 0);
  EXPECT_EQ(control->gate.num_begun(), 30);
}

TEST(Ahead, AnEndIsSeenAStepLateAndLeavesNothing) {
  Ids script = spell("ok");
  script.push_back(kEnd);
  auto control = scripted(4, script);
  control->samples_on_device = true;
  auto engine = make_engine(small_config(), control);
  RequestOptions options = request(prompt_of(4), 30);
  options.ignore_eos = false;
  for (int i = 0; i < 3; ++i) {
    const Answer answer = run(engine.get(), options);
    EXPECT_EQ(answer.text, "ok");
    EXPECT_EQ(answer.finished.finish_reason, FinishReason::kEos);
    EXPECT_EQ(answer.finished.num_generated_tokens, 3u);
  }
  wait_until([&] { return engine->stats().num_steps >= 12; });  // the surplus one among them
  expect_nothing_held(*engine);
}

TEST(Ahead, WhoComesMeanwhileIsNotKeptWaiting) {
  const auto control = device(true);
  auto engine = make_engine(small_config(), control);
  const uint64_t first = engine->submit(request(prompt_of(5), 200));
  wait_until([&] { return engine->stats().num_generated_tokens > 20; });
  const Answer second = run(engine.get(), request(prompt_of(7, 3), 6));
  EXPECT_EQ(second.ids, expected_greedy(prompt_of(7, 3), 6));
  EXPECT_EQ(wait_for(engine.get(), first).ids, expected_greedy(prompt_of(5), 200));
}

TEST(Ahead, ACancelEndsIt) {
  const auto control = device(true);
  auto engine = make_engine(small_config(), control);
  for (int i = 0; i < 20; ++i) {
    control->gate.close();
    const int num_begun = control->gate.num_begun();
    const uint64_t id = engine->submit(request(prompt_of(5, i), 400));
    const uint64_t beside = engine->submit(request(prompt_of(8, i), 10));
    control->gate.allow(2 + i % 5);
    control->gate.wait_until_begun(num_begun + 3 + i % 5);
    engine->cancel(id);
    control->gate.open();
    EXPECT_EQ(wait_for(engine.get(), id).finished.status, Status::kCancelled);
    EXPECT_EQ(wait_for(engine.get(), beside).ids, expected_greedy(prompt_of(8, i), 10));
  }
  wait_until([&] { return engine->stats().slots_used == 0; });
  expect_nothing_held(*engine);
}

}  // namespace
}  // namespace xllm
