// The end of an ownership races with decode, many times over: whoever wins, every block comes back,
// calls end for a reason that says who won, and the tokens that came are the right ones.

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "engine_fixture.h"

namespace xllm {
namespace {

constexpr int kRepetitions = 200;

class SlotRaces : public testing::TestWithParam<DecodeMode> {
 protected:
  void SetUp() override {
    EngineConfig config = small_config(64);
    config.decode_mode = GetParam();
    config.max_slots = 2;
    engine_ = make_engine(config);
  }

  void expect_all_back() {
    wait_until([&] { return engine_->stats().blocks_used == 0; });
    wait_until([&] { return engine_->stats().slots_used == 0; });
    expect_nothing_held(*engine_);
  }

  // What a call may end with when its slot is taken away. The tokens before that are right.
  static void expect_ended(const Answer &answer, const Ids &prompt) {
    const Status status = answer.finished.status;
    EXPECT_TRUE(status == Status::kOk || status == Status::kLeaseLost) << static_cast<int>(status);
    EXPECT_EQ(answer.ids, expected_greedy(prompt, static_cast<int>(answer.ids.size())));
  }

  // Decodes until the ownership is gone.
  void decode_until_lost(SlotRef ref, const Ids &prompt) {
    Ids context = prompt;
    while (true) {
      Answer answer;
      try {
        answer = decode(engine_.get(), ref, request({}, 3));
      } catch (const Error &error) {
        const Status status = error.status();
        EXPECT_TRUE(status == Status::kLeaseLost || status == Status::kStaleEpoch ||
                    status == Status::kSlotState)
            << error.message();
        return;
      }
      expect_ended(answer, context);
      context.insert(context.end(), answer.ids.begin(), answer.ids.end());
    }
  }

  // The mode of an acquired slot is that of the engine, also when it is free again by now.
  uint64_t start(SlotRef ref, const RequestOptions &how) {
    if (GetParam() == DecodeMode::kPerSlot) return engine_->decode_slot(ref, how);
    return engine_->decode_batch({&ref, 1}, {how}).front();
  }
  Answer decode(Engine *engine, SlotRef ref, const RequestOptions &how) {
    return wait_for(engine, start(ref, how));
  }

  std::unique_ptr<Engine> engine_;
};

TEST_P(SlotRaces, LeaseExpiryAgainstDecode) {
  for (int i = 0; i < kRepetitions; ++i) {
    const Ids prompt = prompt_of(10 + i % 30, i);
    wait_until([&] { return engine_->stats().slots_used < 2; });
    const SlotRef ref = acquire(engine_.get());
    prefill(engine_.get(), ref, prompt);
    engine_->renew(ref, 1e-6 * (1 + i % 200));
    decode_until_lost(ref, prompt);
  }
  expect_all_back();
}

TEST_P(SlotRaces, LeaseExpiryAgainstPrefill) {
  for (int i = 0; i < kRepetitions; ++i) {
    wait_until([&] { return engine_->stats().slots_used < 2; });
    const SlotRef ref = acquire(engine_.get());
    const uint64_t id = engine_->prefill(ref, request(prompt_of(200, i)));
    engine_->renew(ref, 1e-6 * (1 + i % 150));
    const Answer answer = wait_for(engine_.get(), id);
    EXPECT_TRUE(answer.finished.status == Status::kOk ||
                answer.finished.status == Status::kLeaseLost);
  }
  expect_all_back();
}

TEST_P(SlotRaces, ReleaseAgainstDecode) {
  for (int i = 0; i < kRepetitions; ++i) {
    const Ids prompt = prompt_of(10 + i % 30, i);
    wait_until([&] { return engine_->stats().slots_used < 2; });
    const SlotRef ref = acquire(engine_.get());
    prefill(engine_.get(), ref, prompt);
    std::atomic<int> num_calls{0};
    std::thread releaser([&] {
      while (num_calls < i % 3) std::this_thread::yield();
      engine_->release(ref);
    });
    try {
      while (true) {
        const uint64_t id = start(ref, request({}, 3));
        ++num_calls;
        const Status status = wait_for(engine_.get(), id).finished.status;
        EXPECT_TRUE(status == Status::kOk || status == Status::kLeaseLost);
      }
    } catch (const Error &error) {
      // Or the slot was full before the other thread got its turn.
      EXPECT_TRUE(error.status() == Status::kStaleEpoch || error.status() == Status::kSlotState)
          << error.message();
      num_calls = 3;
    }
    releaser.join();
  }
  expect_all_back();
}

TEST_P(SlotRaces, OwnerChangeAgainstDecode) {
  // One seat, two who want it: each takes it as soon as the other has let go, while the other still
  // tries to decode with the name it had.
  const SlotRef other = acquire(engine_.get());  // so that one seat is left
  std::atomic<int> num_owned{0};
  const auto take_turns = [&](int seed) {
    const Ids prompt = prompt_of(20, seed);
    while (num_owned < kRepetitions) {
      SlotRef ref;
      try {
        ref = acquire(engine_.get());
      } catch (const Error &error) {
        EXPECT_EQ(error.status(), Status::kNoFreeSlot);
        std::this_thread::yield();
        continue;
      }
      ++num_owned;
      EXPECT_EQ(prefill(engine_.get(), ref, prompt).finished.status, Status::kOk);
      const uint64_t id = start(ref, request({}, 50));
      engine_->release(ref);
      const Answer answer = wait_for(engine_.get(), id);
      expect_ended(answer, prompt);
      // By now it may be the other's: the old name moves nothing.
      EXPECT_EQ(status_of([&] { start(ref, request({}, 3)); }), Status::kStaleEpoch);
      EXPECT_EQ(status_of([&] { engine_->prefill(ref, request(prompt)); }), Status::kStaleEpoch);
      EXPECT_EQ(status_of([&] { engine_->release(ref); }), Status::kStaleEpoch);
    }
  };
  std::thread one([&] { take_turns(1); });
  std::thread two([&] { take_turns(2); });
  one.join();
  two.join();
  engine_->release(other);
  expect_all_back();
}

TEST_P(SlotRaces, CancelAgainstTheLastToken) {
  const SlotRef ref = acquire(engine_.get());
  const Ids prompt = prompt_of(12);
  prefill(engine_.get(), ref, prompt);
  Ids context = prompt;
  for (int i = 0; i < kRepetitions; ++i) {
    const uint64_t id = start(ref, request({}, 2));
    for (int spin = 0; spin < i * 20; ++spin) std::atomic_signal_fence(std::memory_order_seq_cst);
    engine_->cancel(id);
    const Answer answer = wait_for(engine_.get(), id);
    EXPECT_TRUE(answer.finished.status == Status::kOk ||
                answer.finished.status == Status::kCancelled);
    EXPECT_EQ(answer.ids, expected_greedy(context, static_cast<int>(answer.ids.size())));
    context.insert(context.end(), answer.ids.begin(), answer.ids.end());
    EXPECT_EQ(look(*engine_, ref).state, SlotState::kReady);
  }
  engine_->release(ref);
  expect_all_back();
}

INSTANTIATE_TEST_SUITE_P(BothModes, SlotRaces,
                         testing::Values(DecodeMode::kBatched, DecodeMode::kPerSlot),
                         [](const auto &info) {
                           return info.param == DecodeMode::kPerSlot ? "PerSlot" : "Batched";
                         });

}  // namespace
}  // namespace xllm
