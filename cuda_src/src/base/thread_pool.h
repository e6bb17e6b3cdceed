// A fixed set of threads that run the same piece of work together, many thousand times a second.
//
// The caller is thread 0 and works too. Between pieces the others spin for some microseconds, then
// give up their time slice, then sleep, so that back-to-back pieces start in about a microsecond
// and an idle pool costs nothing. Chunks are taken from one atomic counter: which thread computes a
// chunk varies, so a chunk's result must not depend on it. The caller waits for chunks, not for
// threads: a thread that the system has not scheduled holds nobody up.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace xllm {

class ThreadPool {
 public:
  // num_threads >= 1, the caller's included. Throws Error(kIo) when the system refuses a thread.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  int num_threads() const { return num_threads_; }

  // body(chunk, thread) for every chunk in [0, num_chunks), num_chunks < 2^32, thread in [0,
  // num_threads); returns when all are done. Allocates nothing. One caller at a time; body must not
  // throw and must not call parallel_for.
  template <typename Body>
  void parallel_for(int64_t num_chunks, const Body &body) {
    if (num_chunks <= 1 || num_threads_ == 1) {
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(chunk, 0);
      return;
    }
    run([](const void *context, int64_t chunk,
           int thread) { (*static_cast<const Body *>(context))(chunk, thread); },
        &body, num_chunks);
  }

 private:
  using Call = void (*)(const void *context, int64_t chunk, int thread);

  void run(Call call, const void *context, int64_t num_chunks);
  void take_chunks(uint32_t round, int thread);
  void worker(int thread);
  void wait_for_work(uint32_t seen);
  void stop();

  const int num_threads_;
  std::vector<std::thread> threads_;
  // The work of this round. Atomic because a late worker may read it while the next round is
  // written; it then fails to take a chunk.
  std::atomic<Call> call_{nullptr};
  std::atomic<const void *> context_{nullptr};
  std::atomic<int64_t> num_chunks_{0};
  // On cache lines of their own: all threads write or watch them.
  alignas(64) std::atomic<uint64_t> ticket_{
      0};  // round in the upper, next chunk in the lower 32 bits
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  std::atomic<bool> is_stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace xllm
