// Random valid quant blocks, and what they mean in float64: written from the formats' description
// (tensor/quant.h) alone, so that it shares nothing with the code under test.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace xllm::check {

// 64-bit splitmix: small, seedable, the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  double normal() {                                                         // about N(0, 1)
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

// A matrix with its own memory. Values are spread about as N(0, sigma^2).
struct HostMatrix {
  std::vector<uint8_t> bytes;
  MatrixView view;
};
HostMatrix random_matrix(DType dtype, int64_t rows, int64_t cols, double sigma, uint64_t seed,
                         const std::string &name = "w");
HostMatrix random_vector(int64_t size, double mean, double sigma, uint64_t seed,
                         const std::string &name = "v");

// The values of row `row`.
std::vector<double> dequantize_row(const MatrixView &matrix, int64_t row);

}  // namespace xllm::check
