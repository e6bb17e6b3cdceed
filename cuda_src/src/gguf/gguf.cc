#include "gguf/gguf.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "gguf/parse.h"

namespace xllm {
namespace {

constexpr int64_t kMaxShards = 65535;

// "-00002-of-00003.gguf": how a part of a split model is named. `number` counts from 1.
std::string part_suffix(int64_t number, int64_t count) {
  char text[64];
  std::snprintf(text, sizeof text, "-%05lld-of-%05lld.gguf", static_cast<long long>(number),
                static_cast<long long>(count));
  return text;
}

bool ends_with(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

int64_t int_or(const ParsedGguf &parsed, std::string_view key, int64_t min, int64_t max,
               int64_t fallback) {
  const GgufValue *value = find_value(parsed, key);
  return value == nullptr ? fallback : value->as_int(min, max);
}

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// A later part of a split model must not say what the first one does not: it would go unread.
void refuse_unread_values(const ParsedGguf &part, const ParsedGguf &first) {
  for (const GgufValue &value : part.values) {
    if (starts_with(value.key(), "split.") || starts_with(value.key(), "general.")) continue;
    const GgufValue *same = find_value(first, value.key());
    if (same == nullptr || same->raw() != value.raw()) {
      value.fail("a later part of a split model holds a value that its first part does not");
    }
  }
}

}  // namespace

struct GgufFile::Impl {
  std::deque<MappedFile> files;  // a deque: views hold addresses of its elements
  ParsedGguf first;
  std::deque<GgufTensor> tensors;
  std::vector<uint32_t> tensor_order;  // indices of `tensors`, sorted by name
  uint64_t metadata_bytes = 0;

