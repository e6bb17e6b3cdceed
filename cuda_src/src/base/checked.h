// Overflow-safe arithmetic for sizes that come from a file or a peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace xllm {

// a + b into *out; false (and *out untouched) when it does not fit.
inline bool checked_add(uint64_t a, uint64_t b, uint64_t *out) {
  if (b > std::numeric_limits<uint64_t>::max() - a) return false;
  *out = a + b;
  return true;
}

// a * b into *out; false (and *out untouched) when it does not fit.
inline bool checked_mul(uint64_t a, uint64_t b, uint64_t *out) {
  if (a != 0 && b > std::numeric_limits<uint64_t>::max() / a) return false;
  *out = a * b;
  return true;
}

// The smallest multiple of `alignment` (a power of two) that is >= value; false when it does not
// fit.
inline bool checked_align(uint64_t value, uint64_t alignment, uint64_t *out) {
  uint64_t padded = 0;
  if (!checked_add(value, alignment - 1, &padded)) return false;
  *out = padded & ~(alignment - 1);
  return true;
}

// ceil(a / b) for b > 0, without overflow.
inline constexpr uint64_t ceil_div(uint64_t a, uint64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

}  // namespace xllm
