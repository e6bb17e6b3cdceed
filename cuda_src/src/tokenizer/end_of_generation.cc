#include "tokenizer/end_of_generation.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <string>

#include "tokenizer/template_scan.h"

namespace xllm {
namespace {

// Names under which model families end a turn, a message or a text.
constexpr std::string_view kEndNames[] = {
    "</s>",
    "<eos>",
    "<EOT>",
    "<|EOT|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|return|>",
    "<|call|>",
    "<\xEF\xBD\x9C"
    "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>",  // DeepSeek
};

}  // namespace

bool is_end_name(std::string_view name) {
  return std::find(std::begin(kEndNames), std::end(kEndNames), name) != std::end(kEndNames);
}

std::vector<EndToken> find_end_of_generation(const Vocab &vocab, const SpecialMatcher &special,
                                             const VocabSource &source) {
  std::map<int32_t, std::string> sources;  // keeps the first source of an id
  const auto add = [&](std::optional<int32_t> id, const char *source_name) {
    if (id) sources.emplace(*id, source_name);
  };
  add(source.eos, "tokenizer.ggml.eos_token_id");
  add(source.eot, "tokenizer.ggml.eot_token_id");
  add(source.eom, "tokenizer.ggml.eom_token_id");
  for (const std::string_view name : kEndNames) {
    const int32_t id = vocab.find_special(name);
    if (id >= 0 && vocab.type(id) == TokenType::kControl) add(id, "known name");
  }
  for (const int32_t id : find_turn_ends(source.chat_template, vocab, special, source.eos)) {
    add(id, "chat template");
  }
  std::vector<EndToken> ends;
  ends.reserve(sources.size());
  for (const auto &[id, source_name] : sources) ends.push_back({id, source_name});
  return ends;
}

}  // namespace xllm
