#include "kvcache/content_hash.h"

#include <cstring>

namespace xllm {
namespace {

struct SipState {
  uint64_t v0, v1, v2, v3;

  static uint64_t rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

  void round() {
    v0 += v1;
    v2 += v3;
    v1 = rotate(v1, 13) ^ v0;
    v3 = rotate(v3, 16) ^ v2;
    v0 = rotate(v0, 32);
    v2 += v1;
    v0 += v3;
    v1 = rotate(v1, 17) ^ v2;
    v3 = rotate(v3, 21) ^ v0;
    v2 = rotate(v2, 32);
  }

  void rounds(int count) {
    for (int i = 0; i < count; ++i) round();
  }

  void absorb(uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
};

uint64_t load_little_endian(const uint8_t *bytes, size_t count) {
  uint64_t word = 0;
  for (size_t i = 0; i < count; ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return word;
}

}  // namespace

Hash128 siphash128(const HashKey &key, const void *data, size_t size_bytes) {
  // The constants spell "somepseudorandomlygeneratedbytes"; 0xee and 0xdd tell the 128-bit output
  // from the 64-bit one.
  SipState state{key.low ^ 0x736f6d6570736575u, key.high ^ 0x646f72616e646f6du ^ 0xeeu,
                 key.low ^ 0x6c7967656e657261u, key.high ^ 0x7465646279746573u};
  const auto *bytes = static_cast<const uint8_t *>(data);
  size_t left = size_bytes;
  for (; left >= 8; left -= 8, bytes += 8) state.absorb(load_little_endian(bytes, 8));
  state.absorb(load_little_endian(bytes, left) | static_cast<uint64_t>(size_bytes) << 56);

  Hash128 hash;
  state.v2 ^= 0xeeu;
  state.rounds(4);
  hash.low = state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  state.v1 ^= 0xddu;
  state.rounds(4);
  hash.high = state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  return hash;
}

}  // namespace xllm
