#include "gguf/parse.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>

#include "base/checked.h"
#include "base/error.h"
#include "gguf/cursor.h"

namespace xllm {
namespace {

constexpr uint64_t kMaxItems = uint64_t{1} << 20;  // keys, and tensors
constexpr uint64_t kMaxKeyBytes = 65535;
constexpr uint64_t kMaxTensorNameBytes = 64;
constexpr uint32_t kMaxDims = 4;
constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kMinAlignment = 8;
constexpr int64_t kMaxAlignment = int64_t{1} << 30;
constexpr uint64_t kMaxSize = std::numeric_limits<int64_t>::max();

// The least that one record can take: a name of one byte, and a one-byte value or one dimension.
constexpr uint64_t kMinKeyRecord = 8 + 1 + 4 + 1;
constexpr uint64_t kMinTensorRecord = 8 + 1 + 4 + 8 + 4 + 8;

struct Header {
  uint32_t version;
  uint64_t num_tensors;
  uint64_t num_keys;
};

Header read_header(Cursor *cursor) {
  constexpr std::string_view kMagic = "GGUF";
  const std::string_view start(reinterpret_cast<const char *>(cursor->position()),
                               std::min<uint64_t>(cursor->remaining(), kMagic.size()));
  if (start != kMagic.substr(0, start.size())) {
    cursor->fail(Status::kModelMalformed, "expected a GGUF file, found a file that starts with \"" +
                                              printable(start) + "\"");
  }
  cursor->take(kMagic.size());
  Header header{};
  const uint64_t version_offset = cursor->offset();
  header.version = cursor->read<uint32_t>();
  if (header.version != 2 && header.version != 3) {
    // The magic is the same in both byte orders; the version tells them apart.
    const bool is_big_endian = (header.version & 0xffff) == 0 && header.version != 0;
    cursor->fail_at(Status::kModelUnsupported, version_offset,
                    is_big_endian ? "big-endian GGUF is not supported; expected little-endian"
                                  : "GGUF version " + std::to_string(header.version) +
                                        " is not supported; expected 2 or 3");
  }
  for (uint64_t *count : {&header.num_tensors, &header.num_keys}) {
    const uint64_t offset = cursor->offset();
    *count = cursor->read<uint64_t>();
    if (*count > kMaxItems) {
      cursor->fail_at(Status::kModelMalformed, offset,
                      std::string("expected at most ") + std::to_string(kMaxItems) +
                          (count == &header.num_keys ? " keys" : " tensors") + ", found " +
                          std::to_string(*count));
    }
  }
  return header;
}

// A key's or tensor's name, which from here on stands for the record in messages.
std::string_view read_name(Cursor *cursor, uint64_t max_bytes) {
  const uint64_t offset = cursor->offset();
  const std::string_view name = cursor->read_string();
  if (name.empty() || name.size() > max_bytes) {
    cursor->fail_at(Status::kModelMalformed, offset,
                    "expected a name of 1 to " + std::to_string(max_bytes) + " bytes, found " +
                        std::to_string(name.size()));
  }
  cursor->describe(name);
  return name;
}

void read_values(Cursor *cursor, const MappedFile &file, uint64_t count, ParsedGguf *parsed) {
  cursor->describe("metadata");
  cursor->expect_room(count, kMinKeyRecord);
  for (uint64_t i = 0; i < count; ++i) {
    cursor->describe("metadata");
    const std::string_view key = read_name(cursor, kMaxKeyBytes);
    const GgufType type = read_type(cursor);
    parsed->values.emplace_back(&file, key, type, cursor->position());
    skip_value(cursor, type);
  }
  const std::deque<GgufValue> &values = parsed->values;
  std::vector<uint32_t> &order = parsed->value_order;
  order.resize(values.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const int by_key = values[a].key().compare(values[b].key());
    return by_key != 0 ? by_key < 0 : a < b;
  });
  for (size_t i = 1; i < order.size(); ++i) {
    if (values[order[i]].key() == values[order[i - 1]].key()) {
      values[order[i]].fail("the key is given twice");
    }
  }
}

uint64_t read_alignment(const ParsedGguf &parsed) {
  const GgufValue *value = find_value(parsed, "general.alignment");
  if (value == nullptr) return kDefaultAlignment;
  const int64_t alignment = value->as_int(kMinAlignment, kMaxAlignment);
  if ((alignment & (alignment - 1)) != 0) {
    value->fail("expected a power of two, found " + std::to_string(alignment));
  }
  return static_cast<uint64_t>(alignment);
}

DType read_dtype(Cursor *cursor) {
  const uint64_t offset = cursor->offset();
  const auto number = cursor->read<uint32_t>();
  if (find_dtype_info(number) == nullptr) {
    const char *name = gguf_type_name(number);
    cursor->fail_at(Status::kModelUnsupported, offset,
                    name != nullptr ? std::string("tensor type ") + name + " is not supported"
                                    : "tensor type " + std::to_string(number) + " is unknown");
  }
  return static_cast<DType>(number);
}

// One record of the tensor table. byte_offset is the record's offset field: relative to the data.
GgufTensor read_tensor(Cursor *cursor) {
  GgufTensor tensor;
  tensor.name = read_name(cursor, kMaxTensorNameBytes);
  const uint64_t dims_offset = cursor->offset();
  tensor.num_dims = cursor->read<uint32_t>();
  if (tensor.num_dims < 1 || tensor.num_dims > kMaxDims) {
    cursor->fail_at(Status::kModelMalformed, dims_offset,
                    "expected 1 to " + std::to_string(kMaxDims) + " dimensions, found " +
                        std::to_string(tensor.num_dims));
  }
  uint64_t num_elements = 1;
  for (uint32_t i = 0; i < tensor.num_dims; ++i) {
    const uint64_t offset = cursor->offset();
    tensor.dims[i] = cursor->read<uint64_t>();
    if (tensor.dims[i] == 0 || !checked_mul(num_elements, tensor.dims[i], &num_elements) ||
        num_elements > kMaxSize) {
      cursor->fail_at(Status::kModelMalformed, offset,
                      "dimension " + std::to_string(i) + " of " + std::to_string(tensor.dims[i]) +
                          " makes a tensor of no, or of more than 2^63 - 1, elements");
    }
  }
  tensor.dtype = read_dtype(cursor);
  const DTypeInfo &info = dtype_info(tensor.dtype);
  if (tensor.dims[0] % info.block_elems != 0) {
    cursor->fail_at(Status::kModelMalformed, dims_offset,
                    std::string("expected rows of whole ") + info.name + " blocks of " +
                        std::to_string(info.block_elems) + " elements, found rows of " +
                        std::to_string(tensor.dims[0]));
  }
  if (!checked_mul(num_elements / info.block_elems, info.block_bytes, &tensor.size_bytes) ||
      tensor.size_bytes > kMaxSize) {
    cursor->fail_at(Status::kModelMalformed, dims_offset,
                    "expected at most 2^63 - 1 bytes, found " + std::to_string(num_elements) +
                        " elements of " + info.name);
  }
  tensor.byte_offset = cursor->read<uint64_t>();
  return tensor;
}

// Turns the offset of a tensor's data from relative to absolute once it is known to be good.
void place_tensor(const MappedFile &file, uint64_t data_start, uint64_t alignment,
                  GgufTensor *tensor) {
  const auto fail = [&](Status status, const std::string &message) {
    Cursor cursor(&file, 0);
    cursor.describe(tensor->name);
    cursor.fail_at(
        status,
        static_cast<uint64_t>(reinterpret_cast<const uint8_t *>(tensor->name.data()) - file.data()),
        message);
  };
  const uint64_t offset = tensor->byte_offset;
  const uint64_t data_bytes = file.size() > data_start ? file.size() - data_start : 0;
  if (offset > data_bytes || tensor->size_bytes > data_bytes - offset) {
    fail(Status::kModelTruncated, "expected " + std::to_string(tensor->size_bytes) +
                                      " bytes at offset " + std::to_string(offset) +
                                      " of the tensor data, found " + std::to_string(data_bytes) +
                                      " bytes of data in all");
  }
  if (offset % alignment != 0) {
    fail(Status::kModelMalformed, "expected an offset that is a multiple of " +
                                      std::to_string(alignment) + ", found " +
                                      std::to_string(offset));
  }
  tensor->byte_offset = data_start + offset;
  tensor->data = file.data() + tensor->byte_offset;
}

// note: writers lay tensors end to end. Two over one another would be one tensor under two names at
// best, and a crafted file at worst.
void refuse_overlaps(const MappedFile &file, size_t first, const std::deque<GgufTensor> &tensors) {
  std::vector<uint32_t> order(tensors.size() - first);
  std::iota(order.begin(), order.end(), static_cast<uint32_t>(first));
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return tensors[a].byte_offset < tensors[b].byte_offset;
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const GgufTensor &before = tensors[order[i - 1]];
    const GgufTensor &after = tensors[order[i]];
    if (after.byte_offset - before.byte_offset < before.size_bytes) {
      Cursor cursor(&file, after.byte_offset);
      cursor.describe(after.name);
      cursor.fail(Status::kModelMalformed, "its data overlaps that of " + printable(before.name) +
                                               " (byte " + std::to_string(before.byte_offset) +
                                               ", " + std::to_string(before.size_bytes) +
                                               " bytes)");
    }
  }
}

}  // namespace

