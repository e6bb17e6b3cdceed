// Fuzzes models: a file is refused with one line, or it computes, and then gives the same logits
// however the prompt is cut, on every instruction set this machine has.
//
// With libFuzzer (clang++ -fsanitize=fuzzer,address,undefined -DXLLM_LIBFUZZER) it is a target as
// any other. Without, `model_fuzz NUMBER FOLDER [SEED]` takes each *.gguf of a folder NUMBER times
// with other numbers in it (metadata, tensor table, weights), drawn from SEED on.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/half.h"
#include "base/rng.h"
#include "engine/model_file.h"
#include "forward_runner.h"
#include "memory_file.h"

namespace xllm {
namespace {

using Bytes = std::vector<uint8_t>;

[[noreturn]] void fail(const std::string &what) {
  std::fprintf(stderr, "model_fuzz: %s\n", what.c_str());
  std::abort();
}

// What a file or the options may be to blame for, said in one line.
void require_refusal(const Error &error) {
  switch (error.status()) {
    case Status::kModelMalformed:
    case Status::kModelTruncated:
    case Status::kModelUnsupported:
    case Status::kInvalidArgument:
    case Status::kMemory:
      break;
    default:
      fail("refused with another status: " + error.message());
  }
  if (error.message().find('\n') != std::string::npos) fail("two lines: " + error.message());
}

// Rows that hold something infinite or no number are refused by whoever reads them, and need not
// agree.
bool agree(const std::vector<float> &a, const std::vector<float> &b, size_t width) {
  if (a.size() != b.size()) return false;
  const auto is_finite = [&](const std::vector<float> &logits, size_t row) {
    for (size_t i = row; i < row + width; ++i) {
      if (!std::isfinite(logits[i])) return false;
    }
    return true;
  };
  for (size_t row = 0; row < a.size(); row += width) {
    if (is_finite(a, row) != is_finite(b, row)) return false;
    if (is_finite(a, row) && std::memcmp(&a[row], &b[row], width * sizeof(float)) != 0)
      return false;
  }
  return true;
}

// False when this KV type does not suit the model.
bool compute(const Model &model, WeightForm form, KvType kv_type) {
  const ModelDims &dims = model.dims();
  std::vector<int32_t> ids(21);
  for (int i = 0; i < 21; ++i) ids[static_cast<size_t>(i)] = (7 * i + i * i / 3) % dims.vocab_size;
  std::vector<float> first;
  for (const char *instruction_set : {"", "scalar", "avx2"}) {
    BackendOptions options;
    options.num_threads = 1;
    options.instruction_set = instruction_set;
    std::unique_ptr<ForwardRunner> runner;
    try {
      runner = std::make_unique<ForwardRunner>(model, dims, form, options, kv_type);
    } catch (const Error &error) {
      require_refusal(error);
      if (first.empty()) return false;
      continue;  // this machine has no such instructions
    }
    for (const int chunk : {21, 8, 1}) {
      const std::vector<float> logits = runner->logits(ids, chunk);
      if (first.empty()) first = logits;
      if (!agree(first, logits, static_cast<size_t>(dims.vocab_size))) {
        fail(std::string("other logits on \"") + instruction_set + "\" in chunks of " +
             std::to_string(chunk));
      }
    }
  }
  return true;
}

enum class Outcome { kRefused, kOpened, kComputed };

Outcome run(const Bytes &bytes) {
  const MemoryFile memory(bytes.data(), bytes.size());
  std::shared_ptr<const ModelFile> file;
  try {
    file = ModelFile::open(memory.path());
  } catch (const Error &error) {
    require_refusal(error);
    return Outcome::kRefused;
  }
  if (file->model() == nullptr) return Outcome::kOpened;
  bool has_computed = compute(*file->model(), WeightForm::kDequantized, KvType::kF32);
  for (const KvType type : {KvType::kF16, KvType::kInt8, KvType::kInt4}) {
    has_computed |= compute(*file->model(), WeightForm::kRaw, type);
  }
  return has_computed ? Outcome::kComputed : Outcome::kOpened;
}

}  // namespace
}  // namespace xllm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  xllm::run(xllm::Bytes(data, data + size));
  return 0;
}

#ifndef XLLM_LIBFUZZER

