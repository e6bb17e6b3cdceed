// Numbers that nobody can guess: keys, and seeds that a request left open.
#pragma once

#include <cstdint>
#include <random>

namespace xllm {

inline uint64_t random_u64() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace xllm
