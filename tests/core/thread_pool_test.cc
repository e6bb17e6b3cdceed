#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace xllm {
namespace {

class ThreadPoolTest : public ::testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, EveryChunkRunsExactlyOnce) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.num_threads(), GetParam());
  for (const int num_chunks : {0, 1, 2, 3, 17, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(num_chunks));
    pool.parallel_for(num_chunks, [&](int64_t chunk, int thread) {
      EXPECT_GE(thread, 0);
      EXPECT_LT(thread, pool.num_threads());
      runs[static_cast<size_t>(chunk)].fetch_add(1);
    });
    for (const std::atomic<int> &count : runs) EXPECT_EQ(count.load(), 1);
  }
}

// What one piece of work wrote is seen by the next, on whichever threads they ran.
TEST_P(ThreadPoolTest, ManyRoundsInARowSeeEachOther) {
  ThreadPool pool(GetParam());
  constexpr int kChunks = 8;
  std::vector<int> values(kChunks, 0);
  for (int round = 0; round < 20000; ++round) {
    pool.parallel_for(kChunks, [&](int64_t chunk, int) {
      const auto i = static_cast<size_t>(chunk);
      EXPECT_EQ(values[i], round);
      ++values[i];
    });
  }
  for (const int value : values) EXPECT_EQ(value, 20000);
}

// Threads that have gone to sleep between two pieces wake up again. The pause is what is tested;
// nothing depends on its length.
TEST_P(ThreadPoolTest, WorksAfterAPause) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> sum{0};
    pool.parallel_for(100, [&](int64_t chunk, int) { sum.fetch_add(static_cast<int>(chunk)); });
    EXPECT_EQ(sum.load(), 4950);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_P(ThreadPoolTest, MakingAndDestroyingIdlePoolsEnds) {
  for (int i = 0; i < 50; ++i) ThreadPool pool(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, ::testing::Values(1, 2, 3, 8));

// A chunk that takes long on one thread does not keep the others from the rest.
TEST(ThreadPoolTest, TheOthersTakeWhatASlowThreadLeaves) {
  ThreadPool pool(3);
  std::atomic<int> done{0};
  pool.parallel_for(50, [&](int64_t chunk, int) {
    if (chunk == 0) {
      // Ends only when somebody else has done all the other chunks.
      while (done.load() < 49) std::this_thread::yield();
    }
    done.fetch_add(1);
  });
  EXPECT_EQ(done.load(), 50);
}

TEST(ThreadPoolTest, FewerThanOneThreadIsOne) {
  ThreadPool pool(0);
  EXPECT_EQ(pool.num_threads(), 1);
}

}  // namespace
}  // namespace xllm
