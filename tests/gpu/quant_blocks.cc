#include "quant_blocks.h"

#include <cstring>

#include "base/half.h"
#include "tensor/quant.h"

namespace xllm::check {
namespace {

double half(uint16_t bits) { return static_cast<double>(half_to_float(bits)); }

template <typename Block>
Block load(const uint8_t *bytes) {
  Block block;
  std::memcpy(&block, bytes, sizeof block);
  return block;
}

void put_half(uint8_t *at, double value) {
  const uint16_t bits = float_to_half(static_cast<float>(value));
  std::memcpy(at, &bits, 2);
}

constexpr int8_t kIq4[16] = XLLM_IQ4_VALUES;

void dequantize_block(DType dtype, const uint8_t *bytes, double *out) {
  switch (dtype) {
    case DType::kF32: {
      out[0] = static_cast<double>(load<float>(bytes));
      return;
    }
    case DType::kF16:
      out[0] = half(load<uint16_t>(bytes));
      return;
    case DType::kBF16:
      out[0] = static_cast<double>(bfloat16_to_float(load<uint16_t>(bytes)));
      return;
    case DType::kQ4_0: {
      const auto b = load<BlockQ4_0>(bytes);
      for (int i = 0; i < 32; ++i) out[i] = half(b.d) * ((b.qs[i % 16] >> (i / 16 * 4) & 15) - 8);
      return;
    }
    case DType::kQ4_1: {
      const auto b = load<BlockQ4_1>(bytes);
      for (int i = 0; i < 32; ++i)
        out[i] = half(b.d) * (b.qs[i % 16] >> (i / 16 * 4) & 15) + half(b.m);
      return;
    }
    case DType::kQ5_0: {
      const auto b = load<BlockQ5_0>(bytes);
      for (int i = 0; i < 32; ++i) {
        const int q = (b.qs[i % 16] >> (i / 16 * 4) & 15) | (b.qh[i / 8] >> (i % 8) & 1) << 4;
        out[i] = half(b.d) * (q - 16);
      }
      return;
    }
    case DType::kQ5_1: {
      const auto b = load<BlockQ5_1>(bytes);
      for (int i = 0; i < 32; ++i) {
        const int q = (b.qs[i % 16] >> (i / 16 * 4) & 15) | (b.qh[i / 8] >> (i % 8) & 1) << 4;
        out[i] = half(b.d) * q + half(b.m);
      }
      return;
    }
    case DType::kQ8_0: {
      const auto b = load<BlockQ8_0>(bytes);
      for (int i = 0; i < 32; ++i) out[i] = half(b.d) * b.qs[i];
      return;
    }
    case DType::kIQ4_NL: {
      const auto b = load<BlockIQ4_NL>(bytes);
      for (int i = 0; i < 32; ++i) out[i] = half(b.d) * kIq4[b.qs[i % 16] >> (i / 16 * 4) & 15];
      return;
    }
    case DType::kQ3_K: {
      const auto b = load<BlockQ3_K>(bytes);
      for (int e = 0; e < 256; ++e) {
        const int s = e / 16;
        const int low = s < 8 ? b.scales[s] & 15 : b.scales[s - 8] >> 4;
        const int scale = (low | (b.scales[8 + s % 4] >> (2 * (s / 4)) & 3) << 4) - 32;
        const int q = (b.qs[e / 128 * 32 + e % 32] >> (2 * (e % 128 / 32)) & 3) -
                      ((b.hmask[e % 32] >> (e / 32) & 1) != 0 ? 0 : 4);
        out[e] = half(b.d) * scale * q;
      }
      return;
    }
    case DType::kQ4_K:
    case DType::kQ5_K: {
      const bool is_five = dtype == DType::kQ5_K;
      const uint8_t *scales = bytes + 4, *qh = bytes + 16, *qs = bytes + (is_five ? 48 : 16);
      const double d = half(load<uint16_t>(bytes)), dmin = half(load<uint16_t>(bytes + 2));
      for (int e = 0; e < 256; ++e) {
        const int s = e / 32, l = e % 32;
        const int scale = s < 4 ? scales[s] & 63 : (scales[s + 4] & 15) | (scales[s - 4] >> 6) << 4;
        const int minimum =
            s < 4 ? scales[s + 4] & 63 : (scales[s + 4] >> 4) | (scales[s] >> 6) << 4;
        int q = qs[s / 2 * 32 + l] >> (s % 2 * 4) & 15;
        if (is_five) q |= (qh[l] >> s & 1) << 4;
        out[e] = d * scale * q - dmin * minimum;
      }
      return;
    }
    default: {
      const auto b = load<BlockQ6_K>(bytes);
      for (int e = 0; e < 256; ++e) {
        const int h = e / 128, k = e % 128 / 32, l = e % 32;
        const int low =
            k < 2 ? b.ql[h * 64 + 32 * k + l] & 15 : b.ql[h * 64 + 32 * (k - 2) + l] >> 4;
        const int q = (low | (b.qh[h * 32 + l] >> (2 * k) & 3) << 4) - 32;
        out[e] = half(b.d) * b.scales[e / 16] * q;
      }
    }
  }
}

}  // namespace

HostMatrix random_matrix(DType dtype, int64_t rows, int64_t cols, double sigma, uint64_t seed,
                         const std::string &name) {
  HostMatrix m;
  const DTypeInfo &info = dtype_info(dtype);
  m.bytes.resize(dtype_bytes(dtype, static_cast<uint64_t>(rows * cols)));
  Random random(seed);
  if (info.block_elems > 1) {
    size_t i = 0;
    for (; i + 8 <= m.bytes.size(); i += 8) {
      const uint64_t bits = random.bits();
      std::memcpy(m.bytes.data() + i, &bits, 8);
    }
    for (; i < m.bytes.size(); ++i) m.bytes[i] = static_cast<uint8_t>(random.bits());
  }
  for (uint8_t *b = m.bytes.data(); b < m.bytes.data() + m.bytes.size(); b += info.block_bytes) {
    const double factor = (0.5 + random.uniform()) * sigma;
    switch (dtype) {
      case DType::kF32: {
        const float value = static_cast<float>(random.normal() * sigma);
        std::memcpy(b, &value, 4);
        break;
      }
      case DType::kF16:
        put_half(b, random.normal() * sigma);
        break;
      case DType::kBF16: {
        const uint16_t bits = float_to_bfloat16(static_cast<float>(random.normal() * sigma));
        std::memcpy(b, &bits, 2);
        break;
      }
      case DType::kQ4_0:
        put_half(b, factor / 4.6);
        break;
      case DType::kQ5_0:
        put_half(b, factor / 9.2);
        break;
      case DType::kQ4_1:
        put_half(b, factor / 4.6);
        put_half(b + 2, -7.5 * factor / 4.6);
        break;
      case DType::kQ5_1:
        put_half(b, factor / 9.2);
        put_half(b + 2, -15.5 * factor / 9.2);
        break;
      case DType::kQ8_0:
        put_half(b, factor / 73);
        break;
      case DType::kIQ4_NL:
        put_half(b, factor / 65);
        break;
      case DType::kQ3_K:
        put_half(b + 108, factor / (18 * 2.3));
        break;
      case DType::kQ4_K:
        put_half(b, factor / (32 * 4.6));
        put_half(b + 2, 7.5 * factor / (32 * 4.6));
        break;
      case DType::kQ5_K:
        put_half(b, factor / (32 * 9.2));
        put_half(b + 2, 15.5 * factor / (32 * 9.2));
        break;
      default:
        put_half(b + 208, factor / (73 * 18));
    }
  }
  m.view.data = m.bytes.data();
  m.view.dtype = dtype;
  m.view.rows = rows;
  m.view.cols = cols;
  m.view.name = name;
  return m;
}

HostMatrix random_vector(int64_t size, double mean, double sigma, uint64_t seed,
                         const std::string &name) {
  HostMatrix m = random_matrix(DType::kF32, 1, size, sigma, seed, name);
  for (int64_t i = 0; i < size; ++i) {
    float value;
    std::memcpy(&value, m.bytes.data() + i * 4, 4);
    value += static_cast<float>(mean);
    std::memcpy(m.bytes.data() + i * 4, &value, 4);
  }
  return m;
}

std::vector<double> dequantize_row(const MatrixView &matrix, int64_t row) {
  const DTypeInfo &info = dtype_info(matrix.dtype);
  std::vector<double> out(static_cast<size_t>(matrix.cols));
  const uint8_t *from = matrix.row(row);
  for (int64_t col = 0; col < matrix.cols; col += info.block_elems, from += info.block_bytes) {
    dequantize_block(matrix.dtype, from, out.data() + col);
  }
  return out;
}

}  // namespace xllm::check
