#include "cta.h"

#include <ucontext.h>

#include <stdexcept>
#include <vector>

Index3 threadIdx, blockIdx, gridDim;

namespace xllm::on_host {
namespace {

constexpr size_t kStackBytes = 64 << 10;

struct Barrier {
  int arrived = 0, generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  bool is_done = true;
};

ucontext_t scheduler;
std::vector<Fiber> fibers;
size_t current;
std::vector<Barrier> warps;
Barrier cta;
Barrier others[16];  // sync_some's
uint64_t lanes[32][32];
const std::function<void()> *thread_body;

void wait(Barrier *barrier, int expected) {
  const int generation = barrier->generation;
  if (++barrier->arrived == expected) {
    barrier->arrived = 0;
    ++barrier->generation;
    return;
  }
  while (barrier->generation == generation) {
    const size_t me = current;
    swapcontext(&fibers[me].context, &scheduler);
  }
}

void enter() {
  const size_t me = current;
  (*thread_body)();
  fibers[me].is_done = true;
  swapcontext(&fibers[me].context, &scheduler);
}

void run_cta(size_t threads) {
  fibers.resize(threads);
  warps.assign(threads / 32, Barrier());
  cta = Barrier();
  for (Barrier &barrier : others) barrier = Barrier();
  for (Fiber &fiber : fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    fiber.is_done = false;
  }
  bool is_any_left = true;
  for (int rounds = 0; is_any_left; ++rounds) {
    if (rounds > 1000000) throw std::runtime_error("threads wait for one another for ever");
    is_any_left = false;
    // Another one first each time, so that an order that nobody asked for shows.
    for (size_t i = 0; i < threads; ++i) {
      const size_t k = (i + static_cast<size_t>(rounds) * 37) % threads;
      if (fibers[k].is_done) continue;
      is_any_left = true;
      current = k;
      threadIdx = {static_cast<unsigned>(k), 0, 0};
      swapcontext(&scheduler, &fibers[k].context);
    }
  }
}

}  // namespace

void run_grid(Index3 grid, int threads, const std::function<void()> &before_cta,
              const std::function<void()> &body) {
  gridDim = grid;
  thread_body = &body;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        before_cta();
        run_cta(static_cast<size_t>(threads));
      }
    }
  }
}

}  // namespace xllm::on_host

using namespace xllm::on_host;

void __syncthreads() { wait(&cta, static_cast<int>(fibers.size())); }
void sync_some_on_host(int index, int threads) { wait(&others[index], threads); }
void __syncwarp() { wait(&warps[threadIdx.x / 32], 32); }

uint64_t exchange_in_warp(uint64_t mine, int source) {
  const unsigned warp = threadIdx.x / 32;
  lanes[warp][threadIdx.x % 32] = mine;
  __syncwarp();
  const uint64_t other = lanes[warp][source & 31];
  __syncwarp();
  return other;
}
