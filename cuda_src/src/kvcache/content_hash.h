// A keyed 128-bit hash of bytes: SipHash-2-4 with the 128-bit output (Aumasson and Bernstein,
// "SipHash: a fast short-input PRF", 2012). Keyed, because a client that could compute the hash
// could look for prompts that collide.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xllm {

struct Hash128 {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const Hash128 &other) const { return low == other.low && high == other.high; }
  bool operator!=(const Hash128 &other) const { return !(*this == other); }
};

struct HashKey {
  uint64_t low = 0;
  uint64_t high = 0;
};

// The hash of size_bytes bytes. The same on every machine, given the same bytes.
Hash128 siphash128(const HashKey &key, const void *data, size_t size_bytes);

}  // namespace xllm
