// The vocabulary: ids to pieces and types, and pieces to ids.
//
// Pieces are kept as the raw bytes they stand for: GPT-2's byte alphabet is mapped back, U+2581
// becomes a space, <0x0A> becomes that byte. Names of CONTROL and UNKNOWN tokens are kept as they
// are; so are those of USER_DEFINED ones, but for SentencePiece's U+2581, which its text has, too.
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
  //   guess   an id that may well be the answer: saves the look-up when it is
  int32_t find_text(std::string_view bytes, int32_t guess = -1) const {
    if (guess >= 0 && guess < num_tokens() && is_text_[guess] && piece(guess) == bytes) {
      return guess;
    }
    return find(bytes, text_index_);
  }
  // The same among CONTROL, USER_DEFINED and UNKNOWN tokens, by name.
  int32_t find_special(std::string_view name) const { return find(name, special_index_); }
  // The id of each byte's own token, -1 where there is none: a one-byte piece for gpt2, BYTE tokens
  // for llama.
  int32_t byte_token(unsigned char byte) const { return byte_tokens_[byte]; }

  // Heap memory of its tables.
  size_t memory_bytes() const;

 private:
  // Open addressing by the piece's hash, whose upper half is kept so that most slots of other
  // pieces are passed without a look at their bytes. id -1: empty.
  struct Slot {
    uint32_t tag = 0;
    int32_t id = -1;
  };
  using Index = std::vector<Slot>;

  // The slot that holds `bytes`, or the empty one where they belong.
  size_t find_slot(std::string_view bytes, uint64_t hash, const Index &index) const;
  int32_t find(std::string_view bytes, const Index &index) const;
  // False if a token with the same bytes is there already.
  bool insert(int32_t id, Index *index);
  void add_token(const VocabSource &source, size_t index);

  std::string bytes_;              // all pieces, one behind the other
  std::vector<uint32_t> offsets_;  // [num_tokens + 1] into bytes_
  std::vector<TokenType> types_;
  int32_t num_rows_ = 0;
  int32_t num_choosable_ = 0;
  uint64_t seed_;
  Index text_index_;
  Index special_index_;
  std::vector<bool> is_text_;  // [num_tokens] whether text_index_ holds it
  int32_t byte_tokens_[256];
};

}  // namespace xllm
