#include "gguf/vocab_arrays.h"

#include <limits>

namespace xllm {

VocabArrays read_vocab_arrays(const GgufFile &file) {
  VocabArrays arrays;
  if (const GgufValue *tokens = file.find("tokenizer.ggml.tokens")) {
    arrays.tokens = tokens->as_strings();
    if (arrays.tokens.size() > std::numeric_limits<int32_t>::max()) {
      tokens->fail("expected at most 2^31 - 1 tokens, found " +
                   std::to_string(arrays.tokens.size()));
    }
  }
  if (const GgufValue *merges = file.find("tokenizer.ggml.merges")) {
    arrays.merges = merges->as_strings();
  }
  if (const GgufValue *scores = file.find("tokenizer.ggml.scores")) {
    scores->expect_array(GgufType::kFloat32, arrays.tokens.size());
    const GgufFloats values = scores->as_floats();
    arrays.scores.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) arrays.scores[i] = static_cast<float>(values[i]);
  }
  if (const GgufValue *types = file.find("tokenizer.ggml.token_type")) {
    types->expect_array(GgufType::kInt32, arrays.tokens.size());
    const GgufInts values = types->as_ints(0, std::numeric_limits<int32_t>::max());
    arrays.types.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) arrays.types[i] = static_cast<int32_t>(values[i]);
  }
  return arrays;
}

}  // namespace xllm
