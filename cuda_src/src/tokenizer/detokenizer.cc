#include "tokenizer/detokenizer.h"

#include <string_view>

#include "base/error.h"
#include "tokenizer/unicode.h"

namespace xllm {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// The bytes of `text` from pos on that begin a well-formed sequence: all of it when whole, else its
// longest prefix that some continuation would make whole (the maximal subpart). 0: none.
struct Sequence {
  size_t size = 0;
  bool is_whole = false;
  bool may_continue = false;  // the text ends inside it
};

Sequence sequence_at(std::string_view text, size_t pos) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[pos + i]); };
  Sequence sequence;
  const auto length = static_cast<size_t>(utf8_length(byte(0)));
  if (length == 0) return sequence;
  const unsigned char lead = byte(0);
  for (sequence.size = 1; sequence.size < length; ++sequence.size) {
    if (pos + sequence.size == text.size()) {
      sequence.may_continue = true;
      return sequence;
    }
    unsigned char low = 0x80;
    unsigned char high = 0xBF;
    if (sequence.size == 1) {
      low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
      high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    }
    const unsigned char next = byte(sequence.size);
    if (next < low || next > high) return sequence;
  }
  sequence.is_whole = true;
  return sequence;
}

}  // namespace

Detokenizer::Detokenizer(const Tokenizer &tokenizer, const DecodeOptions &options)
    : tokenizer_(&tokenizer), options_(options) {}

std::string Detokenizer::feed(int32_t id) {
  if (id < 0 || id >= tokenizer_->vocab_size()) {
    throw Error(Status::kInvalidArgument, "token id " + std::to_string(id) + ": expected 0 to " +
                                              std::to_string(tokenizer_->vocab_size() - 1));
  }
  std::string_view piece = tokenizer_->token_bytes(id);
  switch (tokenizer_->token_type(id)) {
    case TokenType::kControl:
    case TokenType::kUnknown:
      if (!options_.render_special) return {};
      break;
    case TokenType::kUnused:
      return {};
    default:
      if (at_start_ && !options_.is_continuation && tokenizer_->has_space_prefix() &&
          tokenizer_->token_type(id) != TokenType::kByte && !piece.empty() && piece[0] == ' ') {
        piece.remove_prefix(1);
      }
      at_start_ = false;
  }

  std::string bytes(pending_, num_pending_);
  bytes += piece;
  num_pending_ = 0;
  std::string text;
  text.reserve(bytes.size());
  for (size_t pos = 0; pos < bytes.size();) {
    const Sequence sequence = sequence_at(bytes, pos);
    if (sequence.is_whole) {
      text.append(bytes, pos, sequence.size);
    } else if (sequence.may_continue) {
      num_pending_ = bytes.copy(pending_, sizeof pending_, pos);
    } else {
      text += kReplacement;
    }
    pos += sequence.size > 0 ? sequence.size : 1;
  }
  return text;
}

std::string Detokenizer::flush() {
  std::string text(num_pending_ > 0 ? kReplacement : std::string_view());
  num_pending_ = 0;
  at_start_ = true;
  return text;
}

}  // namespace xllm
