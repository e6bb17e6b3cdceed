// The pre-tokenizers that build on GPT-2's pattern.
#include "tokenizer/pretokenize.h"
#include "tokenizer/scan.h"

namespace xllm {
namespace {

// Falcon's punctuation: \p{P} as it once was, and the symbols of ASCII.
bool is_falcon_punctuation(const Char &c) {
  return c.is(kFalconPunctuation) || (c.code < 0x80 && c.is(kSymbol));
}

// Falcon looks for digits after the bytes were written in GPT-2's alphabet, where these bytes, also
// as parts of longer characters, look like the numbers of Latin-1: superscripts and fractions.
bool is_number_byte(unsigned char byte) {
  return (byte >= '0' && byte <= '9') || byte == 0xB2 || byte == 0xB3 || byte == 0xB9 ||
         (byte >= 0xBC && byte <= 0xBE);
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Three ASCII digits at a time inside a run of number bytes: [0-9][0-9][0-9].
void split_triples(std::string_view run, const PieceSink &sink) {
  size_t begin = 0;
  for (size_t pos = 0; pos + 3 <= run.size();) {
    if (!is_digit(run[pos]) || !is_digit(run[pos + 1]) || !is_digit(run[pos + 2])) {
      ++pos;
      continue;
    }
    if (pos > begin) sink(run.substr(begin, pos - begin));
    sink(run.substr(pos, 3));
    begin = pos += 3;
  }
  if (begin < run.size()) sink(run.substr(begin));
}

void split_number_bytes(std::string_view piece, const PieceSink &sink) {
  for (size_t begin = 0, end = 0; begin < piece.size(); begin = end) {
    const bool is_number = is_number_byte(static_cast<unsigned char>(piece[begin]));
    while (end < piece.size() &&
           is_number_byte(static_cast<unsigned char>(piece[end])) == is_number) {
      ++end;
    }
    split_triples(piece.substr(begin, end - begin), sink);
  }
}

}  // namespace

void split_gpt2_text(std::string_view text, const PieceSink &sink) { split_gpt2(text, sink); }

// Every number by itself, then GPT-2's pattern inside what remains.
void split_smollm(std::string_view text, const PieceSink &sink) {
  split_each(text, kNumber, [&](std::string_view part) { split_gpt2(part, sink); });
}

void split_falcon(std::string_view text, const PieceSink &sink) {
  const auto punctuation_end = [](std::string_view t, size_t pos) {
    return run_end(t, pos, is_falcon_punctuation);
  };
  split_matches(text, punctuation_end, [&](std::string_view part) {
    split_gpt2(part, [&](std::string_view piece) { split_number_bytes(piece, sink); });
  });
}

}  // namespace xllm
