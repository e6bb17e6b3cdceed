// Activations on the host, bit for bit as the device quantises them (backend/cuda/act_quant.cuh):
// for the checks, and for programs that try one kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backend/cuda/act_format.cuh"
#include "base/half.h"
#include "quant_blocks.h"

namespace xllm::check {

struct HostActs {
  int tokens = 0, num_chunks = 0;
  int64_t cols = 0;
  std::vector<float> x;        // [tokens][cols]
  std::vector<int16_t> q;      // [tokens][num_chunks * 256], zeros past cols
  std::vector<float> scales;   // [tokens][num_chunks]
  std::vector<uint8_t> bytes;  // what an ActView points to; tokens padded to 64 with zeros

  double value(int token, int64_t col) const {
    return static_cast<double>(scales[static_cast<size_t>(token * num_chunks + col / 256)]) *
           q[static_cast<size_t>(token) * num_chunks * 256 + static_cast<size_t>(col)];
  }
};

// 1 / rms of a row, in the order of the device.
inline float row_inverse_on_host(const float *x, int64_t cols, float eps) {
  float total = 0;
  for (int64_t first = 0; first < cols; first += cuda::kActCols) {
    float lane[32];
    for (int l = 0; l < 32; ++l) {
      lane[l] = 0;
      for (int i = 0; i < 8; ++i) {
        const int64_t col = first + 8 * l + i;
        const float v = col < cols ? x[col] : 0.0f;
        lane[l] = std::fmaf(v, v, lane[l]);
      }
    }
    for (int offset = 16; offset > 0; offset >>= 1)
      for (int l = 0; l < offset; ++l) lane[l] = lane[l] + lane[l + offset];
    total = first == 0 ? lane[0] : total + lane[0];
  }
  const float mean = total / static_cast<float>(cols);
  return 1.0f / std::sqrt(mean + eps);
}

// x [tokens][cols]; norm_weight [cols] or null.
inline HostActs quantize_on_host(std::vector<float> x, int tokens, int64_t cols,
                                 const float *norm_weight = nullptr, float eps = 0) {
  HostActs a;
  a.tokens = tokens;
  a.cols = cols;
  a.num_chunks = static_cast<int>((cols + cuda::kActCols - 1) / cuda::kActCols);
  a.x = std::move(x);
  a.q.resize(static_cast<size_t>(tokens) * a.num_chunks * 256);
  a.scales.resize(static_cast<size_t>(tokens) * a.num_chunks);
  a.bytes.resize(static_cast<size_t>(tokens + 63) / 64 * 8 * a.num_chunks * cuda::kActChunkBytes);
  for (int token = 0; token < tokens; ++token) {
    const float *row = a.x.data() + static_cast<int64_t>(token) * cols;
    const float inverse = norm_weight != nullptr ? row_inverse_on_host(row, cols, eps) : 1.0f;
    for (int chunk = 0; chunk < a.num_chunks; ++chunk) {
      float v[cuda::kActCols], largest = 0;
      for (int k = 0; k < cuda::kActCols; ++k) {
        const int64_t col = int64_t{chunk} * cuda::kActCols + k;
        v[k] = col >= cols ? 0.0f : norm_weight != nullptr ? row[col] * norm_weight[col] : row[col];
        largest = std::max(largest, std::fabs(v[k]));
      }
      const float d = largest / static_cast<float>(cuda::kActMaxCode);
      const float to_code = d > 0 ? 1.0f / d : 0.0f;
      cuda::ActView view = {a.bytes.data(), a.num_chunks};
      uint8_t *at = view.chunk(token, chunk);
      const int in_group = token % cuda::kActGroup;
      for (int b = 0; b < cuda::kActBlocks; ++b) {
        int sum = 0;
        for (int k = 0; k < cuda::kActBlock; ++k) {
          const int code = static_cast<int>(std::nearbyint(v[b * 32 + k] * to_code));
          const int q = std::max(-cuda::kActMaxCode, std::min(cuda::kActMaxCode, code));
          const int hi = (q + 4) >> 3;
          sum += q;
          a.q[(static_cast<size_t>(token) * a.num_chunks + chunk) * 256 + b * 32 + k] =
              static_cast<int16_t>(q);
          const int k_of_chunk = b * cuda::kActBlock + k;
          at[cuda::act_code_offset(8, in_group, k_of_chunk, 0)] = static_cast<uint8_t>(hi);
          at[cuda::act_code_offset(8, in_group, k_of_chunk, 1)] = static_cast<uint8_t>(q - 8 * hi);
        }
        const auto short_sum = static_cast<int16_t>(sum);
        std::memcpy(at + cuda::act_sums_offset(8) + (in_group * cuda::kActBlocks + b) * 2,
                    &short_sum, 2);
        const uint16_t halves[2] = {float_to_half(static_cast<float>(sum >> 4)),
                                    float_to_half(static_cast<float>(sum & 15))};
        std::memcpy(at + cuda::kActHalvesOffset + in_group * cuda::kActHalvesTokenBytes + b * 4,
                    halves, 4);
      }
      const float scale = norm_weight != nullptr ? d * inverse : d;
      std::memcpy(at + cuda::act_codes_bytes(8) + in_group * 4, &scale, 4);
      a.scales[static_cast<size_t>(token * a.num_chunks + chunk)] = scale;
    }
  }
  return a;
}

// Rows whose blocks have very different sizes.
inline std::vector<float> random_rows(int tokens, int64_t cols, uint64_t seed) {
  std::vector<float> x(static_cast<size_t>(tokens) * cols);
  Random random(seed);
  double spread = 1;
  for (size_t i = 0; i < x.size(); ++i) {
    if (i % 32 == 0) spread = std::exp(random.normal());
    x[i] = static_cast<float>(random.normal() * spread);
  }
  return x;
}

}  // namespace xllm::check
