// Counter-based random numbers (Philox4x32-10, Salmon et al., SC'11): a pure function of (seed,
// position), so a request's numbers do not depend on what else runs, on the order of steps, or on a
// resumption.
#pragma once

#include <cstdint>

namespace xllm {

struct Philox {
  uint32_t value[4];
};

// The four 32-bit numbers of counter (position, stream) under the key `seed`.
inline Philox philox(uint64_t seed, uint64_t position, uint64_t stream = 0) {
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                         static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
                              static_cast<uint32_t>(product1),
                              static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
                              static_cast<uint32_t>(product0)};
    for (int i = 0; i < 4; ++i) counter[i] = next[i];
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return {{counter[0], counter[1], counter[2], counter[3]}};
}

// Uniform in [0, 1), 24 bits, from one 32-bit number.
inline float uniform_float(uint32_t bits) { return static_cast<float>(bits >> 8) * 0x1p-24f; }

}  // namespace xllm
