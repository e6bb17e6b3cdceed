// Masks that come while the step runs whose tokens they are for: in time for it or too late, which
// changes no byte. The gate of the backend holds the loop in the forward pass of a step.

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "masked_requests.h"

namespace xllm {
namespace {

constexpr int32_t kFirst = 4;  // the only token that the first mask allows

// A free stream and a constrained request beside it, held in the forward pass of the step after
// the one that chose the request's first token: the second mask has been asked for, and is due.
class DueMask : public ::testing::Test {
 protected:
  DueMask() {
    control->gate.close();
    EngineConfig config = small_config();
    config.max_token_gap_s = 0;  // prompts are computed in one go
    engine = make_engine(config, control);
    other = engine->submit(request(prompt_of(4), 60));
    control->gate.wait_until_begun(1);
    id = engine->submit(constrained(prompt_of(20)));
    engine->push_masks({{id, 0, only({kFirst})}});
    advance();
    advance();
    look();
    EXPECT_EQ(answer.ids, (Ids{kFirst}));
  }
  ~DueMask() override {
    control->gate.open();
    EXPECT_EQ(wait_for(engine.get(), other).ids, expected_greedy(prompt_of(4), 60));
  }

  // Until the next step is held in its forward pass; returns how many rows it has.
  int advance() {
    const int num_begun = control->gate.num_begun();
    const int num_rows = control->num_rows;
    control->gate.allow(1);
    control->gate.wait_until_begun(num_begun + 1);
    return control->num_rows - num_rows;
  }
  // What has happened to the constrained request so far.
  void look() {
    for (const Event &event : engine->take_events(id, 0)) add(event, &answer);
  }

  std::shared_ptr<Control> control = std::make_shared<Control>();
  std::unique_ptr<Engine> engine;
  uint64_t other = 0, id = 0;
  Answer answer;
};

TEST_F(DueMask, ThatComesWhileTheStepRunsIsInTimeForIt) {
  const std::vector<Ids> allowed = pairs(12);
  for (uint32_t index = 1; index < 12; ++index) {
    engine->push_masks({{id, index, only(allowed[index])}});
    EXPECT_EQ(advance(), index + 1 < 12 ? 2 : 1);
    look();
    EXPECT_EQ(answer.ids.size(), index + 1);
  }
  Ids context = prompt_of(20);
  context.push_back(kFirst);
  Ids expected = expected_within(context, {allowed.begin() + 1, allowed.end()});
  expected.insert(expected.begin(), kFirst);
  EXPECT_EQ(answer.ids, expected);
}

TEST_F(DueMask, ThatIsLateCostsItsRowTheStepAndTheOthersNoSecondOne) {
  EXPECT_EQ(advance(), 1);  // it sits the next step out
  look();
  EXPECT_EQ(answer.ids.size(), 1u);
  engine->push_masks({{id, 1, only({6, 9, 40})}});
  EXPECT_EQ(advance(), 2);
  look();
  EXPECT_EQ(answer.ids.size(), 1u);
  engine->push_masks({{id, 2, only({7})}});
  EXPECT_EQ(advance(), 2);
  look();
  Ids context = prompt_of(20);
  context.push_back(kFirst);
  EXPECT_EQ(answer.ids, (Ids{kFirst, expected_within(context, {{6, 9, 40}}).front()}));
  EXPECT_EQ(advance(), 2);  // the one after it was there in time, and the one after that is due
  look();
  EXPECT_EQ(answer.ids.size(), 3u);
}

TEST_F(DueMask, OfACancelledRequestIsNotWaitedFor) {
  engine->cancel(id);
  EXPECT_EQ(advance(), 1);
  look();
  EXPECT_EQ(answer.finished.status, Status::kCancelled);
  EXPECT_EQ(answer.ids.size(), 1u);
  EXPECT_LE(engine->stats().cancel_steps_max, 1u);
}

TEST_F(DueMask, OfARequestThatEndsMeanwhileIsDropped) {
  engine->cancel(id);
  engine->push_masks({{id, 1, only({7})}, {id, 2, only({8})}});
  EXPECT_EQ(advance(), 1);
  look();
  EXPECT_EQ(answer.finished.status, Status::kCancelled);
  engine->push_masks({{id, 2, only({8})}, {other, 0, only({})}});
  EXPECT_EQ(advance(), 1);
}

TEST_F(DueMask, IsWaitedForWithoutLosingThoseOfWhoHasNotBegun) {
  const uint64_t next = engine->submit(constrained(prompt_of(5), 3));
  engine->push_masks({{next, 0, only({1})}, {next, 1, only({2})}, {next, 2, only({3})}});
  advance();
  control->gate.open();
  EXPECT_EQ(wait_for(engine.get(), next).ids, (Ids{1, 2, 3}));
  engine->cancel(id);
}

TEST_F(DueMask, IsWaitedForWhoeverElseGetsHis) {
  // A second constrained request: its mask alone comes.
  const uint64_t second = engine->submit(constrained(prompt_of(9, 1), 3));
  engine->push_masks({{id, 1, only({5})}, {second, 0, only({1})}});
  EXPECT_EQ(advance(), 2 + 9);
  engine->push_masks({{id, 2, only({6})}});
  EXPECT_EQ(advance(), 3);
  engine->push_masks({{second, 1, only({2})}});  // not that of id
  EXPECT_EQ(advance(), 2);
  look();
  EXPECT_EQ(answer.ids, (Ids{kFirst, 5, 6}));
  control->gate.open();
  engine->push_masks({{second, 2, only({3})}});
  EXPECT_EQ(wait_for(engine.get(), second).ids, (Ids{1, 2, 3}));
  engine->cancel(id);
}

// The same on a device, which takes work and goes on by itself: the rows after a token are on their
// way before it is known. is_busy holds the loop where it waits for the mask.
class DueMaskOnDevice : public ::testing::Test {
 protected:
  DueMaskOnDevice() {
    control->samples_on_device = true;
    control->is_computing = [this] {
      ++num_looks;
      return is_busy.load();
    };
    engine = make_engine(small_config(), control);
  }

