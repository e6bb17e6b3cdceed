// The scheduler in stories with literal block ids, over a prefix cache and nothing else.

#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace xllm {
namespace {

constexpr int kBlockSize = 4;

std::vector<int32_t> ids(int first, int count) {
  std::vector<int32_t> out;
  for (int i = 0; i < count; ++i) out.push_back(first + i);
  return out;
}

// Scheduler, cache and sequences; a step computes what was scheduled and appends a token where one
// is wanted.
class World {
 public:
  explicit World(int num_blocks, int max_running = 4, int prefill_chunk = 64, int segment_size = 1,
                 bool use_cache = true, int max_step_sequences = 0)
      : cache(num_blocks, kBlockSize, HashKey{1, 2}, use_cache),
        scheduler({max_running, prefill_chunk, segment_size, max_step_sequences}, &cache),
        num_free_slots(max_running) {}

  Sequence *add(const std::vector<int32_t> &prompt, int32_t priority = 0, uint64_t tenant = 0) {
    auto sequence = std::make_unique<Sequence>(kBlockSize);
    sequence->id = sequences_.size() + 1;
    sequence->priority = priority;
    sequence->tenant = tenant;
    sequence->tokens = prompt;
    sequence->num_prompt = static_cast<int>(prompt.size());
    scheduler.add(sequence.get());
    sequences_.push_back(std::move(sequence));
    return sequences_.back().get();
  }

  // A prompt into an owned slot, which keeps its seat and its blocks; and one token more from it.
  Sequence *fill_slot(const std::vector<int32_t> &prompt) {
    auto sequence = std::make_unique<Sequence>(kBlockSize);
    sequence->id = sequences_.size() + 1;
    sequence->is_pinned = sequence->is_prefill_only = true;
    sequence->slot = next_slot_++;
    --num_free_slots;
    sequence->tokens = prompt;
    sequence->num_prompt = static_cast<int>(prompt.size());
    scheduler.add(sequence.get());
    sequences_.push_back(std::move(sequence));
    return sequences_.back().get();
  }
  void decode_slot(Sequence *sequence) {
    scheduler.remove(sequence);
    sequence->is_prefill_only = false;
    scheduler.add(sequence);
  }

  // What each row entry computes: "1:0+3" sequence 1, positions 0 to 2; with "!" where it chooses.
  std::string step(int num_prefill_rows = -1) {
    const Schedule &schedule = scheduler.schedule(num_free_slots, num_prefill_rows);
    preempted.clear();
    exhausted.clear();
    for (Sequence *sequence : schedule.admitted) {
      if (sequence->slot >= 0) continue;
      sequence->slot = next_slot_++;
      --num_free_slots;
    }
    for (const Sequence *sequence : schedule.preempted) preempted.push_back(sequence->id);
    for (const Sequence *sequence : schedule.exhausted) exhausted.push_back(sequence->id);
    std::string text;
    for (const ScheduledRows &rows : schedule.rows) {
      Sequence &sequence = *rows.sequence;
      if (!text.empty()) text += " ";
      text += std::to_string(sequence.id) + ":" + std::to_string(sequence.num_computed) + "+" +
              std::to_string(rows.num_tokens) + (rows.wants_token ? "!" : "");
      EXPECT_LE(sequence.num_computed + rows.num_tokens, sequence.blocks.capacity());
      if (rows.wants_token && sequence.is_held) continue;  // it has missed the step
      scheduler.advance(rows);
      if (rows.wants_token) sequence.tokens.push_back(1000 + sequence.num_tokens());
    }
    return text;
  }

  Sequence *sequence(uint64_t id) { return sequences_[id - 1].get(); }

  void finish(Sequence *sequence) {
    if (sequence->state != SequenceState::kDone && sequence->slot >= 0) ++num_free_slots;
    scheduler.remove(sequence);
  }

  static std::vector<int32_t> blocks(const Sequence *sequence) {
    const Span<const int32_t> span = sequence->blocks.ids();
    return {span.begin(), span.end()};
  }

  PrefixCache cache;
  Scheduler scheduler;
  int num_free_slots;
  std::vector<uint64_t> preempted;
  std::vector<uint64_t> exhausted;

