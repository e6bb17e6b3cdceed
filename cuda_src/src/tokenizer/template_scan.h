// What a chat template writes behind an assistant's message, read from its source without running
// it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tokenizer/special_matcher.h"
#include "tokenizer/vocab.h"

namespace xllm {

// Ids of the CONTROL tokens that end an assistant turn, ascending. A template that
// only writes eos_token there gives `eos`. Tokens that a template opens a turn with, or writes when
// add_generation_prompt is set, are left out. Linear in the source; what it cannot follow it passes
// over.
std::vector<int32_t> find_turn_ends(std::string_view source, const Vocab &vocab,
                                    const SpecialMatcher &special, std::optional<int32_t> eos);

}  // namespace xllm
