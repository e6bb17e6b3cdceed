// Fuzzes the GGUF reader: any bytes are opened or refused with one line, and what opens can be read
// to its last byte.
//
// With libFuzzer (clang++ -fsanitize=fuzzer,address,undefined -DXLLM_LIBFUZZER) it is a target as
// any other. Without, `gguf_fuzz [--mutate N] PATH...` runs every file of a corpus (folders are
// walked), each also N times with damage drawn from a fixed seed.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "gguf/gguf.h"
#include "gguf_exercise.h"
#include "memory_file.h"

namespace xllm {
namespace {

// Whether the bytes opened. Aborts on an error that a file cannot be to blame for.
bool run(const uint8_t *data, size_t size) {
  const MemoryFile file(data, size);
  try {
    // Compared so that no read is left out; no sum of bytes comes near this.
    return read_everything(GgufFile::open(file.path())) != UINT64_MAX;
  } catch (const Error &error) {
    const Status status = error.status();
    const bool is_refusal = status == Status::kModelMalformed ||
                            status == Status::kModelTruncated ||
                            status == Status::kModelUnsupported;
    if (!is_refusal || error.message().find('\n') != std::string::npos) std::abort();
    return false;
  }
}

}  // namespace
}  // namespace xllm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  xllm::run(data, size);
  return 0;
}

#ifndef XLLM_LIBFUZZER

namespace xllm {
namespace {

// `bytes` with up to 8 bytes changed, most of them near the start, where the numbers are.
std::vector<uint8_t> damaged(std::vector<uint8_t> bytes, uint64_t seed) {
  if (bytes.empty()) return bytes;
  const uint32_t num_changes = 1 + philox(seed, 0).value[0] % 8;
  for (uint32_t i = 0; i < num_changes; ++i) {
    const Philox random = philox(seed, i + 1);
    const size_t range = random.value[0] % 4 == 0 ? bytes.size() : (bytes.size() + 3) / 4;
    uint8_t &byte = bytes[random.value[1] % range];
    byte = random.value[2] % 2 == 0 ? static_cast<uint8_t>(random.value[3])
                                    : static_cast<uint8_t>(byte ^ (1u << random.value[3] % 8));
  }
  return bytes;
}

struct Tally {
  uint64_t num_opened = 0;
  uint64_t num_refused = 0;
};

void run_file(const std::filesystem::path &path, uint64_t num_mutations, Tally *tally) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) {
    std::fprintf(stderr, "%s: cannot be read\n", path.c_str());
    std::exit(2);
  }
  const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(stream), {}};
  for (uint64_t seed = 0; seed <= num_mutations; ++seed) {
    const std::vector<uint8_t> input = seed == 0 ? bytes : damaged(bytes, seed);
    ++(run(input.data(), input.size()) ? tally->num_opened : tally->num_refused);
  }
}

}  // namespace
}  // namespace xllm

int main(int argc, char **argv) {
  uint64_t num_mutations = 0;
  xllm::Tally tally;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--mutate" && i + 1 < argc) {
      num_mutations = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::filesystem::is_directory(argument)) {
      for (const auto &entry : std::filesystem::recursive_directory_iterator(argument)) {
        if (entry.is_regular_file()) xllm::run_file(entry.path(), num_mutations, &tally);
      }
    } else {
      xllm::run_file(argument, num_mutations, &tally);
    }
  }
  std::printf("opened %llu, refused %llu\n", static_cast<unsigned long long>(tally.num_opened),
              static_cast<unsigned long long>(tally.num_refused));
  return 0;
}

#endif  // XLLM_LIBFUZZER
