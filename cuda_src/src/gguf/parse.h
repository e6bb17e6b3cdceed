// One GGUF file from first byte to last: the header, the keys and the tensor table, all checked.
#pragma once

#include <cstdint>
#include <deque>
#include <string_view>
#include <vector>

#include "base/mmap.h"
#include "gguf/gguf.h"
#include "gguf/value.h"

namespace xllm {

// What one file says. Views point into the file given to parse_gguf, which must stay where it is.
struct ParsedGguf {
  uint32_t version = 0;
  uint64_t metadata_bytes = 0;        // up to the end of the tensor table
  std::deque<GgufValue> values;       // in file order
  std::vector<uint32_t> value_order;  // indices of `values`, sorted by key
};

// Reads `file`, appends its tensors to `tensors` with `shard` as their file, and returns the rest.
// Memory: under 4 times the metadata, whatever the file declares. Throws Error as GgufFile::open.
// note: that a tensor's name is given once is the caller's to check, over all parts of a model.
ParsedGguf parse_gguf(const MappedFile &file, uint32_t shard, std::deque<GgufTensor> *tensors);

// The value under `key`, or nullptr.
const GgufValue *find_value(const ParsedGguf &parsed, std::string_view key);

}  // namespace xllm
