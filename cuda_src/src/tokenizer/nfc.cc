#include "tokenizer/nfc.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tokenizer/flat_map.h"
#include "tokenizer/unicode.h"
#include "tokenizer/unicode_tables.h"

namespace xllm {
namespace {

// Hangul syllables are arithmetic (Unicode, section 3.12).
constexpr uint32_t kSyllables = 0xAC00, kLeads = 0x1100, kVowels = 0x1161, kTails = 0x11A7;
constexpr uint32_t kNumLeads = 19, kNumVowels = 21, kNumTails = 28;
constexpr uint32_t kNumSyllables = kNumLeads * kNumVowels * kNumTails;

uint8_t combining_class(uint32_t code) {
  const uint32_t *end = kCombiningRanges + kCombiningRangesSize;
  return *(std::upper_bound(kCombiningRanges, end, code << 8 | 0xFF) - 1) & 0xFF;
}

// A code point and its combining class.
struct Mark {
  uint32_t code;
  uint8_t combining;
};

// Appends the full canonical decomposition of code. Only the first part of a mapping can go on
// decomposing, so the second parts wait in a row.
void decompose(uint32_t code, std::vector<Mark> *out) {
  if (code - kSyllables < kNumSyllables) {
    const uint32_t index = code - kSyllables;
    out->push_back({kLeads + index / (kNumVowels * kNumTails), 0});
    out->push_back({kVowels + index / kNumTails % kNumVowels, 0});
    if (index % kNumTails != 0) out->push_back({kTails + index % kNumTails, 0});
    return;
  }
  constexpr uint64_t kCodeMask = 0x1FFFFF;
  uint32_t seconds[8];  // mappings are at most 4 deep
  int num_seconds = 0;
  const uint64_t *end = kDecompositions + kDecompositionsSize;
  while (code >= 0xC0 && num_seconds < 8) {
    const uint64_t *entry =
        std::lower_bound(kDecompositions, end, code,
                         [](uint64_t e, uint32_t c) { return (e >> 42 & kCodeMask) < c; });
    if (entry == end || (*entry >> 42 & kCodeMask) != code) break;
    const auto second = static_cast<uint32_t>(*entry & kCodeMask);
    if (second != 0) seconds[num_seconds++] = second;
    code = static_cast<uint32_t>(*entry >> 21 & kCodeMask);
  }
  out->push_back({code, combining_class(code)});
  while (num_seconds > 0) {
    const uint32_t second = seconds[--num_seconds];
    out->push_back({second, combining_class(second)});
  }
}

PairMap<uint32_t> make_compositions() {
  PairMap<uint32_t> map(kDecompositionsSize);
  for (size_t i = 0; i < kDecompositionsSize; ++i) {
    const uint64_t entry = kDecompositions[i];
    if (entry >> 63 == 0) continue;
    map.insert(entry >> 21 & 0x1FFFFF, entry & 0x1FFFFF, entry >> 42 & 0x1FFFFF);
  }
  return map;
}

// The character that the pair composes to, or 0.
uint32_t compose(uint32_t first, uint32_t second) {
  if (first - kLeads < kNumLeads && second - kVowels < kNumVowels) {
    return kSyllables + ((first - kLeads) * kNumVowels + second - kVowels) * kNumTails;
  }
  if (first - kSyllables < kNumSyllables && (first - kSyllables) % kNumTails == 0 &&
      second > kTails && second < kTails + kNumTails) {
    return first + second - kTails;
  }
  static const PairMap<uint32_t> compositions = make_compositions();
  const uint32_t *composed = compositions.find(first, second);
  return composed != nullptr ? *composed : 0;
}

// Brings each run of marks into canonical order, then composes: a character joins the last starter
// unless one kept between them has class 0 or at least its own.
void reorder_and_compose(std::vector<Mark> *marks) {
  const auto is_mark = [](const Mark &m) { return m.combining != 0; };
  for (auto it = marks->begin(); it != marks->end();) {
    const auto begin = std::find_if(it, marks->end(), is_mark);
    it = std::find_if_not(begin, marks->end(), is_mark);
    std::stable_sort(begin, it,
                     [](const Mark &a, const Mark &b) { return a.combining < b.combining; });
  }
  size_t out = 0;
  size_t starter = marks->size();  // none yet
  for (const Mark mark : *marks) {
    if (starter < out && (out == starter + 1 || (*marks)[out - 1].combining < mark.combining)) {
      const uint32_t composed = compose((*marks)[starter].code, mark.code);
      if (composed != 0) {
        (*marks)[starter].code = composed;
        continue;
      }
    }
    if (mark.combining == 0) starter = out;
    (*marks)[out++] = mark;
  }
  marks->resize(out);
}

// U+0300 is CC 80: below it, lead bytes are at most CB.
bool is_low(char c) { return static_cast<unsigned char>(c) < 0xCC; }

}  // namespace

bool is_trivially_nfc(std::string_view text) {
  return std::all_of(text.begin(), text.end(), is_low);
}

std::string to_nfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::vector<Mark> marks;
  // A character below U+0300 never joins what stands before it, so the text falls into parts that
  // begin with one; parts of one such character stay as they are.
  for (size_t pos = 0; pos < text.size();) {
    const size_t begin = pos;
    next_code_point(text, &pos);
    if (is_low(text[begin]) && (pos == text.size() || is_low(text[pos]))) {
      out.append(text.substr(begin, pos - begin));
      continue;
    }
    marks.clear();
    for (pos = begin; pos < text.size() && (pos == begin || !is_low(text[pos]));) {
      decompose(next_code_point(text, &pos), &marks);
    }
    reorder_and_compose(&marks);
    for (const Mark &mark : marks) append_utf8(mark.code, &out);
  }
  return out;
}

}  // namespace xllm
