// Which token ids a row may choose, as the bit mask that samplers read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace xllm {

// One bit per id, [ceil(vocab_size / 32)] words, bit set: allowed. A mask comes from the model
// (rows of the head that are no tokens) or from outside, for one position of one request.
class TokenMask {
 public:
  TokenMask() = default;
  TokenMask(int32_t vocab_size, bool is_allowed)
      : words_(num_words_of(vocab_size), is_allowed ? ~uint32_t{0} : 0), vocab_size_(vocab_size) {}

  // words: [num_words_of(vocab_size)], copied.
  TokenMask(int32_t vocab_size, const uint32_t *words)
      : words_(num_words_of(vocab_size)), vocab_size_(vocab_size) {
    std::memcpy(words_.data(), words, words_.size() * sizeof(uint32_t));
  }

  static size_t num_words_of(int32_t vocab_size) {
    return (static_cast<size_t>(vocab_size) + 31) / 32;
  }

  int32_t vocab_size() const { return vocab_size_; }
  // For SampleRow::mask; null for the empty mask, which allows everything.
  const uint32_t *words() const { return words_.empty() ? nullptr : words_.data(); }

  bool is_allowed(int32_t id) const {
    if (words_.empty()) return true;
    return (words_[static_cast<size_t>(id) / 32] >> (static_cast<uint32_t>(id) % 32) & 1) != 0;
  }
  void set(int32_t id, bool is_allowed) {
    XLLM_DCHECK(id >= 0 && id < vocab_size_);
    const uint32_t bit = uint32_t{1} << (static_cast<uint32_t>(id) % 32);
    uint32_t &word = words_[static_cast<size_t>(id) / 32];
    word = is_allowed ? word | bit : word & ~bit;
  }
  // Forbids what another mask of as many words does; null: it forbids nothing.
  void keep(const uint32_t *words) {
    if (words == nullptr) return;
    for (size_t i = 0; i < words_.size(); ++i) words_[i] &= words[i];
  }

 private:
  std::vector<uint32_t> words_;
  int32_t vocab_size_ = 0;
};

}  // namespace xllm
