// The vocabulary: ids to pieces and types, and pieces to ids.
//
// Pieces are kept as the raw bytes they stand for: GPT-2's byte alphabet is mapped back, U+2581
// becomes a space, <0x0A> becomes that byte. Names of CONTROL, USER_DEFINED and UNKNOWN tokens are
// kept as they are.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/flat_map.h"
#include "tokenizer/tokenizer.h"

namespace xllm {

// Appends the bytes that a piece of GPT-2's byte alphabet (well-formed UTF-8) stands for; another
// character stands for itself. False if there was one.
bool append_alphabet_bytes(std::string_view piece, std::string *out);

class Vocab {
 public:
  // kModelMalformed: arrays of unequal length, an unknown type, more tokens than rows.
  explicit Vocab(const VocabSource &source);

  int32_t num_tokens() const { return static_cast<int32_t>(types_.size()); }
  int32_t num_rows() const { return num_rows_; }
  int32_t num_choosable() const { return num_choosable_; }

  // The id must be in [0, num_tokens()).
  std::string_view piece(int32_t id) const {
    return std::string_view(bytes_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
  }
  TokenType type(int32_t id) const { return types_[id]; }

  // The token with exactly these bytes that ordinary text can become: NORMAL, else USER_DEFINED,
  // else (llama only) UNUSED; the lowest id of those. -1: none.
  int32_t find_text(std::string_view bytes) const { return find(bytes, text_slots_); }
  // The same among CONTROL, USER_DEFINED and UNKNOWN tokens, by name.
  int32_t find_special(std::string_view name) const { return find(name, special_slots_); }
  // The id of each byte's own token, -1 where there is none: a one-byte piece for gpt2, BYTE tokens
  // for llama.
  int32_t byte_token(unsigned char byte) const { return byte_tokens_[byte]; }

 private:
  int32_t find(std::string_view bytes, const std::vector<int32_t> &slots) const;
  void insert(int32_t id, std::vector<int32_t> *slots);
  void add_token(const VocabSource &source, size_t index);

  std::string bytes_;              // all pieces, one behind the other
  std::vector<uint32_t> offsets_;  // [num_tokens + 1] into bytes_
  std::vector<TokenType> types_;
  int32_t num_rows_ = 0;
  int32_t num_choosable_ = 0;
  uint64_t seed_;
  std::vector<int32_t> text_slots_;  // open addressing by the piece's hash; -1: empty
  std::vector<int32_t> special_slots_;
  int32_t byte_tokens_[256];
};

}  // namespace xllm
