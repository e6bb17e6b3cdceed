#include "base/thread_pool.h"

#include <sched.h>

#include <system_error>

#include "base/error.h"

namespace xllm {
namespace {

// About 20 us of spinning on current machines: longer than the gap between two stages of a step,
// far shorter than a scheduler's time slice.
constexpr int kSpins = 1000;
// Then give the time slice to whoever wants it, so that a machine with more threads than free cores
// goes on working.
constexpr int kYields = 50;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits without sleeping; false when patience ran out.
template <typename Done>
bool spin_until(const Done &done) {
  for (int i = 0; i < kSpins; ++i) {
    if (done()) return true;
    pause_cpu();
  }
  for (int i = 0; i < kYields; ++i) {
    if (done()) return true;
    sched_yield();
  }
  return done();
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
  try {
    threads_.reserve(static_cast<size_t>(num_threads_ - 1));
    for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this, i] { worker(i); });
  } catch (const std::system_error &error) {
    stop();
    throw Error(Status::kIo, "cannot start " + std::to_string(num_threads_) +
                                 " threads: " + error.what() + "; ask for fewer threads");
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_.store(true);
  }
  wake_.notify_all();
  for (std::thread &thread : threads_) thread.join();
  threads_.clear();
}

void ThreadPool::run(Call call, const void *context, int64_t num_chunks) {
  const auto round = static_cast<uint32_t>(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  // Chunk 2^32 - 1 of the new round closes the counter while the work is written; a late worker
  // then takes nothing.
  ticket_.store(uint64_t{round} << 32 | 0xffffffffu);
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  num_chunks_.store(num_chunks, std::memory_order_relaxed);
  num_done_.store(0, std::memory_order_relaxed);
  // Sequentially consistent with num_asleep_: a worker that is about to sleep has either been
  // counted, or sees the new round.
  ticket_.store(uint64_t{round} << 32);
  if (num_asleep_.load() > 0) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
  }
  take_chunks(round, 0);
  while (!spin_until([&] { return num_done_.load(std::memory_order_acquire) == num_chunks; })) {
  }
}

void ThreadPool::take_chunks(uint32_t round, int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    const Call call = call_.load(std::memory_order_relaxed);
    const void *context = context_.load(std::memory_order_relaxed);
    const auto chunk = static_cast<int64_t>(ticket & 0xffffffffu);
    if (static_cast<uint32_t>(ticket >> 32) != round ||
        chunk >= num_chunks_.load(std::memory_order_relaxed))
      return;
    // Success means that the round has not changed since, so what was read above belongs to it.
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire))
      continue;
    call(context, chunk, thread);
    num_done_.fetch_add(1, std::memory_order_release);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::wait_for_work(uint32_t seen) {
  const auto is_new = [&] {
    return static_cast<uint32_t>(ticket_.load() >> 32) != seen || is_stopping_.load();
  };
  if (spin_until(is_new)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  num_asleep_.fetch_add(1);
  wake_.wait(lock, is_new);
  num_asleep_.fetch_sub(1);
}

void ThreadPool::worker(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_for_work(seen);
    if (is_stopping_.load()) return;
    seen = static_cast<uint32_t>(ticket_.load() >> 32);
    // The counter may still be closed for an instant; spinning on it is cheaper than missing the
    // round.
    spin_until([&] {
      return ticket_.load(std::memory_order_acquire) != (uint64_t{seen} << 32 | 0xffffffffu);
    });
    take_chunks(seen, thread);
  }
}

}  // namespace xllm
