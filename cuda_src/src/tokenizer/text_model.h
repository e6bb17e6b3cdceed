// What turns text into ids: implemented by byte-level BPE and by SentencePiece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace xllm {

class TextModel {
 public:
  virtual ~TextModel() = default;

  // Appends the ids of well-formed UTF-8 without special tokens.
  //   starts_text   nothing stands before it, or a CONTROL token does
  virtual void encode(std::string_view text, bool starts_text, std::vector<int32_t> *ids) const = 0;

  // Whether texts get a space of the model's own in front, which decoding takes off.
  virtual bool has_space_prefix() const { return false; }

  // Heap memory of its tables.
  virtual size_t memory_bytes() const = 0;
};

}  // namespace xllm
