// What the engine needs to know of a model's token ids, computed once per engine.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/mask.h"
#include "tokenizer/tokenizer.h"

namespace xllm {

class Vocabulary {
 public:
  // tokenizer: null where a model has none at all; outlives this. vocab_size: rows of the head.
  Vocabulary(const Tokenizer *tokenizer, int32_t vocab_size);

  const Tokenizer *tokenizer() const { return tokenizer_; }
  int32_t vocab_size() const { return vocab_size_; }
  // Whether ids have pieces and text.
  bool has_pieces() const { return has_pieces_; }

  // Ids at and beyond this are padding rows of the head.
  int32_t num_choosable() const { return num_choosable_; }
  // For SampleRow::mask: which of the ids before that may be chosen; null when all may.
  const uint32_t *mask() const { return mask_.words(); }

  const std::vector<int32_t> &end_of_generation() const { return end_of_generation_; }
  bool is_end_of_generation(int32_t id) const;

 private:
  const Tokenizer *tokenizer_;
  int32_t vocab_size_;
  bool has_pieces_ = false;
  int32_t num_choosable_ = 0;
  TokenMask mask_;
  std::vector<int32_t> end_of_generation_;  // ascending
};

}  // namespace xllm