  // Until the loop waits for a mask.
  void wait_until_waiting() {
    const int before = num_looks;
    wait_until([&] { return num_looks > before + 5; });
  }
  // Its first token: the second mask is due.
  void start(uint32_t max_tokens = 12) {
    id = engine->submit(constrained(prompt_of(20), max_tokens));
    engine->push_masks({{id, 0, only({kFirst})}});
    while (answer.ids.empty()) {
      for (const Event &event : engine->take_events(id, kSoon)) add(event, &answer);
    }
  }
  // The rest, with masks as soon as they are asked for.
  void run_on(const std::vector<Ids> &allowed) {
    while (answer.finished.kind != EventKind::kFinished) {
      const std::vector<Event> events = engine->take_events(id, kSoon);
      ASSERT_FALSE(events.empty()) << "no event in time";
      for (const Event &event : events) {
        add(event, &answer);
        if (!event.wants_mask) continue;
        engine->push_masks({{id, event.token_index + 1, only(allowed[event.token_index + 1])}});
      }
    }
  }
  static Ids expected(const std::vector<Ids> &allowed) {
    Ids context = prompt_of(20);
    context.push_back(kFirst);
    Ids ids = expected_within(context, {allowed.begin() + 1, allowed.end()});
    ids.insert(ids.begin(), kFirst);
    return ids;
  }

