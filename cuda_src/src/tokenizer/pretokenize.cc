#include "tokenizer/pretokenize.h"

#include "tokenizer/scan.h"

namespace xllm {
namespace {

// smollm, starcoder: every number by itself, then GPT-2's rules inside what remains.
void split_smollm(std::string_view text, const PieceSink &sink) {
  split_each(text, kNumber, [&](std::string_view part) { split_gpt2(part, sink); });
}

// In the order of the models' release.
constexpr PreTokenizer kPreTokenizers[] = {
    {"gpt-2", split_gpt2},
    {"smollm", split_smollm},
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
