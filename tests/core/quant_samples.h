// Rows of quant blocks for tests: random bytes with sane scales, and the worst ones a format can
// hold.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/half.h"
#include "tensor/dtype.h"
#include "tensor/quant.h"

namespace xllm::testing {

// A small generator of our own (xorshift64*), so that samples are the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Du;
  }
  int below(int n) { return static_cast<int>(next() >> 33) % n; }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }  // [0, 1)
  float symmetric() { return 2 * uniform() - 1; }
  // A sum of uniforms: bell-shaped, variance about 1.
  float normal() {
    float sum = 0;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum - 6;
  }

 private:
  uint64_t state_;
};

inline std::vector<DType> all_dtypes() {
  return {DType::kF32,  DType::kF16,  DType::kBF16, DType::kQ4_0,   DType::kQ4_1,
          DType::kQ5_0, DType::kQ5_1, DType::kQ8_0, DType::kQ2_K,   DType::kQ3_K,
          DType::kQ4_K, DType::kQ5_K, DType::kQ6_K, DType::kIQ4_NL, DType::kIQ4_XS};
}

inline bool is_plain_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// Where a block keeps its f16 scales: offsets of d and of the min's scale, -1 where there is none.
struct ScaleOffsets {
  int d;
  int min;
};

inline ScaleOffsets scale_offsets(DType dtype) {
  switch (dtype) {
    case DType::kQ4_1:
    case DType::kQ5_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
      return {0, 2};
    case DType::kQ2_K:
      return {80, 82};
    case DType::kQ3_K:
      return {108, -1};
    case DType::kQ6_K:
      return {208, -1};
    default:
      return {0, -1};
  }
}

enum class Sample {
  kRandom,      // any codes, scales around 0.01
  kMaxCodes,    // every code bit set
  kZeroCodes,   // every code bit clear
  kSubnormal,   // scales below 2^-14
  kLargeScale,  // scales of 1000 and more, both signs
};

inline std::vector<Sample> all_samples() {
  return {Sample::kRandom, Sample::kMaxCodes, Sample::kZeroCodes, Sample::kSubnormal,
          Sample::kLargeScale};
}

inline void put_half(uint8_t *p, float value) {
  const uint16_t half = float_to_half(value);
  std::memcpy(p, &half, sizeof half);
}

// `rows` rows of `cols` elements of any type, finite throughout.
inline std::vector<uint8_t> make_rows(DType dtype, int rows, int cols, Sample sample,
                                      uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>(rows) *
                             dtype_bytes(dtype, static_cast<uint64_t>(cols)));
  const auto amplitude = [&] {
    switch (sample) {
      case Sample::kSubnormal:
        return 3e-5f * random.symmetric();
      case Sample::kLargeScale:
        return 1000.0f + 2000.0f * random.symmetric();
      default:
        return 0.01f * random.symmetric();
    }
  };
  if (is_plain_float(dtype)) {
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    for (size_t i = 0; i < count; ++i) {
      const float value = amplitude();
      if (dtype == DType::kF32) {
        std::memcpy(&bytes[4 * i], &value, 4);
      } else {
        const uint16_t half =
            dtype == DType::kF16 ? float_to_half(value) : float_to_bfloat16(value);
        std::memcpy(&bytes[2 * i], &half, 2);
      }
    }
    return bytes;
  }
  for (uint8_t &byte : bytes) {
    const auto noise = static_cast<uint8_t>(random.next() >> 32);
    byte = sample == Sample::kMaxCodes ? 0xff : sample == Sample::kZeroCodes ? 0 : noise;
  }
  const ScaleOffsets offsets = scale_offsets(dtype);
  for (size_t b = 0; b < bytes.size(); b += dtype_info(dtype).block_bytes) {
    put_half(&bytes[b + static_cast<size_t>(offsets.d)], amplitude());
    if (offsets.min >= 0) put_half(&bytes[b + static_cast<size_t>(offsets.min)], amplitude());
  }
  return bytes;
}

}  // namespace xllm::testing
