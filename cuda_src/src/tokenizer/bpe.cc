#include "tokenizer/bpe.h"

#include <limits>

#include "base/error.h"
#include "tokenizer/merge.h"
#include "tokenizer/nfc.h"
#include "tokenizer/unicode.h"

namespace xllm {
namespace {

// Pieces of up to this many bytes, nearly all of them, are merged in place by scanning for the best
// pair: quadratic, but without any allocation.
constexpr size_t kShortPiece = 48;
constexpr int32_t kNoMerge = std::numeric_limits<int32_t>::max();

}  // namespace

BpeModel::BpeModel(const Vocab &vocab, const VocabSource &source, const PreTokenizer &pre)
    : vocab_(vocab), pre_(pre), merges_(source.merges.size()) {
  std::string bytes;
  int32_t guess = -1;  // vocabularies list the merged symbols in the order of their merges
  for (size_t rank = 0; rank < source.merges.size(); ++rank) {
    const std::string_view merge = source.merges[rank];
    // The alphabet has no space, but a symbol may begin with one in a file that was not mapped.
    const size_t gap = merge.empty() ? std::string_view::npos : merge.find(' ', 1);
    if (gap == std::string_view::npos || gap + 1 == merge.size()) {
      throw Error(Status::kModelMalformed, "tokenizer.ggml.merges[" + std::to_string(rank) +
                                               "]: expected two symbols and a space between them, "
                                               "found \"" +
                                               std::string(merge) + "\"");
    }
    // A merge of characters outside the alphabet can never meet a text's bytes.
    if (find_invalid_utf8(merge) != merge.size()) continue;
    bytes.clear();
    if (!append_alphabet_bytes(merge.substr(0, gap), &bytes)) continue;
    const size_t left_size = bytes.size();
    if (!append_alphabet_bytes(merge.substr(gap + 1), &bytes)) continue;
    const std::string_view both = bytes;
    const int32_t left = symbol_of(both.substr(0, left_size));
    const int32_t right = symbol_of(both.substr(left_size));
    const int32_t merged = symbol_of(both, guess);
    merges_.insert(left, right, {static_cast<int32_t>(rank), merged});
    guess = merged + 1;
  }
}

int32_t BpeModel::symbol_of(std::string_view bytes, int32_t guess) {
  const int32_t id = vocab_.find_text(bytes, guess);
  if (id >= 0) return id;
  const auto next = static_cast<int32_t>(vocab_.num_tokens() + virtual_symbols_.size());
  const auto [entry, inserted] = virtual_ids_.emplace(bytes, next);
  if (inserted) virtual_symbols_.emplace_back(bytes);
  return entry->second;
}

void BpeModel::encode(std::string_view text, bool /*starts_text*/,
                      std::vector<int32_t> *ids) const {
  std::string normalized;
  if (pre_.normalizes_nfc && !is_trivially_nfc(text)) {
    normalized = to_nfc(text);
    text = normalized;
  }
  pre_.split(text, [&](std::string_view piece) { encode_piece(piece, ids); });
}

void BpeModel::encode_piece(std::string_view piece, std::vector<int32_t> *ids) const {
  if (pre_.ignores_merges) {
    const int32_t id = vocab_.find_text(piece);
    if (id >= 0) {
      ids->push_back(id);
      return;
    }
  }
  if (piece.size() <= kShortPiece) {
    encode_short(piece, ids);
  } else {
    encode_long(piece, ids);
  }
}

void BpeModel::encode_short(std::string_view piece, std::vector<int32_t> *ids) const {
  int32_t symbols[kShortPiece];
  Merge merges[kShortPiece];  // of symbols i and i + 1
  size_t count = 0;
  for (const char c : piece) {
    const int32_t id = vocab_.byte_token(static_cast<unsigned char>(c));
    if (id >= 0) symbols[count++] = id;
  }
  const auto look_up = [&](size_t i) {
    const Merge *merge = i + 1 < count ? merges_.find(symbols[i], symbols[i + 1]) : nullptr;
    merges[i] = merge != nullptr ? *merge : Merge{kNoMerge, 0};
  };
  for (size_t i = 0; i < count; ++i) look_up(i);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (merges[i].rank < merges[best].rank) best = i;
    }
    if (merges[best].rank == kNoMerge) break;
    symbols[best] = merges[best].symbol;
    --count;
    for (size_t i = best + 1; i < count; ++i) {
      symbols[i] = symbols[i + 1];
      merges[i] = merges[i + 1];
    }
    look_up(best);
    if (best > 0) look_up(best - 1);
  }
  for (size_t i = 0; i < count; ++i) emit(symbols[i], ids);
}

void BpeModel::encode_long(std::string_view piece, std::vector<int32_t> *ids) const {
  SymbolList list;
  list.reserve(piece.size());
  for (const char c : piece) {
    const int32_t id = vocab_.byte_token(static_cast<unsigned char>(c));
    if (id >= 0) list.append(id, 1);
  }
  merge_symbols(&list, [&](size_t first, size_t second, PairMerge *out) {
    const Merge *merge = merges_.find(list.symbol(first), list.symbol(second));
    if (merge == nullptr) return false;
    *out = {static_cast<uint32_t>(merge->rank), merge->symbol};
    return true;
  });
  for (size_t i = 0; i < list.num_places(); i = list.next(i)) emit(list.symbol(i), ids);
}

void BpeModel::emit(int32_t symbol, std::vector<int32_t> *ids) const {
  if (symbol < vocab_.num_tokens()) {
    ids->push_back(symbol);
    return;
  }
  for (const char c : virtual_symbols_[symbol - vocab_.num_tokens()]) {
    const int32_t id = vocab_.byte_token(static_cast<unsigned char>(c));
    if (id >= 0) ids->push_back(id);
  }
}

}  // namespace xllm