  std::shared_ptr<Control> control = std::make_shared<Control>();
  std::atomic<bool> is_busy{true};
  std::atomic<int> num_looks{0};
  std::unique_ptr<Engine> engine;
  uint64_t id = 0;
  Answer answer;
};

TEST_F(DueMaskOnDevice, IsWaitedForAsLongAsTheRowsAreComputed) {
  const std::vector<Ids> allowed = pairs(12);
  start();
  wait_until_waiting();
  engine->push_masks({{id, 1, only(allowed[1])}});
  run_on(allowed);
  EXPECT_EQ(answer.ids, expected(allowed));
  EXPECT_EQ(control->num_rows, 20 + 11);   // each once
  EXPECT_EQ(control->num_rows_ahead, 11);  // and before the token in front of it was known
}

TEST_F(DueMaskOnDevice, IsWaitedForAfterThemWhereNobodyElseIsKeptWaiting) {
  EngineConfig config = small_config();
  config.mask_patience_s = kSoon;
  engine = make_engine(config, control);
  is_busy = false;
  const std::vector<Ids> allowed = pairs(12);
  start();
  engine->push_masks({{id, 1, only(allowed[1])}});
  run_on(allowed);
  EXPECT_EQ(answer.ids, expected(allowed));
  EXPECT_EQ(control->num_rows, 20 + 11);
  // Who comes is somebody else: the masks that do not come keep nobody waiting.
  const uint64_t slow = engine->submit(constrained(prompt_of(20)));
  EXPECT_EQ(run(engine.get(), request(prompt_of(4), 9)).ids, expected_greedy(prompt_of(4), 9));
  engine->push_masks({{slow, 0, only({kFirst})}});
  EXPECT_EQ(run(engine.get(), request(prompt_of(4), 9)).ids, expected_greedy(prompt_of(4), 9));
  engine->cancel(slow);
}

TEST_F(DueMaskOnDevice, IsNotWaitedForWhereSomebodyHasComeForOneWhoHasLeft) {
  EngineConfig config = small_config();
  config.mask_patience_s = 1000;
  engine = make_engine(config, control);
  is_busy = false;
  const SlotRef slot = acquire(engine.get());
  prefill(engine.get(), slot, prompt_of(9, 1));
  control->gate.close();
  const int num_begun = control->gate.num_begun();
  engine->submit(request(prompt_of(4), 1));
  control->gate.wait_until_begun(num_begun + 1);
  id = engine->submit(constrained(prompt_of(20)));
  const uint64_t other = engine->submit(constrained(prompt_of(20, 1)));
  engine->push_masks({{id, 0, only({kFirst})}, {other, 0, only({kFirst})}});
  control->gate.allow(2);
  control->gate.wait_until_begun(num_begun + 3);  // the rows behind their first tokens
  engine->cancel(other);
  const uint64_t decoding = start_decode(engine.get(), slot, request({}, 5));
  control->gate.open();
  EXPECT_EQ(wait_for(engine.get(), decoding).ids, expected_greedy(prompt_of(9, 1), 5));
  engine->cancel(id);
}

TEST_F(DueMaskOnDevice, ThatMissesTheRowsCostsThemAlone) {
  const std::vector<Ids> allowed = pairs(12);
  start();
  wait_until_waiting();
  is_busy = false;  // the rows are there, the mask is not
  wait_until([&] { return engine->stats().num_steps >= 2 && num_looks > 0; });
  const uint64_t free = engine->submit(request(prompt_of(4), 40));  // it is not waited for any more
  EXPECT_EQ(wait_for(engine.get(), free).ids, expected_greedy(prompt_of(4), 40));
  is_busy = true;
  engine->push_masks({{id, 1, only(allowed[1])}});
  run_on(allowed);
  EXPECT_EQ(answer.ids, expected(allowed));
  EXPECT_EQ(control->num_rows, 20 + 11 + 1 + 4 + 39);
}

TEST_F(DueMaskOnDevice, LeavesTheOthersAsTheyAre) {
  const std::vector<Ids> allowed = pairs(12);
  const uint64_t free = engine->submit(request(prompt_of(4), 60));
  const uint64_t drawn = engine->submit(sampled(request(prompt_of(7), 50), 3));
  RequestOptions alone = sampled(request(prompt_of(7), 50), 3);
  start();
  wait_until_waiting();
  engine->push_masks({{id, 1, only(allowed[1])}});
  run_on(allowed);
  EXPECT_EQ(answer.ids, expected(allowed));
  EXPECT_EQ(wait_for(engine.get(), free).ids, expected_greedy(prompt_of(4), 60));
  const Answer beside = wait_for(engine.get(), drawn);
  EXPECT_TRUE(beside == run(engine.get(), alone));
}

TEST_F(DueMaskOnDevice, OfARequestThatEndsMeanwhileIsNotWaitedFor) {
  const uint64_t free = engine->submit(request(prompt_of(4), 60));
  start();
  wait_until_waiting();  // its row is computed, and no token chosen for it
  engine->cancel(id);
  EXPECT_EQ(wait_for(engine.get(), id).finished.status, Status::kCancelled);
  EXPECT_EQ(wait_for(engine.get(), free).ids, expected_greedy(prompt_of(4), 60));
  wait_until([&] { return engine->stats().slots_used == 0; });
  expect_nothing_held(*engine);
}

TEST_F(DueMaskOnDevice, IsNotAskedForWhereItsRequestEndsWhileTheRowsAreStarted) {
  control->gate.close();
  engine->submit(request(prompt_of(4), 1));
  control->gate.wait_until_begun(1);
  id = engine->submit(constrained(prompt_of(20)));
  engine->push_masks({{id, 0, only({kFirst})}});
  control->gate.allow(2);
  control->gate.wait_until_begun(3);  // the rows behind the first token of id
  EXPECT_EQ(control->num_rows_ahead, 1);
  engine->cancel(id);  // it ends before their tokens are chosen
  control->gate.open();
  answer = wait_for(engine.get(), id);
  EXPECT_EQ(answer.finished.status, Status::kCancelled);
  EXPECT_EQ(answer.ids, (Ids{kFirst}));
  EXPECT_EQ(run(engine.get(), request(prompt_of(4))).ids, expected_greedy(prompt_of(4), 12));
}

TEST_F(DueMaskOnDevice, OfNothingEndsItsRequestAlone) {
  const uint64_t free = engine->submit(request(prompt_of(4), 60));
  start();
  wait_until_waiting();
  engine->push_masks({{id, 1, only({})}});  // the row behind it is on its way without a token
  run_on({});
  EXPECT_EQ(answer.finished.status, Status::kInvalidArgument);
  EXPECT_EQ(answer.ids, (Ids{kFirst}));
  EXPECT_EQ(wait_for(engine.get(), free).ids, expected_greedy(prompt_of(4), 60));
}

// Keeps steps coming, each held in its forward pass until the next one is asked for, with a free
// request that goes before all others of its mode and is followed by another before it ends.
class Steps {
 public:
  Steps(Engine *engine, Control *control, DecodeMode mode = DecodeMode::kAuto)
      : engine_(engine), control_(control), mode_(mode) {
    control->gate.close();
    num_begun_ = control->gate.num_begun();
    follow();
    control->gate.wait_until_begun(++num_begun_);
  }
  ~Steps() { control_->gate.open(); }

