// Byte-level byte-pair encoding (GPT-2): a text is cut into pieces, and inside each piece the
// adjacent pair of best rank is merged, leftmost first, until no pair has a merge.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/flat_map.h"
#include "tokenizer/pretokenize.h"
#include "tokenizer/text_model.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/vocab.h"

namespace xllm {

class BpeModel : public TextModel {
 public:
  // The vocabulary must outlive the model. kModelMalformed: a merge that is not a pair.
  BpeModel(const Vocab &vocab, const VocabSource &source, const PreTokenizer &pre);

  // A byte without a token of its own leaves no trace, as in the reference.
  void encode(std::string_view text, bool starts_text, std::vector<int32_t> *ids) const override;
  // Symbols that are no tokens are few and not counted.
  size_t memory_bytes() const override { return merges_.memory_bytes(); }

 private:
  // Symbols are token ids, and from num_tokens on the strings that merges pass through although
  // they are no tokens.
  struct Merge {
    int32_t rank = 0;
    int32_t symbol = 0;  // what the pair becomes
  };

  int32_t symbol_of(std::string_view bytes, int32_t guess = -1);
  void encode_piece(std::string_view piece, std::vector<int32_t> *ids) const;
  void encode_short(std::string_view piece, std::vector<int32_t> *ids) const;
  void encode_long(std::string_view piece, std::vector<int32_t> *ids) const;
  void emit(int32_t symbol, std::vector<int32_t> *ids) const;

  const Vocab &vocab_;
  const PreTokenizer &pre_;
  PairMap<Merge> merges_;
  std::vector<std::string> virtual_symbols_;  // bytes of symbol num_tokens + index
  std::unordered_map<std::string, int32_t, SeededHash> virtual_ids_;
};

}  // namespace xllm
