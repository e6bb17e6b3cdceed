// SentencePiece in its BPE form, as the Llama and Mistral vocabularies of that kind use it: the
// text is one run of characters, and the adjacent pair that makes the piece of best score is merged
// first. What is no piece falls back to BYTE tokens, else to the UNKNOWN token.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tokenizer/text_model.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/vocab.h"

namespace xllm {

class SpmModel : public TextModel {
 public:
  // The vocabulary must outlive the model. kModelMalformed: no scores, or one that is not a number.
  // kModelUnsupported: remove_extra_whitespaces.
  SpmModel(const Vocab &vocab, const VocabSource &source);

  // U+2581 in the text is a space, as in the reference.
  void encode(std::string_view text, bool starts_text, std::vector<int32_t> *ids) const override;
  bool has_space_prefix() const override { return add_space_prefix_; }
  size_t memory_bytes() const override { return priorities_.capacity() * sizeof(uint32_t); }

 private:
  class Run;

  const Vocab &vocab_;
  std::vector<uint32_t> priorities_;  // [num_tokens] by score: smaller is better
  size_t max_piece_size_ = 0;         // bytes of the longest piece that text can become
  int32_t unknown_ = -1;
  bool add_space_prefix_ = true;
};

}  // namespace xllm