  void next() {
    for (const Event &event : engine_->take_events(free_, 0)) {
      if (event.kind == EventKind::kToken) ++num_tokens_;
    }
    if (num_tokens_ >= kTokens - 2) follow();
    control_->gate.allow(1);
    control_->gate.wait_until_begun(++num_begun_);
  }

 private:
  static constexpr int kTokens = 12;  // with its prompt no more than a block

  void follow() {
    RequestOptions options = request({1, 2}, kTokens);
    options.priority = 1;
    options.decode_mode = mode_;
    free_ = engine_->submit(options);
    num_tokens_ = 0;
  }

  Engine *engine_;
  Control *control_;
  DecodeMode mode_;
  uint64_t free_ = 0;
  int num_tokens_ = 0, num_begun_ = 0;
};

// The answers to constrained requests whose masks allow everything. Each is pushed as many steps
// after it was asked for as how_late says of the request's place and the position.
std::vector<Answer> run_late(Engine *engine, Steps *steps, const std::vector<uint64_t> &ids,
                             const std::function<int(size_t, uint32_t)> &how_late) {
  struct Wanted {
    size_t place;
    uint32_t index;
    int left;
  };
  std::vector<Answer> answers(ids.size());
  std::vector<Wanted> wanted;
  size_t num_finished = 0;
  while (num_finished < ids.size()) {
    for (size_t i = 0; i < ids.size(); ++i) {
      if (answers[i].finished.kind == EventKind::kFinished) continue;
      for (const Event &event : engine->take_events(ids[i], 0)) {
        add(event, &answers[i]);
        if (event.kind == EventKind::kFinished) ++num_finished;
        if (!event.wants_mask) continue;
        const uint32_t next = event.kind == EventKind::kToken ? event.token_index + 1 : 0;
        wanted.push_back({i, next, how_late(i, next)});
      }
    }
    std::vector<PositionMask> masks;
    std::vector<Wanted> later;
    for (const Wanted &entry : wanted) {
      if (entry.left > 0) {
        later.push_back({entry.place, entry.index, entry.left - 1});
      } else {
        masks.push_back({ids[entry.place], entry.index, everything()});
      }
    }
    wanted = std::move(later);
    engine->push_masks(std::move(masks));
    steps->next();
  }
  return answers;
}

TEST(DueMasks, LatenessChangesNoByte) {
  for (const bool on_device : {false, true}) {
    for (const int length : {1, 13, 16, 31}) {
      auto control = std::make_shared<Control>();
      control->samples_on_device = on_device;
      auto engine = make_engine(small_config(), control);
      RequestOptions options = sampled(request(prompt_of(length), 24), 3);
      if (on_device) options.num_logprobs = -1;
      std::vector<Answer> free;
      for (const uint64_t id : engine->submit(options, 3)) {
        free.push_back(wait_for(engine.get(), id));
      }
      options.is_constrained = true;
      Steps steps(engine.get(), control.get());
      // Outputs of one prompt, which share its blocks.
      const std::vector<Answer> masked =
          run_late(engine.get(), &steps, engine->submit(options, 3),
                   [](size_t i, uint32_t index) { return static_cast<int>((index + i) % 4); });
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(masked[i] == free[i]) << length << " tokens, output " << i;
      }
    }
  }
}

TEST(DueMasks, LatenessAndPreemptionsChangeNoByte) {
  EngineConfig config = small_config(5);  // of 16 tokens each: too few for two of 50
  config.decode_mode = DecodeMode::kAuto;
  config.use_prefix_cache = false;
  auto control = std::make_shared<Control>();
  auto engine = make_engine(config, control);
  const auto options_of = [](int i) {
    return sampled(request(prompt_of(20, i), 30), static_cast<uint64_t>(i));
  };
  std::vector<Answer> free;
  for (int i = 0; i < 3; ++i) free.push_back(run(engine.get(), options_of(i)));
  // From a pool of their own: those who wait for masks may hold all of this one.
  Steps steps(engine.get(), control.get(), DecodeMode::kPerSlot);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 3; ++i) {
    RequestOptions options = options_of(i);
    options.is_constrained = true;
    ids.push_back(engine->submit(options));
  }
  const std::vector<Answer> masked =
      run_late(engine.get(), &steps, ids,
               [](size_t i, uint32_t index) { return static_cast<int>((index * 5 + i) % 7); });
  uint32_t num_preemptions = 0;
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(masked[i] == free[i]) << i;
    num_preemptions += masked[i].finished.num_preemptions;
  }
  EXPECT_GT(num_preemptions, 0u);
}

