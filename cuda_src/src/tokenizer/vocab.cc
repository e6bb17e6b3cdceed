#include "tokenizer/vocab.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "base/error.h"
#include "tokenizer/end_of_generation.h"
#include "tokenizer/unicode.h"

namespace xllm {
namespace {

// GPT-2's alphabet writes printable Latin-1 bytes as themselves and the other 68, in ascending
// order, as U+0100 and up. Entry: the byte of a code point below 0x144, or -1.
constexpr int kAlphabetSize = 0x144;

std::array<int16_t, kAlphabetSize> make_alphabet() {
  std::array<int16_t, kAlphabetSize> byte_of;
  byte_of.fill(-1);
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    byte_of[printable ? byte : next++] = static_cast<int16_t>(byte);
  }
  return byte_of;
}

// The byte of a name like <0x0A>, or -1.
int byte_of_name(std::string_view name) {
  if (name.size() != 6 || name.substr(0, 3) != "<0x" || name[5] != '>') return -1;
  int value = 0;
  for (const char c : name.substr(3, 2)) {
    int digit = 0;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (c >= 'A' && c <= 'F') {
      digit = c - 'A' + 10;
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else {
      return -1;
    }
    value = value * 16 + digit;
  }
  return value;
}

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581

void append_unescaped(std::string_view piece, std::string *out) {
  while (true) {
    const size_t mark = piece.find(kSpaceMark);
    out->append(piece.substr(0, mark));
    if (mark == std::string_view::npos) return;
    out->push_back(' ');
    piece.remove_prefix(mark + kSpaceMark.size());
  }
}

Error malformed(std::string message) { return Error(Status::kModelMalformed, std::move(message)); }

void check_length(const char *key, size_t size, size_t num_tokens) {
  if (size == 0 || size == num_tokens) return;
  throw malformed(std::string(key) + ": expected " + std::to_string(num_tokens) +
                  " values, one per token, found " + std::to_string(size));
}

bool is_special(TokenType type) {
  return type == TokenType::kControl || type == TokenType::kUserDefined ||
         type == TokenType::kUnknown;
}

}  // namespace

bool append_alphabet_bytes(std::string_view piece, std::string *out) {
  static const std::array<int16_t, kAlphabetSize> byte_of = make_alphabet();
  bool pure = true;
  for (size_t pos = 0; pos < piece.size();) {
    if (piece[pos] > ' ' && piece[pos] < 0x7F) {  // stands for itself
      out->push_back(piece[pos++]);
      continue;
    }
    const size_t begin = pos;
    const uint32_t code = next_code_point(piece, &pos);
    if (code < kAlphabetSize && byte_of[code] >= 0) {
      out->push_back(static_cast<char>(byte_of[code]));
    } else {
      out->append(piece.substr(begin, pos - begin));
      pure = false;
    }
  }
  return pure;
}

Vocab::Vocab(const VocabSource &source) : seed_(random_seed()) {
  const size_t num_tokens = source.tokens.size();
  check_length("tokenizer.ggml.scores", source.scores.size(), num_tokens);
  check_length("tokenizer.ggml.token_type", source.types.size(), num_tokens);
  size_t total_bytes = 0;
  for (const std::string_view token : source.tokens) total_bytes += token.size();
  if (num_tokens > std::numeric_limits<int32_t>::max() / 4 ||
      total_bytes > std::numeric_limits<uint32_t>::max()) {
    throw malformed("tokenizer.ggml.tokens: " + std::to_string(num_tokens) + " tokens of " +
                    std::to_string(total_bytes) + " bytes are more than a vocabulary can hold");
  }
  num_rows_ = source.num_rows > 0 ? source.num_rows : static_cast<int32_t>(num_tokens);
  if (static_cast<size_t>(num_rows_) < num_tokens) {
    throw malformed("tokenizer.ggml.tokens: expected at most " + std::to_string(num_rows_) +
                    " tokens, the rows of the embedding, found " + std::to_string(num_tokens));
  }

  bytes_.reserve(total_bytes);
  offsets_.reserve(num_tokens + 1);
  offsets_.push_back(0);
  types_.reserve(num_tokens);
  size_t num_special = 0;
  for (const int32_t type : source.types) num_special += is_special(static_cast<TokenType>(type));
  text_index_.resize(num_slots_for(num_tokens));
  special_index_.resize(num_slots_for(num_special));
  is_text_.assign(num_tokens, false);
  std::fill(std::begin(byte_tokens_), std::end(byte_tokens_), -1);

  // Where several tokens have the same bytes, the text becomes the one inserted first.
  for (size_t i = 0; i < num_tokens; ++i) add_token(source, i);
  for (int32_t id = 0; id < this->num_tokens(); ++id) {
    if (types_[id] == TokenType::kUserDefined) is_text_[id] = insert(id, &text_index_);
    if (types_[id] != TokenType::kUnused) ++num_choosable_;
  }
  if (source.model == "llama") {  // SentencePiece merges through UNUSED pieces and undoes it
    for (int32_t id = 0; id < this->num_tokens(); ++id) {
      if (types_[id] == TokenType::kUnused) is_text_[id] = insert(id, &text_index_);
    }
  } else {
    for (int byte = 0; byte < 256; ++byte) {
      const char c = static_cast<char>(byte);
      byte_tokens_[byte] = find_text(std::string_view(&c, 1));
    }
  }
}

void Vocab::add_token(const VocabSource &source, size_t index) {
  const auto id = static_cast<int32_t>(index);
  const std::string_view token = source.tokens[index];
  const int32_t stored = source.types.empty() ? 1 : source.types[index];
  if (stored < 0 || stored > static_cast<int32_t>(TokenType::kByte)) {
    throw malformed("tokenizer.ggml.token_type[" + std::to_string(index) +
                    "]: expected a value from 0 to 6, found " + std::to_string(stored));
  }
  auto type = static_cast<TokenType>(stored);
  // Written out in a text, a USER_DEFINED token always matches: one that ends a turn must not.
  if (type == TokenType::kUserDefined && is_end_name(token)) type = TokenType::kControl;
  const bool is_sentencepiece = source.model == "llama";
  // Text becomes only what the model's own alphabet spells: no raw space in SentencePiece.
  bool is_spelled = find_invalid_utf8(token) == token.size();
  if (type == TokenType::kByte && is_sentencepiece) {
    const int byte = byte_of_name(token);
    if (byte < 0) {
      throw malformed("tokenizer.ggml.tokens[" + std::to_string(index) +
                      "]: expected a byte like <0x0A>, found " + std::string(token));
    }
    bytes_.push_back(static_cast<char>(byte));
    if (byte_tokens_[byte] < 0) byte_tokens_[byte] = id;
  } else if (type == TokenType::kControl || type == TokenType::kUnknown) {
    bytes_.append(token);
  } else if (is_sentencepiece) {
    is_spelled = is_spelled && token.find(' ') == std::string_view::npos;
    append_unescaped(token, &bytes_);
  } else if (type == TokenType::kUserDefined || !is_spelled) {
    bytes_.append(token);
  } else {
    is_spelled = append_alphabet_bytes(token, &bytes_);
  }
  offsets_.push_back(static_cast<uint32_t>(bytes_.size()));
  types_.push_back(type);

  if (is_special(type)) {
    insert(id, &special_index_);
  } else if (is_spelled && (type == TokenType::kNormal || type == TokenType::kUndefined)) {
    is_text_[id] = insert(id, &text_index_);
  }
}

size_t Vocab::find_slot(std::string_view bytes, uint64_t hash, const Index &index) const {
  const size_t mask = index.size() - 1;
  const auto tag = static_cast<uint32_t>(hash >> 32);
  size_t i = hash & mask;
  while (index[i].id >= 0 && (index[i].tag != tag || piece(index[i].id) != bytes)) {
    i = (i + 1) & mask;
  }
  return i;
}

int32_t Vocab::find(std::string_view bytes, const Index &index) const {
  return index[find_slot(bytes, hash_bytes(bytes, seed_), index)].id;
}

bool Vocab::insert(int32_t id, Index *index) {
  const std::string_view bytes = piece(id);
  const uint64_t hash = hash_bytes(bytes, seed_);
  Slot &slot = (*index)[find_slot(bytes, hash, *index)];
  if (slot.id >= 0) return false;
  slot = {static_cast<uint32_t>(hash >> 32), id};
  return true;
}

size_t Vocab::memory_bytes() const {
  return bytes_.capacity() + offsets_.capacity() * sizeof(uint32_t) +
         types_.capacity() * sizeof(TokenType) + is_text_.capacity() / 8 +
         (text_index_.capacity() + special_index_.capacity()) * sizeof(Slot);
}

}  // namespace xllm