 private:
  std::vector<std::unique_ptr<Sequence>> sequences_;
  int next_slot_ = 0;
};

using Ids = std::vector<int32_t>;

TEST(Scheduler, PrefillsThenDecodesAndTakesBlocksAsTokensArrive) {
  World world(8);
  Sequence *a = world.add(ids(10, 7));
  EXPECT_EQ(world.step(), "1:0+7!");
  EXPECT_EQ(World::blocks(a), (Ids{0, 1}));
  EXPECT_EQ(world.step(), "1:7+1!");
  EXPECT_EQ(World::blocks(a), (Ids{0, 1}));
  EXPECT_EQ(world.step(), "1:8+1!");
  EXPECT_EQ(World::blocks(a), (Ids{0, 1, 2}));
  world.finish(a);
  world.finish(a);
  EXPECT_EQ(world.cache.num_in_use(), 0);
  EXPECT_EQ(world.step(), "");
}

TEST(Scheduler, ChunksAPromptBesideDecodingSequences) {
  World world(16, 4, 5);
  world.add(ids(10, 3));
  EXPECT_EQ(world.step(), "1:0+3!");
  world.add(ids(50, 12));
  EXPECT_EQ(world.step(), "1:3+1! 2:0+5");
  EXPECT_EQ(world.step(), "1:4+1! 2:5+5");
  EXPECT_EQ(world.step(), "1:5+1! 2:10+2!");
  EXPECT_EQ(world.step(), "1:6+1! 2:12+1!");
}

TEST(Scheduler, SharesOneChunkAmongPrompts) {
  World world(16, 4, 6);
  world.add(ids(10, 4));
  world.add(ids(50, 4));
  world.add(ids(90, 4));
  EXPECT_EQ(world.step(), "1:0+4! 2:0+2");
  EXPECT_EQ(world.step(), "1:4+1! 2:2+2! 3:0+4!");
}

TEST(Scheduler, SecondRequestReusesTwoBlocks) {
  World world(8);
  Sequence *a = world.add(ids(10, 9));
  EXPECT_EQ(world.step(), "1:0+9!");
  EXPECT_EQ(World::blocks(a), (Ids{0, 1, 2}));
  Sequence *b = world.add(ids(10, 9));
  EXPECT_EQ(world.step(), "1:9+1! 2:8+1!");
  EXPECT_EQ(World::blocks(b), (Ids{0, 1, 3}));
  EXPECT_EQ(b->num_cached, 8);
  world.finish(a);
  world.finish(b);
  EXPECT_EQ(world.cache.num_in_use(), 0);
  EXPECT_EQ(world.cache.num_idle(), 2);
}

TEST(Scheduler, ASlotComputesAllButItsLastTokenAndKeepsItsBlocks) {
  World world(8, 4, 6);
  Sequence *slot = world.fill_slot(ids(10, 8));
  EXPECT_EQ(world.step(), "1:0+6");
  EXPECT_EQ(world.step(), "1:6+1");
  EXPECT_EQ(world.step(), "");
  world.scheduler.remove(slot);
  EXPECT_EQ(World::blocks(slot), (Ids{0, 1}));
  EXPECT_EQ(world.cache.num_cached(), 1);  // the block of the last token stays the slot's own
  world.decode_slot(slot);
  EXPECT_EQ(world.step(), "1:7+1!");
  EXPECT_EQ(world.step(), "1:8+1!");
  EXPECT_EQ(World::blocks(slot), (Ids{0, 1, 2}));
}

TEST(Scheduler, ASlotTakesBlocksFromRequestsAndIsExhaustedWithoutThem) {
  World world(5);
  world.add(ids(10, 8));
  EXPECT_EQ(world.step(), "1:0+8!");
  Sequence *slot = world.fill_slot(ids(50, 17));
  EXPECT_EQ(world.step(), "2:0+16");  // before the request, although it came later
  EXPECT_EQ(world.preempted, (std::vector<uint64_t>{1}));
  world.decode_slot(slot);
  EXPECT_EQ(world.step(), "2:16+1!");
  for (int i = 0; i < 3; ++i) world.step();
  EXPECT_EQ(slot->num_tokens(), 21);
  EXPECT_EQ(world.step(), "");
  EXPECT_EQ(world.exhausted, (std::vector<uint64_t>{2}));
  EXPECT_EQ(slot->blocks.num_blocks(), 5);
  world.cache.release_all(&slot->blocks);
  EXPECT_EQ(world.step(), "1:0+9!");
}

TEST(Scheduler, WhoIsHeldSitsOutUnlessItIsDue) {
  World world(8);
  Sequence *first = world.add(ids(0, 3));
  world.add(ids(20, 3));
  first->is_held = true;
  EXPECT_EQ(world.step(), "1:0+2 2:0+3!");
  EXPECT_EQ(world.step(), "2:3+1!");
  first->is_held = false;
  EXPECT_EQ(world.step(), "1:2+1! 2:4+1!");
  first->is_held = first->is_due = true;
  EXPECT_EQ(world.step(), "1:3+1! 2:5+1!");  // and is not advanced
  EXPECT_EQ(world.step(), "2:6+1!");         // for one step only
  first->is_held = false;
  EXPECT_EQ(world.step(), "1:3+1! 2:7+1!");
}

TEST(Scheduler, WhoIsPreemptedIsNotDueWhenItComesBack) {
  World world(5, 4, 64, 1, false);
  Sequence *senior = world.add(ids(10, 7));
  Sequence *junior = world.add(ids(50, 3));
  for (int i = 0; i < 6; ++i) world.step();
  junior->is_held = junior->is_due = true;
  EXPECT_EQ(world.step(), "1:12+1!");
  EXPECT_EQ(world.preempted, (std::vector<uint64_t>{2}));
  world.finish(senior);
  EXPECT_EQ(world.step(), "2:0+8");
  EXPECT_EQ(world.step(), "");
  junior->is_held = false;
  EXPECT_EQ(world.step(), "2:8+1!");
}

// Its mask may never come: of a request whose constraint is complete it is a cancel that comes.
TEST(Scheduler, WhoIsDueTakesNothingFromOthers) {
  World world(4, 4, 64, 1, false);
  Sequence *senior = world.add(ids(10, 6));
  world.add(ids(50, 3));
  EXPECT_EQ(world.step(), "1:0+6! 2:0+3!");
  EXPECT_EQ(world.step(), "1:6+1! 2:3+1!");
  EXPECT_EQ(world.step(), "1:7+1! 2:4+1!");  // 2 + 2 blocks: all
  senior->is_held = senior->is_due = true;
  EXPECT_EQ(world.step(), "2:5+1!");
  EXPECT_EQ(world.step(), "2:6+1!");
  senior->is_held = false;
  EXPECT_EQ(world.step(), "1:8+1!");
  EXPECT_EQ(world.preempted, (std::vector<uint64_t>{2}));
}

TEST(Scheduler, WhoIsDueIsNotExhausted) {
  World world(2);
  Sequence *sequence = world.add(ids(10, 8));
  EXPECT_EQ(world.step(), "1:0+8!");
  sequence->is_held = sequence->is_due = true;
  EXPECT_EQ(world.step(), "");
  EXPECT_TRUE(world.exhausted.empty());
  EXPECT_EQ(world.step(), "");
  EXPECT_TRUE(world.exhausted.empty());
  sequence->is_held = false;
  EXPECT_EQ(world.step(), "");
  EXPECT_EQ(world.exhausted, (std::vector<uint64_t>{1}));
}

TEST(Scheduler, WhoIsDueTakesNoTurnLater) {
  World world(8, 4, 64, 1, true, 1);
  Sequence *first = world.add(ids(0, 3));
  world.add(ids(20, 3));
  EXPECT_EQ(world.step(), "1:0+3!");
  first->is_held = first->is_due = true;
  EXPECT_EQ(world.step(), "2:0+3!");
  EXPECT_EQ(world.step(), "2:3+1!");  // its mask had a step's time
  first->is_held = false;
  EXPECT_EQ(world.step(), "1:3+1!");
  first->is_held = first->is_due = true;
  world.finish(world.sequence(2));
  EXPECT_EQ(world.step(), "1:4+1!");
}

TEST(Scheduler, TakesTurnsWhereAStepHoldsOneSequence) {
  World world(16, 4, 64, 1, true, /*max_step_sequences=*/1);
  world.add(ids(10, 3));
  EXPECT_EQ(world.step(), "1:0+3!");
  EXPECT_EQ(world.step(), "1:3+1!");
  Sequence *slot = world.fill_slot(ids(50, 6));
  EXPECT_EQ(world.step(), "2:0+5");
  EXPECT_EQ(world.step(), "1:4+1!");
  world.decode_slot(slot);
  EXPECT_EQ(world.step(), "2:5+1!");
  EXPECT_EQ(world.step(), "1:5+1!");
  EXPECT_EQ(world.step(), "2:6+1!");
}

// Prompts of 1, B - 1, B, B + 1 and 3 B tokens, each twice: at least one token is computed again.
TEST(Scheduler, ComputesAtLeastOneTokenOfACachedPrompt) {
  const std::vector<std::pair<int, int>> cases = {{1, 0}, {3, 0}, {4, 0}, {5, 4}, {12, 8}};
  for (const auto &[length, num_cached] : cases) {
    World world(16);
    world.add(ids(10, length));
    world.step();
    Sequence *again = world.add(ids(10, length));
    world.step();
    EXPECT_EQ(again->num_cached, num_cached) << length;
  }
}

TEST(Scheduler, KeepsTheCacheToWholeSegmentsWhereTheDeviceHasThem) {
  World world(16, 4, 64, /*segment_size=*/8);
  world.add(ids(10, 15));
  world.step();
  Sequence *again = world.add(ids(10, 15));
  world.step();
  EXPECT_EQ(again->num_cached, 8);
  Sequence *shorter = world.add(ids(10, 7));  // no complete segment of its own
  world.step();
  EXPECT_EQ(shorter->num_cached, 0);
}

TEST(Scheduler, WaitsForASeatInOrderOfPriorityThenArrival) {
  World world(16, 1);
  Sequence *a = world.add(ids(10, 2));
  EXPECT_EQ(world.step(), "1:0+2!");
  world.add(ids(20, 2));
  world.add(ids(30, 2));
  world.add(ids(40, 2), 5);
  EXPECT_EQ(world.step(), "1:2+1!");
  world.finish(a);
  EXPECT_EQ(world.step(), "4:0+2!");
}

TEST(Scheduler, WaitsForBlocksWithoutTakingAny) {
  World world(4);
  Sequence *a = world.add(ids(10, 9));
  EXPECT_EQ(world.step(), "1:0+9!");  // three of four blocks
  Sequence *b = world.add(ids(50, 5));
  EXPECT_EQ(world.step(), "1:9+1!");
  EXPECT_EQ(b->state, SequenceState::kWaiting);
  EXPECT_EQ(world.cache.num_in_use(), 3);
  world.finish(a);
  EXPECT_EQ(world.step(), "2:0+5!");
}

TEST(Scheduler, PreemptsTheYoungestAndResumesItWithItsTokens) {
  World world(5, 4, 64, 1, false);
  Sequence *a = world.add(ids(10, 7));
  Sequence *b = world.add(ids(50, 3));
  EXPECT_EQ(world.step(), "1:0+7! 2:0+3!");
  EXPECT_EQ(world.step(), "1:7+1! 2:3+1!");  // 2 + 1 blocks
  EXPECT_EQ(world.step(), "1:8+1! 2:4+1!");  // 3 + 2: all
  EXPECT_EQ(world.cache.num_available(), 0);
  for (int i = 0; i < 3; ++i) world.step();
  EXPECT_EQ(world.step(), "1:12+1!");
  EXPECT_EQ(world.preempted, (std::vector<uint64_t>{2}));
  EXPECT_EQ(b->state, SequenceState::kWaiting);
  EXPECT_TRUE(World::blocks(b).empty());
  EXPECT_EQ(b->num_tokens(), 9);
  EXPECT_GE(b->slot, 0);  // the seat stays its own
  EXPECT_EQ(world.step(), "1:13+1!");
  world.finish(a);
  EXPECT_EQ(world.step(), "2:0+9!");  // prompt and generated tokens in one chunk
  EXPECT_EQ(world.step(), "2:9+1!");
  EXPECT_EQ(world.scheduler.num_preemptions(), 1u);
}

TEST(Scheduler, APriorityRequestTakesBlocksFromTheOthers) {
  World world(4, 4, 64, 1, false);
  world.add(ids(10, 4));
  EXPECT_EQ(world.step(), "1:0+4!");
  world.add(ids(50, 4), 9);
  EXPECT_EQ(world.step(), "2:0+4! 1:4+1!");
  EXPECT_EQ(world.step(), "2:4+1! 1:5+1!");  // the last block
  EXPECT_EQ(world.step(), "2:5+1! 1:6+1!");
  EXPECT_EQ(world.step(), "2:6+1! 1:7+1!");
  EXPECT_EQ(world.step(), "2:7+1!");  // 1 sits out and keeps what it has
  EXPECT_TRUE(world.preempted.empty());
  EXPECT_EQ(world.step(), "2:8+1!");
  EXPECT_EQ(world.preempted, (std::vector<uint64_t>{1}));
}

TEST(Scheduler, ComesBackWhenItsBlocksAreFree) {
  World world(3, 4, 64, 1, false);
  Sequence *a = world.add(ids(10, 1));
  Sequence *b = world.add(ids(50, 3));
  EXPECT_EQ(world.step(), "1:0+1! 2:0+3!");
  EXPECT_EQ(world.step(), "1:1+1! 2:3+1!");
  EXPECT_EQ(world.step(), "1:2+1! 2:4+1!");  // the last block
  EXPECT_EQ(world.step(), "1:3+1! 2:5+1!");
  EXPECT_EQ(world.step(), "1:4+1!");  // needs its second: from 2
  EXPECT_EQ(world.preempted, (std::vector<uint64_t>{2}));
  world.finish(a);
  EXPECT_EQ(world.step(), "2:0+7!");
  world.finish(b);
  EXPECT_EQ(world.cache.num_in_use(), 0);
}

TEST(Scheduler, EndsWhatOutgrowsTheWholePool) {
  World world(2);
  world.add(ids(10, 6));
  EXPECT_EQ(world.step(), "1:0+6!");
  EXPECT_EQ(world.step(), "1:6+1!");
  EXPECT_EQ(world.step(), "1:7+1!");
  EXPECT_EQ(world.step(), "");
  EXPECT_EQ(world.exhausted, (std::vector<uint64_t>{1}));
  EXPECT_EQ(world.cache.num_in_use(), 0);
}

TEST(Scheduler, TenantsTakeTurnsInTheQueue) {
  World world(64, /*max_running=*/1);
  const auto add = [&](uint64_t tenant, int32_t priority = 0) {
    return world.add(ids(10, 3), priority, tenant);
  };
  for (int i = 0; i < 4; ++i) add(1);  // 1 to 4 of one tenant, at once
  world.step();                        // 1 runs
  add(2);                              // 5 and 6 of another, later
  add(2);
  add(3, 5);  // 7 of a third, before all of them
  std::vector<uint64_t> order;
  while (world.scheduler.has_work()) {
    order.push_back(world.scheduler.running().front()->id);
    world.finish(world.sequence(order.back()));
    if (world.scheduler.has_work()) world.step();
  }
  // A high priority does not move the others: its tenants have turns of their own.
  EXPECT_EQ(order, (std::vector<uint64_t>{1, 7, 5, 2, 6, 3, 4}));
}

TEST(Scheduler, ATenantAloneIsServedInOrderOfArrival) {
  World world(64, /*max_running=*/1);
  for (int i = 0; i < 5; ++i) world.add(ids(10, 3), 0, 9);
  for (uint64_t id = 1; id <= 5; ++id) {
    world.step();
    ASSERT_EQ(world.scheduler.running().front()->id, id);
    world.finish(world.sequence(id));
    if (id == 2) world.add(ids(10, 3), 0, 9);
  }
}

TEST(Scheduler, HoldsNoMoreRowsOfPrefillThanItIsTold) {
  World world(64);
  world.add(ids(10, 30));
  EXPECT_EQ(world.step(7), "1:0+7");
  EXPECT_EQ(world.step(100), "1:7+23!");
}

// Whatever comes and goes: no block leaks or has two owners, everything ends, and a sequence's
// blocks are at most those that its tokens need.
TEST(Scheduler, KeepsItsBooksUnderRandomWork) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    World world(12, 5, 7, 1, seed % 2 == 0);
    std::vector<Sequence *> live;
    std::map<uint64_t, int> wanted;  // tokens to generate
    int num_added = 0;
    int num_steps = 0;
    while (num_added < 60 || !live.empty()) {
      ASSERT_LT(++num_steps, 5000) << "no progress, seed " << seed;
      if (num_added < 60 && below(3) == 0) {
        // Few distinct prompts, so that blocks are shared.
        live.push_back(world.add(ids(10 * below(3), 1 + below(25)), below(2)));
        wanted[live.back()->id] = 1 + below(15);
        ++num_added;
      }
      world.step();
      std::map<int32_t, int> owners;
      for (size_t i = 0; i < live.size();) {
        Sequence *sequence = live[i];
        EXPECT_LE(sequence->blocks.num_blocks(),
                  (sequence->num_tokens() + kBlockSize - 1) / kBlockSize);
        for (int index = 0; index < sequence->blocks.num_blocks(); ++index) {
          const int32_t block = sequence->blocks.ids()[static_cast<size_t>(index)];
          ++owners[block];
          // Whoever writes at num_computed is the block's only user.
          if (index * kBlockSize >= sequence->num_computed) {
            EXPECT_EQ(world.cache.num_users(block), 1);
          }
        }
        const bool is_done = sequence->num_generated() >= wanted[sequence->id] ||
                             sequence->state == SequenceState::kDone || below(60) == 0;
        if (!is_done) {
          ++i;
          continue;
        }
        world.finish(sequence);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
        owners.clear();
        break;
      }
      for (const auto &[block, count] : owners) {
        EXPECT_EQ(world.cache.num_users(block), count);
      }
    }
    EXPECT_EQ(world.cache.num_in_use(), 0);
    EXPECT_FALSE(world.scheduler.has_work());
  }
}

}  // namespace
}  // namespace xllm