// The next step is held in its forward pass, or, with its mask missing, is the last one.
void expect_missed_step(Engine *engine, Control *control, int num_begun) {
  control->gate.wait_until_begun(num_begun);
  control->gate.allow(1);
  wait_until([&] { return engine->stats().num_steps == static_cast<uint64_t>(num_begun); });
}

TEST(DueMasks, ALoneRequestGoesOnWhenItsMaskComes) {
  auto control = std::make_shared<Control>();
  control->gate.close();
  auto engine = make_engine(small_config(), control);
  const uint64_t id = engine->submit(constrained(prompt_of(20), 3));
  control->gate.wait_until_begun(1);  // all but its last token
  engine->push_masks({{id, 0, only({1})}});
  control->gate.allow(2);
  expect_missed_step(engine.get(), control.get(), 3);
  engine->push_masks({{id, 1, only({2})}});
  control->gate.allow(1);
  expect_missed_step(engine.get(), control.get(), 5);
  EXPECT_EQ(engine->stats().num_generated_tokens, 2u);
  engine->push_masks({{id, 2, only({3})}});
  control->gate.open();
  EXPECT_EQ(wait_for(engine.get(), id).ids, (Ids{1, 2, 3}));
}

TEST(DueMasks, ASlotWhoseRowDroppedOutGoesOnAndForksAsEver) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(small_config(), control);
  const SlotRef slot = acquire(engine.get());
  prefill(engine.get(), slot, prompt_of(15));
  control->gate.close();
  for (int round = 0; round < 3; ++round) {  // the token computed twice is in a new block at first
    const uint64_t id = start_decode(engine.get(), slot, constrained({}, 8));
    const int num_begun = control->gate.num_begun();
    engine->push_masks({{id, 0, only({kFirst})}});
    control->gate.allow(1);
    expect_missed_step(engine.get(), control.get(), num_begun + 2);
    engine->cancel(id);
    EXPECT_EQ(wait_for(engine.get(), id).ids, (Ids{kFirst}));
  }
  control->gate.open();
  Ids history = prompt_of(15);
  history.insert(history.end(), 3, kFirst);
  const SlotSnapshot copy = engine->fork(slot, 60);
  EXPECT_EQ(decode(engine.get(), slot, request({}, 20)).ids, expected_greedy(history, 20));
  EXPECT_EQ(decode(engine.get(), {copy.index, copy.epoch}, request({}, 20)).ids,
            expected_greedy(history, 20));
}