ParsedGguf parse_gguf(const MappedFile &file, uint32_t shard, std::deque<GgufTensor> *tensors) {
  ParsedGguf parsed;
  Cursor cursor(&file, 0);
  const Header header = read_header(&cursor);
  parsed.version = header.version;
  read_values(&cursor, file, header.num_keys, &parsed);

  cursor.describe("tensor table");
  cursor.expect_room(header.num_tensors, kMinTensorRecord);
  const size_t first = tensors->size();
  for (uint64_t i = 0; i < header.num_tensors; ++i) {
    cursor.describe("tensor table");
    tensors->push_back(read_tensor(&cursor));
    tensors->back().shard = shard;
  }
  parsed.metadata_bytes = cursor.offset();

  // A file of keys alone may end without padding.
  const uint64_t alignment = read_alignment(parsed);
  uint64_t data_start = 0;
  if (!checked_align(cursor.offset(), alignment, &data_start)) data_start = file.size();
  for (size_t i = first; i < tensors->size(); ++i) {
    place_tensor(file, data_start, alignment, &(*tensors)[i]);
  }
  refuse_overlaps(file, first, *tensors);
  return parsed;
}

const GgufValue *find_value(const ParsedGguf &parsed, std::string_view key) {
  const auto found = std::lower_bound(
      parsed.value_order.begin(), parsed.value_order.end(), key,
      [&](uint32_t i, std::string_view wanted) { return parsed.values[i].key() < wanted; });
  if (found == parsed.value_order.end() || parsed.values[*found].key() != key) return nullptr;
  return &parsed.values[*found];
}

}  // namespace xllm
