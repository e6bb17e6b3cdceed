#include "backend/cpu/hadamard.h"

#include <cmath>

namespace xllm::cpu {

void hadamard(float *channels, int n) {
  int size = 1;
  while (size < 256 && n % (2 * size) == 0) size *= 2;
  const auto norm = static_cast<float>(1 / std::sqrt(static_cast<double>(size)));
  for (float *x = channels; x < channels + n; x += size) {
    for (int distance = 1; distance < size; distance *= 2) {
      for (int begin = 0; begin < size; begin += 2 * distance) {
        for (int i = begin; i < begin + distance; ++i) {
          const float sum = x[i] + x[i + distance];
          x[i + distance] = x[i] - x[i + distance];
          x[i] = sum;
        }
      }
    }
    for (int i = 0; i < size; ++i) x[i] *= norm;
  }
}

}  // namespace xllm::cpu
