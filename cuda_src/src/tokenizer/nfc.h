// Unicode normalization form C (UAX #15), with the tables of Unicode 9.0 that the reference
// tokenizers use.
#pragma once

#include <string>
#include <string_view>

namespace xllm {

// True if a glance shows that text, well-formed UTF-8, is its own NFC: nothing in it lies at or
// above U+0300, where the first combining mark is.
bool is_trivially_nfc(std::string_view text);

// The NFC of well-formed UTF-8. Time O(n log n) where marks pile up, else O(n).
std::string to_nfc(std::string_view text);

}  // namespace xllm
