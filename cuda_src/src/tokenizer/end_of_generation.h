// Which tokens end a generation, and why.
#pragma once

#include <string_view>
#include <vector>

#include "tokenizer/special_matcher.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/vocab.h"

namespace xllm {

// Whether a token of this name ends a turn or a text in some known model family.
bool is_end_name(std::string_view name);

// See Tokenizer::end_of_generation().
std::vector<EndToken> find_end_of_generation(const Vocab &vocab, const SpecialMatcher &special,
                                             const VocabSource &source);

}  // namespace xllm
