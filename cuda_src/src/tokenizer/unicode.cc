#include "tokenizer/unicode.h"

#include <algorithm>
#include <vector>

#include "tokenizer/unicode_tables.h"

namespace xllm {
namespace {

constexpr uint32_t kNumCodePoints = 0x110000;

// White_Space: unchanged since Unicode 6.3.
bool is_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

uint16_t category_class(uint8_t category) {
  switch (category) {
    case kLu:
    case kLt:
      return kLetter | kUpperLike;
    case kLl:
      return kLetter | kLowerLike;
    case kLm:
    case kLo:
      return kLetter | kUpperLike | kLowerLike;
    case kMc:
    case kMe:
    case kMn:
      return kMark | kUpperLike | kLowerLike;
    default:
      if (category >= kNd && category <= kNo) return kNumber;
      if (category >= kPc && category <= kPs) return kPunctuation;
      if (category >= kSc && category <= kSo) return kSymbol;
      return 0;
  }
}

// Two stages: most pages of 256 characters are of one class and share one page.
struct ClassTable {
  std::vector<uint16_t> page_of;  // [kNumCodePoints / 256] index of a page
  std::vector<uint16_t> classes;  // [num_pages * 256]

  ClassTable() {
    size_t range = 0;
    std::vector<uint16_t> page(256);
    for (uint32_t first = 0; first < kNumCodePoints; first += 256) {
      for (uint32_t i = 0; i < 256; ++i) {
        const uint32_t code = first + i;
        while (range + 1 < kCategoryRangesSize && kCategoryRanges[range + 1] >> 8 <= code) ++range;
        const auto value = static_cast<uint8_t>(kCategoryRanges[range] & 0xFF);
        page[i] = category_class(value & ~kFalconPunctuationFlag);
        if ((value & kFalconPunctuationFlag) != 0) page[i] |= kFalconPunctuation;
        if (is_space(code)) page[i] |= kSpace;
        if (code == '\r' || code == '\n') page[i] |= kNewline;
      }
      const size_t last = classes.size() - 256;
      if (classes.empty() || !std::equal(page.begin(), page.end(), classes.begin() + last)) {
        classes.insert(classes.end(), page.begin(), page.end());
      }
      page_of.push_back(static_cast<uint16_t>(classes.size() / 256 - 1));
    }
  }
};

}  // namespace

size_t find_invalid_utf8(std::string_view text) {
  const auto *bytes = reinterpret_cast<const unsigned char *>(text.data());
  const size_t size = text.size();
  size_t i = 0;
  while (i < size) {
    const unsigned char lead = bytes[i];
    if (lead < 0x80) {
      ++i;
      continue;
    }
    const int length = utf8_length(lead);
    if (length == 0 || size - i < static_cast<size_t>(length)) return i;
    // Second byte: overlong forms, surrogates and what lies past U+10FFFF are cut off here.
    const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (bytes[i + 1] < low || bytes[i + 1] > high) return i;
    for (int k = 2; k < length; ++k) {
      if ((bytes[i + k] & 0xC0) != 0x80) return i;
    }
    i += length;
  }
  return size;
}

void append_utf8(uint32_t code, std::string *out) {
  const auto put = [out](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

uint16_t char_class(uint32_t code) {
  static const ClassTable table;  // unpacked once, constant afterwards
  return table.classes[table.page_of[code >> 8] * size_t{256} + (code & 0xFF)];
}

}  // namespace xllm
