// UTF-8 and the character classes that pre-tokenizers ask for (Unicode 16.0).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace xllm {

// The offset of the first byte that is not part of well-formed UTF-8 (Unicode, table 3-7), or
// text.size() when all of it is.
size_t find_invalid_utf8(std::string_view text);

// How many bytes the UTF-8 sequence that `lead` begins has; 0 if it begins none.
inline int utf8_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return 2;
  if (lead < 0xF0) return 3;
  return lead < 0xF5 ? 4 : 0;
}

// Decodes the code point at text[pos], which must be well-formed, and moves pos behind it.
inline uint32_t next_code_point(std::string_view text, size_t *pos) {
  const auto byte = [&](size_t i) {
    return static_cast<uint32_t>(static_cast<unsigned char>(text[*pos + i]));
  };
  const uint32_t lead = byte(0);
  if (lead < 0x80) {
    *pos += 1;
    return lead;
  }
  uint32_t code;
  if (lead < 0xE0) {
    code = (lead & 0x1F) << 6 | (byte(1) & 0x3F);
    *pos += 2;
  } else if (lead < 0xF0) {
    code = (lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    *pos += 3;
  } else {
    code = (lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
    *pos += 4;
  }
  return code;
}

// Appends the UTF-8 form of a code point (no surrogate).
void append_utf8(uint32_t code, std::string *out);

// Bits of a character's class.
enum CharClass : uint16_t {
  kLetter = 1,               // \p{L}
  kNumber = 2,               // \p{N}
  kMark = 4,                 // \p{M}
  kPunctuation = 8,          // \p{P}
  kSymbol = 16,              // \p{S}
  kSpace = 32,               // \s, White_Space
  kNewline = 64,             // \r or \n
  kUpperLike = 128,          // Lu Lt Lm Lo M
  kLowerLike = 256,          // Ll Lm Lo M
  kFalconPunctuation = 512,  // \p{P} of Unicode 8.0
};

// The class bits of a code point below 0x110000.
uint16_t char_class(uint32_t code);

}  // namespace xllm
