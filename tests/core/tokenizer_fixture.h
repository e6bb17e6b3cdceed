// Small vocabularies for the tokenizer's tests and fuzzer, in the form a model file has them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/tokenizer.h"
#include "tokenizer/unicode.h"

namespace xllm {

// GPT-2's byte alphabet, written here a second time from its description: printable Latin-1 bytes
// stand for themselves, the other 68 follow from U+0100 on.
inline std::string to_alphabet(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    uint32_t code = byte;
    if (byte <= 0x20) code = 0x100 + byte;
    if (byte >= 0x7F && byte <= 0xA0) code = 0x121 + (byte - 0x7F);
    if (byte == 0xAD) code = 0x143;
    append_utf8(code, &out);
  }
  return out;
}

// Builds a VocabSource that owns its strings.
class VocabBuilder {
 public:
  VocabSource source;

  explicit VocabBuilder(const std::string &model, std::optional<std::string> pre = std::nullopt) {
    source.model = model;
    source.pre = std::move(pre);
  }

  int32_t add(const std::string &token, TokenType type = TokenType::kNormal, float score = 0) {
    tokens_.push_back(token);
    types_.push_back(static_cast<int32_t>(type));
    scores_.push_back(score);
    return static_cast<int32_t>(tokens_.size()) - 1;
  }

  // gpt2: the 256 single bytes, ids 0 to 255 in byte order.
  VocabBuilder &add_bytes() {
    for (int byte = 0; byte < 256; ++byte)
      add(to_alphabet(std::string(1, static_cast<char>(byte))));
    return *this;
  }

  // gpt2: a merge of raw bytes and the token it makes; returns the token's id.
  int32_t add_merge(const std::string &left, const std::string &right) {
    add_merge_only(left, right);
    return add(to_alphabet(left + right));
  }
  void add_merge_only(const std::string &left, const std::string &right) {
    merges_.push_back(to_alphabet(left) + " " + to_alphabet(right));
  }
  void add_raw_merge(const std::string &merge) { merges_.push_back(merge); }

  // llama: <0x00> to <0xFF>.
  VocabBuilder &add_byte_names() {
    static constexpr char kDigits[] = "0123456789ABCDEF";
    for (int byte = 0; byte < 256; ++byte) {
      add(std::string("<0x") + kDigits[byte / 16] + kDigits[byte % 16] + ">", TokenType::kByte);
    }
    return *this;
  }

  std::unique_ptr<Tokenizer> create() {
    source.tokens.assign(tokens_.begin(), tokens_.end());
    source.merges.assign(merges_.begin(), merges_.end());
    source.types = types_;
    source.scores = scores_;
    return Tokenizer::create(source);
  }

 private:
  std::vector<std::string> tokens_;
  std::vector<std::string> merges_;
  std::vector<int32_t> types_;
  std::vector<float> scores_;
};

}  // namespace xllm
