// The pre-tokenizers of Llama 3, Qwen 2 and Mistral's Tekken, descendants of cl100k.
#include "tokenizer/pretokenize.h"
#include "tokenizer/scan.h"

namespace xllm {
namespace {

constexpr uint16_t kWordOrSpace = kSpace | kLetter | kNumber;

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,max_numbers}|
//  ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
size_t word_end(std::string_view text, size_t pos, int max_numbers) {
  size_t end = contraction_end(text, pos, /*any_case=*/true);
  if (end > pos) return end;
  const Char first = char_at(text, pos);
  if (first.is(kLetter)) return run_of(text, first.end, kLetter);
  if (!first.is(kNewline | kNumber) && char_at(text, first.end).is(kLetter)) {
    return run_of(text, first.end, kLetter);
  }
  if (first.is(kNumber)) {
    end = first.end;
    for (int i = 1; i < max_numbers; ++i) {
      const Char next = char_at(text, end);
      if (!next.is(kNumber)) break;
      end = next.end;
    }
    return end;
  }
  end = marks_end(text, pos, kWordOrSpace, [](const Char &c) { return c.is(kNewline); });
  return end > pos ? end : lines_or_spaces_end(text, pos);
}

// U*W+ from pos, where U is UpperLike and W LowerLike; some characters are both. pos if it fails.
size_t lower_word_end(std::string_view text, size_t pos) {
  size_t last_both = pos;  // where the last character that is both ends
  size_t end = pos;
  while (end < text.size()) {
    const Char c = char_at(text, end);
    if (!c.is(kUpperLike)) break;
    end = c.end;
    if (c.is(kLowerLike)) last_both = end;
  }
  // W+ goes on behind the run of U, or takes the last character of the run that it may have.
  const size_t lower = run_of(text, end, kLowerLike);
  return lower > end ? lower : last_both;
}

// [^\r\n\p{L}\p{N}]?U*W+|[^\r\n\p{L}\p{N}]?U+W*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|
// \s+(?!\S)|\s+
size_t tekken_end(std::string_view text, size_t pos) {
  const Char first = char_at(text, pos);
  const bool may_lead = !first.is(kNewline | kLetter | kNumber);
  size_t end = may_lead ? lower_word_end(text, first.end) : pos;
  if (end > first.end) return end;
  end = lower_word_end(text, pos);
  if (end > pos) return end;
  // No W can follow here, or one of the two above had matched.
  end = may_lead ? run_of(text, first.end, kUpperLike) : pos;
  if (end > first.end) return end;
  end = run_of(text, pos, kUpperLike);
  if (end > pos) return end;
  if (first.is(kNumber)) return first.end;
  end = marks_end(text, pos, kWordOrSpace,
                  [](const Char &c) { return c.is(kNewline) || c.code == '/'; });
  return end > pos ? end : lines_or_spaces_end(text, pos);
}

}  // namespace

void split_llama3(std::string_view text, const PieceSink &sink) {
  split_matches(text, [](std::string_view t, size_t pos) { return word_end(t, pos, 3); }, sink);
}

void split_qwen2(std::string_view text, const PieceSink &sink) {
  split_matches(text, [](std::string_view t, size_t pos) { return word_end(t, pos, 1); }, sink);
}

void split_tekken(std::string_view text, const PieceSink &sink) {
  split_matches(text, tekken_end, sink);
}

}  // namespace xllm
