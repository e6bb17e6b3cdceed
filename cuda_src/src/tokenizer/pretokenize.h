// Pre-tokenizers: where a text may be cut before merging. Each is a hand-written scanner that gives
// the pieces its model's regular expressions give, in time linear in the text.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace xllm {

// Called with each piece, left to right; the pieces joined are the text.
using PieceSink = std::function<void(std::string_view)>;

struct PreTokenizer {
  std::string_view name;                                        // value of tokenizer.ggml.pre
  void (*split)(std::string_view text, const PieceSink &sink);  // text: well-formed UTF-8
  bool normalizes_nfc = false;                                  // the text is brought to NFC first
  bool ignores_merges = false;  // a piece that is a token is taken whole, before any merge
  bool adds_bos = false;        // the family's default where the file has no add_bos_token
};

// Null if the name is unknown.
const PreTokenizer *find_pre_tokenizer(std::string_view name);

// The names that find_pre_tokenizer knows, separated by ", ".
std::string pre_tokenizer_names();

// The splitters, by the model family that they were made for.
void split_gpt2_text(std::string_view text, const PieceSink &sink);
void split_smollm(std::string_view text, const PieceSink &sink);
void split_falcon(std::string_view text, const PieceSink &sink);
void split_llama3(std::string_view text, const PieceSink &sink);
void split_qwen2(std::string_view text, const PieceSink &sink);
void split_tekken(std::string_view text, const PieceSink &sink);
void split_deepseek_llm(std::string_view text, const PieceSink &sink);
void split_deepseek_coder(std::string_view text, const PieceSink &sink);
void split_deepseek_v3(std::string_view text, const PieceSink &sink);

}  // namespace xllm