TEST(DueMasks, LogitsAreThoseOfTheirRowBesideOneThatDroppedOut) {
  auto control = std::make_shared<Control>();
  auto engine = make_engine(small_config(), control);
  const SlotRef slow = acquire(engine.get());
  const SlotRef stepped = acquire(engine.get());
  prefill(engine.get(), slow, prompt_of(20));
  prefill(engine.get(), stepped, prompt_of(9, 1));
  control->gate.close();
  int num_begun = control->gate.num_begun();
  const uint64_t id = start_decode(engine.get(), slow, constrained({}, 8));
  engine->push_masks({{id, 0, only({kFirst})}});
  control->gate.wait_until_begun(++num_begun);
  SlotStep step;
  std::thread caller([&] {
    const SamplingParams greedy;
    step = engine->step_batch({&stepped, 1}, {&greedy, 1}, true).front();
  });
  wait_until([&] { return look(*engine, stepped).state == SlotState::kDecoding; });
  control->gate.allow(1);  // the next step has both, and the mask of the first one does not come
  control->gate.wait_until_begun(++num_begun);
  EXPECT_EQ(control->most_seqs, 2);
  control->gate.open();
  caller.join();
  std::vector<float> expected(kVocab);
  RecallBackend::hashed_logits(prompt_of(9, 1), expected.data());
  EXPECT_EQ(step.logits, expected);
  EXPECT_EQ(step.token_id, expected_greedy(prompt_of(9, 1), 1).front());
  engine->cancel(id);
  wait_for(engine.get(), id);
}

}  // namespace
}  // namespace xllm
