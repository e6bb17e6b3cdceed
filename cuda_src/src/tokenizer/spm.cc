#include "tokenizer/spm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <unordered_map>

#include "base/error.h"
#include "tokenizer/merge.h"
#include "tokenizer/unicode.h"

namespace xllm {
namespace {

// Orders floats as unsigned numbers, the greatest first.
uint32_t descending(float score) {
  const float positive_zero = score + 0.0f;  // -0 and 0 are the same score
  uint32_t bits;
  std::memcpy(&bits, &positive_zero, sizeof bits);
  const uint32_t ascending = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return ~ascending;
}

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581

}  // namespace

SpmModel::SpmModel(const Vocab &vocab, const VocabSource &source)
    : vocab_(vocab), add_space_prefix_(source.add_space_prefix.value_or(true)) {
  if (source.scores.empty()) {
    throw Error(Status::kModelMalformed,
                "tokenizer.ggml.scores: expected one per token, found none");
  }
  if (source.remove_extra_whitespaces.value_or(false)) {
    throw Error(Status::kModelUnsupported,
                "tokenizer.ggml.remove_extra_whitespaces: expected false, found true");
  }
  priorities_.reserve(source.scores.size());
  for (size_t id = 0; id < source.scores.size(); ++id) {
    if (std::isnan(source.scores[id])) {
      throw Error(Status::kModelMalformed, "tokenizer.ggml.scores[" + std::to_string(id) +
                                               "]: expected a number, found NaN");
    }
    priorities_.push_back(descending(source.scores[id]));
  }
  for (int32_t id = 0; id < vocab.num_tokens(); ++id) {
    const TokenType type = vocab.type(id);
    if (type == TokenType::kUnknown && unknown_ < 0) unknown_ = id;
    if (type != TokenType::kControl && type != TokenType::kByte) {
      max_piece_size_ = std::max(max_piece_size_, vocab.piece(id).size());
    }
  }
  if (source.unk) unknown_ = *source.unk;
}

// One text on its way to ids.
class SpmModel::Run {
 public:
  Run(const SpmModel &model, std::string_view text) : model_(model), text_(text) {}

  void encode(std::vector<int32_t> *ids) {
    list_.reserve(text_.size());
    for (size_t pos = 0; pos < text_.size();) {
      const size_t begin = pos;
      next_code_point(text_, &pos);
      list_.append(model_.vocab_.find_text(text_.substr(begin, pos - begin)), pos - begin);
    }
    merge_symbols(&list_, [&](size_t first, size_t second, PairMerge *merge) {
      return look_up(first, second, merge);
    });
    bool was_unknown = false;
    for (size_t i = 0; i < list_.num_places(); i = list_.next(i)) {
      const int32_t id = list_.symbol(i);
      if (id >= 0 && model_.vocab_.type(id) != TokenType::kUnused) {
        ids->push_back(id);
        was_unknown = false;
      } else {
        emit(text_.substr(i, list_.next(i) - i), &was_unknown, ids);
      }
    }
  }

 private:
  bool look_up(size_t first, size_t second, PairMerge *merge) {
    const size_t size = list_.next(second) - first;
    if (size > model_.max_piece_size_) return false;
    const std::string_view piece = text_.substr(first, size);
    const int32_t id = model_.vocab_.find_text(piece);
    if (id < 0) return false;
    if (model_.vocab_.type(id) == TokenType::kUnused) splits_.emplace(piece, second - first);
    *merge = {model_.priorities_[id], id};
    return true;
  }

  // Appends the ids of a piece that is UNUSED or none. UNUSED pieces only served as steps on the
  // way: they fall apart into the pair that first made them.
  void emit(std::string_view whole, bool *was_unknown, std::vector<int32_t> *ids) const {
    std::vector<std::string_view> waiting{whole};
    while (!waiting.empty()) {
      const std::string_view piece = waiting.back();
      waiting.pop_back();
      const int32_t id = model_.vocab_.find_text(piece);
      if (id < 0) {
        emit_unknown(piece, was_unknown, ids);
        continue;
      }
      const auto split =
          model_.vocab_.type(id) == TokenType::kUnused ? splits_.find(piece) : splits_.end();
      if (split != splits_.end()) {
        waiting.push_back(piece.substr(split->second));
        waiting.push_back(piece.substr(0, split->second));
        continue;
      }
      ids->push_back(id);
      *was_unknown = false;
    }
  }

  // A BYTE token for each byte; without them one UNKNOWN token for a run of such characters.
  void emit_unknown(std::string_view piece, bool *was_unknown, std::vector<int32_t> *ids) const {
    const auto byte_token = [&](char c) {
      return model_.vocab_.byte_token(static_cast<unsigned char>(c));
    };
    if (std::all_of(piece.begin(), piece.end(), [&](char c) { return byte_token(c) >= 0; })) {
      for (const char c : piece) ids->push_back(byte_token(c));
      *was_unknown = false;
      return;
    }
    if (!*was_unknown && model_.unknown_ >= 0) ids->push_back(model_.unknown_);
    *was_unknown = true;
  }

  const SpmModel &model_;
  std::string_view text_;
  SymbolList list_;
  std::unordered_map<std::string_view, size_t> splits_;  // UNUSED piece to its left part's size
};

void SpmModel::encode(std::string_view text, bool starts_text, std::vector<int32_t> *ids) const {
  const bool has_mark = text.find(kSpaceMark) != std::string_view::npos;
  const bool has_prefix = starts_text && add_space_prefix_;
  if (!has_mark && !has_prefix) {
    Run(*this, text).encode(ids);
    return;
  }
  std::string spaced(has_prefix ? " " : "");
  spaced.reserve(text.size() + 1);
  while (true) {
    const size_t mark = text.find(kSpaceMark);
    spaced.append(text.substr(0, mark));
    if (mark == std::string_view::npos) break;
    spaced.push_back(' ');
    text.remove_prefix(mark + kSpaceMark.size());
  }
  Run(*this, spaced).encode(ids);
}

}  // namespace xllm
