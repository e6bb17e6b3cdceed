// DeepSeek's pre-tokenizers: one pattern after the other, each inside the pieces of the one before.
#include <algorithm>
#include <iterator>

#include "tokenizer/pretokenize.h"
#include "tokenizer/scan.h"

namespace xllm {
namespace {

struct Range {
  uint32_t first;
  uint32_t last;
};

// The letters with case that deepseek-llm names one by one (those of Unicode 11).
constexpr Range kCasedLetters[] = {
    {0x0041, 0x005A},   {0x0061, 0x007A},   {0x00B5, 0x00B5},   {0x00C0, 0x00D6},
    {0x00D8, 0x00F6},   {0x00F8, 0x01BA},   {0x01BC, 0x01BF},   {0x01C4, 0x0293},
    {0x0295, 0x02AF},   {0x0370, 0x0373},   {0x0376, 0x0376},   {0x0377, 0x0377},
    {0x037B, 0x037D},   {0x037F, 0x037F},   {0x0386, 0x0386},   {0x0388, 0x038A},
    {0x038C, 0x038C},   {0x038E, 0x03A1},   {0x03A3, 0x03F5},   {0x03F7, 0x0481},
    {0x048A, 0x052F},   {0x0531, 0x0556},   {0x10A0, 0x10C5},   {0x13A0, 0x13F5},
    {0x13F8, 0x13FD},   {0x1C90, 0x1CBA},   {0x1CBD, 0x1CBF},   {0x1D00, 0x1D2B},
    {0x1D6B, 0x1D77},   {0x1D79, 0x1D9A},   {0x1E00, 0x1F15},   {0x1F18, 0x1F1D},
    {0x1F20, 0x1F45},   {0x1F48, 0x1F4D},   {0x1F50, 0x1F57},   {0x1F59, 0x1F59},
    {0x1F5B, 0x1F5B},   {0x1F5D, 0x1F5D},   {0x1F5F, 0x1F7D},   {0x1F80, 0x1FB4},
    {0x1FB6, 0x1FBC},   {0x1FBE, 0x1FBE},   {0x1FC2, 0x1FC4},   {0x1FC6, 0x1FCC},
    {0x1FD0, 0x1FD3},   {0x1FD6, 0x1FDB},   {0x1FE0, 0x1FEC},   {0x1FF2, 0x1FF4},
    {0x1FF6, 0x1FFC},   {0x2102, 0x2102},   {0x2107, 0x2107},   {0x210A, 0x2113},
    {0x2115, 0x2115},   {0x2119, 0x211D},   {0x2124, 0x2124},   {0x2126, 0x2126},
    {0x2128, 0x2128},   {0x212A, 0x212D},   {0x212F, 0x2134},   {0x2139, 0x2139},
    {0x213C, 0x213F},   {0x2145, 0x2149},   {0x214E, 0x214E},   {0x2183, 0x2183},
    {0x2184, 0x2184},   {0x2C00, 0x2C7B},   {0x2C7E, 0x2CE4},   {0x2CEB, 0x2CEE},
    {0x2CF2, 0x2CF2},   {0x2CF3, 0x2CF3},   {0xA640, 0xA66D},   {0xA680, 0xA69B},
    {0xA722, 0xA76F},   {0xA771, 0xA787},   {0xA78B, 0xA78E},   {0xAB70, 0xABBF},
    {0xFB00, 0xFB06},   {0xFB13, 0xFB17},   {0xFF21, 0xFF3A},   {0xFF41, 0xFF5A},
    {0x10400, 0x1044F}, {0x104B0, 0x104D3}, {0x104D8, 0x104FB}, {0x10C80, 0x10CB2},
    {0x10CC0, 0x10CF2}, {0x118A0, 0x118DF}, {0x1E900, 0x1E943},
};

bool in_ranges(const Range *begin, const Range *end, uint32_t code) {
  const Range *range =
      std::lower_bound(begin, end, code, [](const Range &r, uint32_t c) { return r.last < c; });
  return range != end && range->first <= code;
}

bool is_cased_letter(const Char &c) {
  return in_ranges(std::begin(kCasedLetters), std::end(kCasedLetters), c.code);
}

// ASCII punctuation and symbols, their full-width forms, quotation marks, U+3000 to U+3002.
bool is_mark(const Char &c) {
  constexpr Range kMarks[] = {{'!', '/'},       {':', '~'},       {0x2018, 0x201F},
                              {0x3000, 0x3002}, {0xFF01, 0xFF0F}, {0xFF1A, 0xFF5E}};
  return in_ranges(std::begin(kMarks), std::end(kMarks), c.code);
}

bool is_east_asian(const Char &c) {
  return (c.code >= 0x0800 && c.code <= 0x9FA5) || (c.code >= 0xAC00 && c.code <= 0xD7FF);
}

bool is_cjk_or_kana(const Char &c) {
  return (c.code >= 0x4E00 && c.code <= 0x9FA5) || (c.code >= 0x3040 && c.code <= 0x30FF);
}

// Splits at runs of what accept(Char) holds for, each with one character of white space in front if
// takes_space.
template <typename Accept, typename Sink>
void split_runs(std::string_view text, bool takes_space, const Accept &accept, const Sink &sink) {
  const auto match = [&](std::string_view t, size_t pos) {
    const Char first = char_at(t, pos);
    if (takes_space && first.is(kSpace)) {
      const size_t end = run_end(t, first.end, accept);
      if (end > first.end) return end;
    }
    return run_end(t, pos, accept);
  };
  split_matches(text, match, sink);
}

// \s+$: what white space the text ends with, apart.
template <typename Sink>
void split_trailing_space(std::string_view text, const Sink &sink) {
  size_t begin = text.size();
  for (size_t pos = 0; pos < text.size();) {
    const Char c = char_at(text, pos);
    if (!c.is(kSpace)) {
      begin = text.size();
    } else if (begin == text.size()) {
      begin = pos;
    }
    pos = c.end;
  }
  if (begin > 0) sink(text.substr(0, begin));
  if (begin < text.size()) sink(text.substr(begin));
}

// [ascii punctuation][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|
// \s*[\r\n]+|\s+(?!\S)|\s+
size_t v3_end(std::string_view text, size_t pos) {
  const Char first = char_at(text, pos);
  if (first.code < 0x80 && first.is(kPunctuation | kSymbol)) {
    const size_t end = run_end(text, first.end, [](const Char &c) {
      return (c.code | 0x20) >= 'a' && (c.code | 0x20) <= 'z';
    });
    if (end > first.end) return end;
  }
  if (!first.is(kNewline | kLetter | kPunctuation | kSymbol)) {
    const size_t end = run_of(text, first.end, kLetter | kMark);
    if (end > first.end) return end;
  }
  const size_t word = run_of(text, pos, kLetter | kMark);
  if (word > pos) return word;
  const size_t begin = text[pos] == ' ' ? first.end : pos;
  const size_t end = run_of(text, begin, kPunctuation | kSymbol);
  if (end > begin) return run_of(text, end, kNewline);
  return first.is(kSpace) ? lines_or_spaces_end(text, pos) : pos;
}

// \p{N}{1,3}
size_t up_to_three_numbers(std::string_view text, size_t pos) {
  for (int i = 0; i < 3; ++i) {
    const Char c = char_at(text, pos);
    if (!c.is(kNumber)) break;
    pos = c.end;
  }
  return pos;
}

}  // namespace

void split_deepseek_llm(std::string_view text, const PieceSink &sink) {
  const auto numbers = [&](std::string_view part) { split_each(part, kNumber, sink); };
  const auto cjk = [&](std::string_view part) { split_runs(part, false, is_east_asian, numbers); };
  const auto spaces = [&](std::string_view part) { split_trailing_space(part, cjk); };
  const auto marks = [&](std::string_view part) { split_runs(part, true, is_mark, spaces); };
  const auto letters = [&](std::string_view part) {
    split_runs(part, true, is_cased_letter, marks);
  };
  split_each(text, kNewline, letters);
}

void split_deepseek_coder(std::string_view text, const PieceSink &sink) {
  const auto numbers = [&](std::string_view part) { split_each(part, kNumber, sink); };
  const auto cjk = [&](std::string_view part) { split_runs(part, false, is_east_asian, numbers); };
  const auto marks = [&](std::string_view part) {
    split_runs(part, true, [](const Char &c) { return c.is(kPunctuation); }, cjk);
  };
  const auto letters = [&](std::string_view part) {
    split_runs(part, true, [](const Char &c) { return c.is(kLetter); }, marks);
  };
  split_each(text, kNewline, letters);
}

void split_deepseek_v3(std::string_view text, const PieceSink &sink) {
  const auto words = [&](std::string_view part) { split_matches(part, v3_end, sink); };
  const auto cjk = [&](std::string_view part) { split_runs(part, false, is_cjk_or_kana, words); };
  split_matches(text, up_to_three_numbers, cjk);
}

}  // namespace xllm