namespace xllm {
namespace {

// Where a number lies in the file, and how wide it is.
struct Place {
  uint64_t offset;
  uint32_t size_bytes;
};

// The numbers of a sound file, without changing which the rest of it still reads as it did.
struct Places {
  std::vector<Place> metadata;
  std::vector<Place> table;    // dimensions, types and offsets of tensors
  std::vector<Place> weights;  // any two or four bytes
};

uint32_t width_of(GgufType type) {
  switch (type) {
    case GgufType::kUint8:
    case GgufType::kInt8:
    case GgufType::kBool:
      return 1;
    case GgufType::kUint16:
    case GgufType::kInt16:
      return 2;
    case GgufType::kUint64:
    case GgufType::kInt64:
    case GgufType::kFloat64:
      return 8;
    case GgufType::kUint32:
    case GgufType::kInt32:
    case GgufType::kFloat32:
      return 4;
    case GgufType::kString:
    case GgufType::kArray:
      return 0;
  }
  return 0;
}

Places find_places(const Bytes &bytes) {
  const MemoryFile memory(bytes.data(), bytes.size());
  const GgufFile file = GgufFile::open(memory.path());
  Places places;
  for (const GgufValue &value : file.values()) {
    const uint32_t width = width_of(value.type());
    if (width > 0) places.metadata.push_back({value.byte_offset(), width});
    // The type of the value stands before it.
    places.metadata.push_back({value.byte_offset() - 4, 4});
  }
  const uint8_t *start = file.shard(0).data();
  for (const GgufTensor &tensor : file.tensors()) {
    const auto *name = reinterpret_cast<const uint8_t *>(tensor.name.data());
    uint64_t at = static_cast<uint64_t>(name - start) + tensor.name.size();
    places.table.push_back({at, 4});
    at += 4;
    for (uint32_t i = 0; i < tensor.num_dims; ++i, at += 8) places.table.push_back({at, 8});
    places.table.push_back({at, 4});
    places.table.push_back({at + 4, 8});
    for (uint64_t i = 0; i + 4 <= tensor.size_bytes; i += 2) {
      places.weights.push_back({tensor.byte_offset + i, i % 4 == 0 ? 4u : 2u});
    }
  }
  return places;
}

// Numbers at which code breaks: ends of ranges, powers of two, what is no number.
uint64_t odd_number(uint32_t size_bytes, uint32_t random) {
  static constexpr float kFloats[] = {0.0f, -0.0f, 1.0f, -1.0f, 1e-38f, 1e-7f, 0.5f, 3.4e38f};
  static constexpr uint16_t kHalves[] = {0x7c00, 0xfc00, 0x7e00, 0x0001, 0x7bff, 0x8000};
  const uint32_t kind = random % 5, which = random / 5;
  if (kind == 0) return uint64_t{1} << which % (8 * size_bytes);
  if (kind == 1) return (uint64_t{1} << which % (8 * size_bytes)) - 1;
  if (kind == 2) return which % 66;
  if (kind == 3 && size_bytes == 2) return kHalves[which % std::size(kHalves)];
  if (kind == 3) {
    const uint32_t special[] = {0x7f800000u, 0xff800000u, 0x7fc00000u};
    if (which % 4 == 0) return special[which / 4 % 3];
    return float_bits(kFloats[which % std::size(kFloats)]);
  }
  return ~uint64_t{0} - which % 3;
}

Bytes changed(Bytes bytes, const Places &places, uint64_t seed) {
  const uint32_t num_changes = 1 + philox(seed, 0).value[0] % 2;
  for (uint32_t i = 0; i < num_changes; ++i) {
    const Philox random = philox(seed, i + 1);
    const uint32_t share = random.value[0] % 8;
    const std::vector<Place> &from = share < 4   ? places.metadata
                                     : share < 6 ? places.table
                                                 : places.weights;
    const Place &place = from[random.value[1] % from.size()];
    uint64_t number = odd_number(place.size_bytes, random.value[2]);
    if (random.value[3] % 4 == 0) {  // one more or less than it was
      number = 0;
      std::memcpy(&number, &bytes[place.offset], place.size_bytes);
      number += random.value[3] / 4 % 2 == 0 ? 1 : ~uint64_t{0};
    }
    std::memcpy(&bytes[place.offset], &number, place.size_bytes);
  }
  return bytes;
}

}  // namespace
}  // namespace xllm

int main(int argc, char **argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: model_fuzz NUMBER FOLDER [SEED]\n");
    return 2;
  }
  const uint64_t count = std::strtoull(argv[1], nullptr, 10);
  const uint64_t first = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0;
  uint64_t tally[3] = {};
  for (const auto &entry : std::filesystem::directory_iterator(argv[2])) {
    if (entry.path().extension() != ".gguf") continue;
    std::ifstream stream(entry.path(), std::ios::binary);
    const xllm::Bytes sound{std::istreambuf_iterator<char>(stream), {}};
    const xllm::Places places = xllm::find_places(sound);
    for (uint64_t seed = first; seed < first + count; ++seed) {
      try {
        ++tally[static_cast<size_t>(xllm::run(xllm::changed(sound, places, seed)))];
      } catch (const xllm::Error &error) {
        xllm::fail(entry.path().string() + " with seed " + std::to_string(seed) + ": " +
                   error.message());
      }
    }
  }
  std::printf("refused %llu, opened %llu, computed %llu\n",
              static_cast<unsigned long long>(tally[0]), static_cast<unsigned long long>(tally[1]),
              static_cast<unsigned long long>(tally[2]));
  return 0;
}

#endif  // XLLM_LIBFUZZER
