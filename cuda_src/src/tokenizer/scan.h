// What the pre-tokenizers' scanners are made of: a cursor that looks at one character at a time,
// runs of a class, and the rules that several models share.
#pragma once

#include <cstddef>
#include <string_view>

#include "tokenizer/unicode.h"

namespace xllm {

// One character: its class and where it ends. At the end of the text: class 0, end == begin.
struct Char {
  uint32_t code = 0;
  uint16_t classes = 0;
  size_t end = 0;

  bool is(uint16_t mask) const { return (classes & mask) != 0; }
};

// The character at text[pos].
inline Char char_at(std::string_view text, size_t pos) {
  Char c;
  c.end = pos;
  if (pos >= text.size()) return c;
  c.code = next_code_point(text, &c.end);
  c.classes = char_class(c.code);
  return c;
}

// The end of the longest run from pos of characters for which accept(Char) holds.
template <typename Accept>
size_t run_end(std::string_view text, size_t pos, const Accept &accept) {
  while (pos < text.size()) {
    const Char c = char_at(text, pos);
    if (!accept(c)) break;
    pos = c.end;
  }
  return pos;
}

// Run of characters that have one of the classes in mask.
inline size_t run_of(std::string_view text, size_t pos, uint16_t mask) {
  return run_end(text, pos, [mask](const Char &c) { return c.is(mask); });
}

// Run of characters that have none of the classes in mask.
inline size_t run_without(std::string_view text, size_t pos, uint16_t mask) {
  return run_end(text, pos, [mask](const Char &c) { return !c.is(mask); });
}

// The end of 's 't 're 've 'm 'll or 'd at pos, or pos. any_case: capitals too, and U+017F for s as
// case folding has it.
inline size_t contraction_end(std::string_view text, size_t pos, bool any_case) {
  if (pos + 1 >= text.size() || text[pos] != '\'') return pos;
  const auto letter = [&](size_t i) -> char {
    if (i >= text.size()) return 0;
    const char c = text[i];
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
  };
  const char first = letter(pos + 1);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return pos + 2;
  if (any_case && text.compare(pos + 1, 2, "\xC5\xBF") == 0) return pos + 3;
  const char second = letter(pos + 2);
  if ((first == 'r' || first == 'v') && second == 'e') return pos + 3;
  return first == 'l' && second == 'l' ? pos + 3 : pos;
}

// \s+(?!\S)|\s+ from pos, where white space stands: the whole run at the end of the text, else all
// of it but its last character, which goes to the word behind; at least one character.
inline size_t spaces_end(std::string_view text, size_t pos) {
  size_t last = pos;
  size_t end = pos;
  while (end < text.size()) {
    const Char c = char_at(text, end);
    if (!c.is(kSpace)) return last > pos ? last : end;
    last = end;
    end = c.end;
  }
  return end;
}

// Gives each character of a class in mask by itself, and what lies between in one piece each.
template <typename Sink>
void split_each(std::string_view text, uint16_t mask, const Sink &sink) {
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const Char c = char_at(text, pos);
    if (c.is(mask)) {
      if (pos > begin) sink(text.substr(begin, pos - begin));
      sink(text.substr(pos, c.end - pos));
      begin = c.end;
    }
    pos = c.end;
  }
  if (begin < text.size()) sink(text.substr(begin));
}

// Gives what match(text, pos) accepts, a non-empty stretch from pos to the end it returns, and what
// lies between two such stretches. match returns pos where nothing begins.
template <typename Match, typename Sink>
void split_matches(std::string_view text, const Match &match, const Sink &sink) {
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const size_t end = match(text, pos);
    if (end == pos) {
      pos = char_at(text, pos).end;
      continue;
    }
    if (pos > begin) sink(text.substr(begin, pos - begin));
    sink(text.substr(pos, end - pos));
    begin = pos = end;
  }
  if (begin < text.size()) sink(text.substr(begin));
}

// \s*[\r\n]+|\s+(?!\S)|\s+ from pos: up to the last line break of a run of white space, else as
// spaces_end. pos where no white space stands.
inline size_t lines_or_spaces_end(std::string_view text, size_t pos) {
  size_t line_end = pos;
  for (size_t end = pos; end < text.size();) {
    const Char c = char_at(text, end);
    if (!c.is(kSpace)) break;
    end = c.end;
    if (c.is(kNewline)) line_end = end;
  }
  return line_end > pos ? line_end : spaces_end(text, pos);
}

// A space or nothing, then characters that have none of the classes in `without`, then those that
// tail(Char) accepts: ` ?[^...]+[...]*`; pos if there are none.
template <typename Tail>
size_t marks_end(std::string_view text, size_t pos, uint16_t without, const Tail &tail) {
  const size_t begin = text[pos] == ' ' ? pos + 1 : pos;
  const size_t end = run_without(text, begin, without);
  return end > begin ? run_end(text, end, tail) : pos;
}

// GPT-2: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
template <typename Sink>
void split_gpt2(std::string_view text, const Sink &sink) {
  for (size_t pos = 0; pos < text.size();) {
    size_t end = contraction_end(text, pos, /*any_case=*/false);
    if (end == pos) {
      const size_t word = text[pos] == ' ' ? pos + 1 : pos;
      const Char c = char_at(text, word);
      if (word == text.size() || c.is(kSpace)) {
        end = spaces_end(text, pos);
      } else if (c.is(kLetter)) {
        end = run_of(text, word, kLetter);
      } else if (c.is(kNumber)) {
        end = run_of(text, word, kNumber);
      } else {
        end = run_without(text, word, kSpace | kLetter | kNumber);
      }
    }
    sink(text.substr(pos, end - pos));
    pos = end;
  }
}

}  // namespace xllm
