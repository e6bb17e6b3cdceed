// The arrays of a vocabulary, checked against one another: one entry per token, of the one type
// that the format gives each.
#pragma once

#include <cstdint>
#include <vector>

#include "gguf/gguf.h"

namespace xllm {

// Strings are views of the mapped file; numbers are copies, since the file does not align them.
// What the file lacks is empty.
struct VocabArrays {
  GgufStrings tokens;          // tokenizer.ggml.tokens
  GgufStrings merges;          // tokenizer.ggml.merges
  std::vector<float> scores;   // tokenizer.ggml.scores, f32, one per token
  std::vector<int32_t> types;  // tokenizer.ggml.token_type, i32, one per token
};

// Throws Error(kModelMalformed) naming the key: tokens or merges that are not strings, scores or
// types of another element type or number than the tokens (or there without any tokens), a score
// that is not a number, more than 2^31 - 1 tokens.
VocabArrays read_vocab_arrays(const GgufFile &file);

}  // namespace xllm
