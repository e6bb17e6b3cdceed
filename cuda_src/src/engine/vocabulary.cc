#include "engine/vocabulary.h"

#include <algorithm>

namespace xllm {

Vocabulary::Vocabulary(const Tokenizer *tokenizer, int32_t vocab_size)
    : tokenizer_(tokenizer), vocab_size_(vocab_size), num_choosable_(vocab_size) {
  if (tokenizer == nullptr) return;
  has_pieces_ = tokenizer->model() != "no_vocab";
  for (const EndToken &end : tokenizer->end_of_generation()) end_of_generation_.push_back(end.id);
  while (num_choosable_ > 0 && !tokenizer->is_choosable(num_choosable_ - 1)) --num_choosable_;
  for (int32_t id = 0; id < num_choosable_; ++id) {
    if (tokenizer->is_choosable(id)) continue;
    if (mask_.words() == nullptr) mask_ = TokenMask(vocab_size, true);
    mask_.set(id, false);
  }
  // A vocabulary of padding alone is nobody's: let the ids speak for themselves.
  if (num_choosable_ == 0) num_choosable_ = vocab_size;
}

bool Vocabulary::is_end_of_generation(int32_t id) const {
  return std::binary_search(end_of_generation_.begin(), end_of_generation_.end(), id);
}

}  // namespace xllm
