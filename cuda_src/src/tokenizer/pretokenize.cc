#include "tokenizer/pretokenize.h"

namespace xllm {
namespace {

// Names with the same rules stand side by side.
constexpr PreTokenizer kPreTokenizers[] = {
    // name, split, normalizes_nfc, ignores_merges, adds_bos
    {"gpt-2", split_gpt2_text, false, false, false},
    {"phi-2", split_gpt2_text, false, false, false},
    {"smollm", split_smollm, false, false, false},
    {"starcoder", split_smollm, false, false, false},
    {"refact", split_smollm, false, false, false},
    {"falcon", split_falcon, false, false, false},
    {"llama-bpe", split_llama3, false, true, true},
    {"llama3", split_llama3, false, true, true},
    {"llama-v3", split_llama3, false, true, true},
    {"qwen2", split_qwen2, true, false, false},
    {"deepseek-r1-qwen", split_qwen2, true, false, false},
    {"tekken", split_tekken, false, true, true},
    {"deepseek-llm", split_deepseek_llm, false, false, false},
    {"deepseek-coder", split_deepseek_coder, false, false, false},
    {"deepseek-v3", split_deepseek_v3, false, false, false},
};

}  // namespace

const PreTokenizer *find_pre_tokenizer(std::string_view name) {
  for (const PreTokenizer &pre : kPreTokenizers) {
    if (pre.name == name) return &pre;
  }
  return nullptr;
}

std::string pre_tokenizer_names() {
  std::string names;
  for (const PreTokenizer &pre : kPreTokenizers) {
    if (!names.empty()) names += ", ";
    names += pre.name;
  }
  return names;
}

}  // namespace xllm
