// The bound on the gap between tokens, against devices whose steps take what a formula says; and
// how long a newcomer would wait.

#include "engine/pace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

namespace xllm {
namespace {

// Seconds of a step: rows of decode, rows of prefill, depth of the prompt so far.
using Device = std::function<double(int, int, int)>;

struct Outcome {
  double worst_gap_s = 0;
  double seconds = 0;
  int num_steps = 0;
};

// A prompt comes beside four streams that decode.
Outcome run(const Device &device, double max_gap_s, int num_prompt, bool has_history = true) {
  Pace pace(max_gap_s, 512);
  if (has_history) {
    for (int i = 0; i < 20; ++i) pace.record(true, 0, device(4, 0, 0));
  }
  Outcome out;
  for (int done = 0; done < num_prompt; ++out.num_steps) {
    const int rows = std::min(pace.prefill_rows(0), num_prompt - done);
    EXPECT_GE(rows, 1);
    EXPECT_LE(rows, 512);
    const double step_s = device(4, rows, done);
    pace.record(true, rows, step_s);
    out.worst_gap_s = std::max(out.worst_gap_s, step_s);
    out.seconds += step_s;
    done += rows;
  }
  return out;
}

Device device_of(double decode_s, double row_s, double deep_s = 0) {
  return [=](int num_decode, int rows, int depth) {
    return (num_decode > 0 ? decode_s : 0) + rows * (row_s + deep_s * (depth + rows / 2.0));
  };
}

TEST(Pace, APromptOf6000TokensKeepsTheGapUnderTheBound) {
  for (const double bound : {0.05, 0.2, 1.0}) {
    // From a device that could compute it in one step to one that is busy with decode alone; and
    // rows that become several times dearer on the way.
    for (const double row_s : {1e-6, 1e-4, 1e-3}) {
      for (const double deep_s : {0.0, row_s / 2000}) {
        const Outcome fast = run(device_of(0.1 * bound, row_s, deep_s), bound, 6000);
        EXPECT_LE(fast.worst_gap_s, bound) << bound << " " << row_s << " " << deep_s;
        const Outcome unmeasured = run(device_of(0.1 * bound, row_s, deep_s), bound, 6000, false);
        EXPECT_LE(unmeasured.worst_gap_s, 2 * bound) << bound << " " << row_s << " " << deep_s;
      }
    }
  }
}

TEST(Pace, UsesMostOfTheBoundForPrefill) {
  const Outcome paced = run(device_of(0.02, 1e-3), 0.2, 6000);
  // 130 rows fit beside decode: 46 steps, and a few more to get there.
  EXPECT_LE(paced.num_steps, 55);
}

TEST(Pace, WhereDecodeAloneFillsTheBoundPrefillGetsAQuarterOfIt) {
  const Outcome paced = run(device_of(0.3, 1e-3), 0.2, 1000);
  EXPECT_LE(paced.worst_gap_s, 0.3 + 0.05 + 1e-9);
  EXPECT_LE(paced.num_steps, 1000 / 50 + 5);
}

TEST(Pace, NoisyStepsStayWithinTwiceTheBound) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> noise(0.7, 1.5);
  const Device steady = device_of(0.03, 8e-4, 4e-7);
  const Device noisy = [&](int decode, int rows, int depth) {
    return steady(decode, rows, depth) * noise(random);
  };
  EXPECT_LE(run(noisy, 0.2, 6000).worst_gap_s, 0.4);
}

TEST(Pace, AloneOrWithoutABoundAPromptTakesWholeChunks) {
  Pace pace(0.2, 512);
  EXPECT_EQ(pace.prefill_rows(-1), 512);
  pace.record(true, 64, 10);
  EXPECT_EQ(pace.prefill_rows(-1), 512);
  EXPECT_LT(pace.prefill_rows(0), 64);
  EXPECT_EQ(Pace(0, 512).prefill_rows(0), 512);
  EXPECT_EQ(Pace(0.2, 4).prefill_rows(0), 4);
}

TEST(Pace, LeavesRoomForTheTurnsOfOthers) {
  Pace pace(0.2, 512);
  pace.record(true, 0, 0.01);
  for (int i = 0; i < 20; ++i) pace.record(true, pace.prefill_rows(0), 0.1);
  EXPECT_LT(pace.prefill_rows(0.05), pace.prefill_rows(0));
}

TEST(EstimateWait, CountsWhatLiesBefore) {
  Backlog backlog;
  EXPECT_EQ(estimate_wait_s(backlog, 1000), 0);  // nothing is known: nobody is turned away
  backlog.prefill_rate = 1000;
  backlog.num_free_slots = 2;
  EXPECT_DOUBLE_EQ(estimate_wait_s(backlog, 500), 0.5);
  backlog.num_rows = 3000;
  EXPECT_DOUBLE_EQ(estimate_wait_s(backlog, 500), 3.5);
  backlog.num_waiting = 5;
  EXPECT_DOUBLE_EQ(estimate_wait_s(backlog, 500), 3.5);  // how fast seats become free is unknown
  backlog.seat_interval_s = 2;
  EXPECT_DOUBLE_EQ(estimate_wait_s(backlog, 500), 4 * 2 + 0.5);
  backlog.age_s = 9;
  EXPECT_DOUBLE_EQ(estimate_wait_s(backlog, 500), 4 * 2 + 0.5);
  backlog.seat_age_s = 11;  // seats that became free seldom, then, say nothing of now
  EXPECT_DOUBLE_EQ(estimate_wait_s(backlog, 500), 3.5);
  backlog.seat_age_s = 9;
  EXPECT_DOUBLE_EQ(estimate_wait_s(backlog, 500), 4 * 2 + 0.5);
  backlog.age_s = 11;  // else one bad figure would turn everybody away for good
  EXPECT_EQ(estimate_wait_s(backlog, 500), 0);
}

TEST(Pace, StepsOfFewRowsTellNothingOfLongPrompts) {
  Pace pace(0.2, 512);
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(pace.record(false, 4, 0.01));
  EXPECT_EQ(pace.prefill_rate(), 0);
  EXPECT_TRUE(pace.record(false, 512, 0.1));
  EXPECT_FALSE(pace.record(false, 4, 0.01));
  EXPECT_DOUBLE_EQ(pace.prefill_rate(), 5120);
  EXPECT_TRUE(Pace(0.2, 8).record(false, 8, 0.01));  // whole chunks, and there are no larger ones
}

}  // namespace
}  // namespace xllm
