// Rates of the CPU backend's products, one thread: every tensor type by every instruction set at
// M = 1, 4, 8 and 512 rows of activations.
//
//   cpu_kernels_bench [--type q6_k] [--set avx2] [--cols 1536] [--planes 2] [--kib 98304]
//
// Prints, per cell: GB/s of weights read, G multiply-adds per second, and at small M the share of
// the machine's read bandwidth, which is measured first. At M <= 8 the weights are several times a
// third-level cache, as in a model's step; at M = 512 they are a piece that stays in the caches.
// Rates are per second of the thread's CPU time, the best of several runs: on a shared machine it
// is the figure that company disturbs least.
#include <sys/time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "backend/cpu/activations.h"
#include "backend/cpu/choose_kernels.h"
#include "backend/cpu/host_memory.h"
#include "backend/cpu/interleave.h"
#include "base/error.h"
#include "tensor/dtype.h"

namespace xllm::cpu {
namespace {

constexpr uint64_t kSmallBytes = uint64_t{1} << 18;  // of weights at M = 512
constexpr int kRuns = 15;

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <typename Run>
double best_seconds(const Run &run) {
  double best = 1e30;
  for (int i = 0; i < kRuns; ++i) {
    const double start = cpu_seconds();
    run();
    best = std::min(best, cpu_seconds() - start);
  }
  return best;
}

// Bytes per second of one thread that reads memory in order.
double read_bandwidth() {
  std::vector<uint64_t> memory(uint64_t{32} << 20, 1);
  uint64_t total = 0;
  const double seconds = best_seconds([&] {
    uint64_t sum[8] = {};
    for (size_t i = 0; i < memory.size(); i += 8) {
      for (size_t j = 0; j < 8; ++j) sum[j] += memory[i + j];
    }
    for (const uint64_t s : sum) total += s;
  });
  volatile uint64_t sink = total;
  (void)sink;
  return static_cast<double>(memory.size() * 8) / seconds;
}

// Bytes that no scale of is infinite or NaN in: every byte below 0x70.
void fill(uint8_t *bytes, uint64_t size) {
  uint64_t state = 88172645463325252u;
  for (uint64_t i = 0; i < size; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    bytes[i] = static_cast<uint8_t>(state % 0x70);
  }
}

struct Bench {
  const Kernels *kernels;
  DType dtype;
  int cols;
  int planes;
  uint64_t large_bytes;  // of weights at small M
  double bandwidth;

  void run(int num_tokens) const {
    const uint64_t row_bytes = dtype_bytes(dtype, static_cast<uint64_t>(cols));
    const uint64_t wanted = num_tokens <= 8 ? large_bytes : kSmallBytes;
    const int rows = static_cast<int>(wanted / row_bytes) / kInterleavedRows * kInterleavedRows;
    const TileFn tile = kernels->tiles[static_cast<int>(dtype)];
    HostAllocator allocator(0);
    Buffer weights(&allocator, tile != nullptr ? interleaved_bytes(rows, row_bytes)
                                               : row_bytes * static_cast<uint64_t>(rows));
    fill(weights.data<uint8_t>(), weights.size_bytes());

    Activations act;
    act.reserve(&allocator, WeightForm::kRaw, num_tokens, cols);
    std::vector<ActRow> acts;
    const Precision precision = planes == 2 ? Precision::kFine : Precision::kInt8;
    for (int t = 0; t < num_tokens; ++t) {
      for (int i = 0; i < cols; ++i)
        act.f(t)[i] = static_cast<float>((i * 37 + t * 11) % 101 - 50) / 50.0f;
      act.quantize(*kernels, precision, t);
      for (int p = 0; p < planes; ++p) acts.push_back(act.row(t, p));
    }
    std::vector<float> out(static_cast<size_t>(num_tokens) * 64);
    // Short runs are repeated, so that the clock's steps do not matter.
    const int repeats = static_cast<int>(std::max<uint64_t>(1, (uint64_t{16} << 20) / wanted));
    const double seconds =
        best_seconds([&] {
          for (int i = 0; i < repeats; ++i)
            // As a chunk of the backend: 64 rows at a time.
            for (int r = 0; r + 64 <= rows; r += 64) {
              const uint8_t *from = weights.data<uint8_t>() + static_cast<uint64_t>(r) * row_bytes;
              if (tile != nullptr) {
                tile(from, row_bytes, 64, act.packed(0, precision), num_tokens, planes, cols,
                     out.data(), 64);
                continue;
              }
              for (int t = 0; t < num_tokens; t += kTokenTile) {
                kernels->dots[static_cast<int>(dtype)](from, row_bytes, 64, acts.data() + t,
                                                       std::min(kTokenTile, num_tokens - t), cols,
                                                       out.data() + int64_t{t} * 64, 64);
              }
            }
        }) /
        repeats;
    const double done = rows / 64 * 64;
    const double gb = done * static_cast<double>(row_bytes) / seconds / 1e9;
    const double macs = done * cols * num_tokens * planes / seconds / 1e9;
    std::printf("%-7s %-8s M %3d  %7.2f GB/s  %7.1f GMAC/s", dtype_info(dtype).name, kernels->name,
                num_tokens, gb, macs);
    if (num_tokens <= 8) std::printf("  %4.0f %% of read bandwidth", 1e11 * gb / bandwidth);
    std::printf("\n");
    std::fflush(stdout);
  }
};

int run_all(int argc, char **argv) {
  std::string only_type, only_set;
  int cols = 1536, planes = 1, kib = 96 << 10;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--type") only_type = argv[i + 1];
    if (flag == "--set") only_set = argv[i + 1];
    if (flag == "--cols") cols = std::stoi(argv[i + 1]);
    if (flag == "--kib") kib = std::stoi(argv[i + 1]);
    if (flag == "--planes") planes = std::stoi(argv[i + 1]);
  }
  if (cols < 256 || cols % 256 != 0 || planes < 1 || planes > 2 || kib < 256) {
    std::fprintf(stderr, "--cols: a multiple of 256; --planes: 1 or 2; --kib: 256 or more\n");
    return 2;
  }
  const double bandwidth = read_bandwidth();
  std::printf("read bandwidth of one thread: %.1f GB/s\n", bandwidth / 1e9);
  for (const char *set : {"scalar", "avx2", "avx512", "neon"}) {
    if (only_set.empty() ? std::strcmp(set, "scalar") == 0 : only_set != set) continue;
    const Kernels *kernels = nullptr;
    try {
      kernels = &choose_kernels(set);
    } catch (const Error &) {
      continue;  // not on this machine
    }
    for (const DType dtype : {DType::kF16, DType::kQ4_0, DType::kQ4_1, DType::kQ5_0, DType::kQ5_1,
                              DType::kQ8_0, DType::kQ2_K, DType::kQ3_K, DType::kQ4_K, DType::kQ5_K,
                              DType::kQ6_K, DType::kIQ4_NL, DType::kIQ4_XS}) {
      if (!only_type.empty() && only_type != dtype_info(dtype).name) continue;
      for (const int num_tokens : {1, 4, 8, 512})
        Bench{kernels, dtype, cols, planes, static_cast<uint64_t>(kib) << 10, bandwidth}.run(
            num_tokens);
    }
  }
  return 0;
}

}  // namespace
}  // namespace xllm::cpu

int main(int argc, char **argv) { return xllm::cpu::run_all(argc, argv); }