  void open_parts(const std::string &path);
  void index_tensors();
};

// Opens the other parts of a split model, given its first.
void GgufFile::Impl::open_parts(const std::string &path) {
  const int64_t count = int_or(first, "split.count", 1, kMaxShards, 1);
  const int64_t number = int_or(first, "split.no", 0, count - 1, 0) + 1;
  if (count == 1) return;
  const std::string own_suffix = part_suffix(number, count);
  const bool is_named_so = ends_with(path, own_suffix);
  const std::string prefix =
      is_named_so ? path.substr(0, path.size() - own_suffix.size()) : std::string();
  const std::string first_name =
      is_named_so ? file_name(prefix + part_suffix(1, count)) : "*" + part_suffix(1, count);
  const std::string part = "part " + std::to_string(number) + " of " + std::to_string(count);
  if (number != 1) {
    find_value(first, "split.no")
        ->fail("the file is " + part + " of a split model; open " + first_name);
  }
  if (!is_named_so) {
    throw Error(Status::kModelMalformed, files[0].name() + ": split.no: the file is " + part +
                                             " of a split model; expected the name " + first_name);
  }
  for (int64_t i = 1; i < count; ++i) {
    try {
      files.emplace_back(prefix + part_suffix(i + 1, count));
    } catch (const Error &error) {
      throw Error(error.status(), error.message() + " (part " + std::to_string(i + 1) + " of " +
                                      std::to_string(count) + " of the model " + first_name + ")");
    }
    const ParsedGguf parsed = parse_gguf(files.back(), static_cast<uint32_t>(i), &tensors);
    metadata_bytes += parsed.metadata_bytes;
    for (const auto &[key, expected] :
         {std::pair("split.no", i), std::pair("split.count", count)}) {
      const GgufValue *value = find_value(parsed, key);
      if (value == nullptr) {
        throw Error(Status::kModelMalformed, files.back().name() + ": " + key + ": expected " +
                                                 std::to_string(expected) + ", found no such key");
      }
      static_cast<void>(value->as_int(expected, expected));
    }
    refuse_unread_values(parsed, first);
  }
  if (const GgufValue *total = find_value(first, "split.tensors.count")) {
    const auto found = static_cast<int64_t>(tensors.size());
    static_cast<void>(total->as_int(found, found));
  }
}

void GgufFile::Impl::index_tensors() {
  tensor_order.resize(tensors.size());
  std::iota(tensor_order.begin(), tensor_order.end(), 0u);
  std::sort(tensor_order.begin(), tensor_order.end(), [&](uint32_t a, uint32_t b) {
    const int by_name = tensors[a].name.compare(tensors[b].name);
    return by_name != 0 ? by_name < 0 : a < b;
  });
  for (size_t i = 1; i < tensor_order.size(); ++i) {
    const GgufTensor &tensor = tensors[tensor_order[i]];
    if (tensor.name == tensors[tensor_order[i - 1]].name) {
      throw Error(Status::kModelMalformed,
                  files[tensor.shard].name() + ": " + printable(tensor.name) + " (byte " +
                      std::to_string(tensor.byte_offset) + "): the tensor is given twice");
    }
  }
}

MatrixView GgufTensor::matrix() const {
  if (dims[2] != 1 || dims[3] != 1) {
    throw Error(Status::kModelMalformed,
                std::string(name) + " (byte " + std::to_string(byte_offset) +
                    "): expected a matrix, found " + std::to_string(num_dims) + " dimensions");
  }
  return {data, dtype, static_cast<int64_t>(dims[1]), static_cast<int64_t>(dims[0]),
          std::string(name)};
}

GgufFile::GgufFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GgufFile::GgufFile(GgufFile &&) noexcept = default;
GgufFile &GgufFile::operator=(GgufFile &&) noexcept = default;
GgufFile::~GgufFile() = default;

GgufFile GgufFile::open(const std::string &path) {
  auto impl = std::make_unique<Impl>();
  impl->files.emplace_back(path);
  impl->first = parse_gguf(impl->files[0], 0, &impl->tensors);
  impl->metadata_bytes = impl->first.metadata_bytes;
  impl->open_parts(path);
  impl->index_tensors();
  return GgufFile(std::move(impl));
}

uint32_t GgufFile::version() const { return impl_->first.version; }
uint32_t GgufFile::num_shards() const { return static_cast<uint32_t>(impl_->files.size()); }
const MappedFile &GgufFile::shard(uint32_t index) const { return impl_->files[index]; }
uint64_t GgufFile::metadata_bytes() const { return impl_->metadata_bytes; }

uint64_t GgufFile::file_bytes() const {
  uint64_t bytes = 0;
  for (const MappedFile &file : impl_->files) bytes += file.size();
  return bytes;
}

const std::deque<GgufValue> &GgufFile::values() const { return impl_->first.values; }

const GgufValue *GgufFile::find(std::string_view key) const {
  return find_value(impl_->first, key);
}

const GgufValue &GgufFile::require(std::string_view key) const {
  const GgufValue *value = find(key);
  if (value == nullptr) {
    throw Error(Status::kModelMalformed,
                impl_->files[0].name() + ": " + printable(key) + ": the key is missing");
  }
  return *value;
}

int64_t GgufFile::get_int(std::string_view key, int64_t min, int64_t max) const {
  return require(key).as_int(min, max);
}

int64_t GgufFile::get_int(std::string_view key, int64_t min, int64_t max, int64_t fallback) const {
  const GgufValue *value = find(key);
  return value == nullptr ? fallback : value->as_int(min, max);
}

double GgufFile::get_float(std::string_view key, double min, double max) const {
  return require(key).as_float(min, max);
}

double GgufFile::get_float(std::string_view key, double min, double max, double fallback) const {
  const GgufValue *value = find(key);
  return value == nullptr ? fallback : value->as_float(min, max);
}

bool GgufFile::get_bool(std::string_view key, bool fallback) const {
  const GgufValue *value = find(key);
  return value == nullptr ? fallback : value->as_bool();
}

std::string_view GgufFile::get_string(std::string_view key) const {
  return require(key).as_string();
}

std::string_view GgufFile::get_string(std::string_view key, std::string_view fallback) const {
  const GgufValue *value = find(key);
  return value == nullptr ? fallback : value->as_string();
}

const std::deque<GgufTensor> &GgufFile::tensors() const { return impl_->tensors; }

const GgufTensor *GgufFile::find_tensor(std::string_view name) const {
  const auto found = std::lower_bound(
      impl_->tensor_order.begin(), impl_->tensor_order.end(), name,
      [&](uint32_t i, std::string_view wanted) { return impl_->tensors[i].name < wanted; });
  if (found == impl_->tensor_order.end() || impl_->tensors[*found].name != name) return nullptr;
  return &impl_->tensors[*found];
}

}  // namespace xllm
