// Streaming detokenizer: token ids in, whole code points out.
#pragma once

#include <cstdint>
#include <string>

#include "tokenizer/tokenizer.h"

namespace xllm {

// What feed() and flush() give, joined, equals Tokenizer::decode() of all ids, and every piece is
// valid UTF-8 by itself. A plain value: copy it to take a snapshot. The tokenizer must outlive it,
// and must have a vocabulary.
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer &tokenizer, const DecodeOptions &options = {});

  // The text that this id completes; often empty inside a character. kInvalidArgument: id out of
  // range.
  std::string feed(int32_t id);

  // The end of the stream: U+FFFD if it stopped inside a character, else "". Afterwards a new
  // stream may begin.
  std::string flush();

  // Bytes held back because they begin a character that is not complete yet; at most 3.
  size_t num_pending_bytes() const { return num_pending_; }

 private:
  const Tokenizer *tokenizer_;
  DecodeOptions options_;
  bool at_start_ = true;  // no text has been given yet: a space prefix is still to be taken off
  char pending_[3] = {};  // a valid but incomplete character
  size_t num_pending_ = 0;
};

}  // namespace xllm
