// A small model in memory for tests of a backend: random weights of any tensor type, and its
// forward pass in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/dequant.h"
#include "base/half.h"
#include "quant_samples.h"

namespace xllm::testing {

struct TinyOptions {
  int num_layers = 2;
  int hidden_size = 64;
  int intermediate_size = 96;
  int num_heads = 6;
  int num_kv_heads = 2;
  int head_dim = 32;
  int vocab_size = 100;
  int rotary_dim = 32;
  bool is_neighbor = true;
  bool has_bias = false;
  bool has_head_norm = false;
  int sliding_window = 0;
  DType dtype = DType::kF32;           // of the matrices
  float q_bias = 0.5f, k_bias = 0.5f;  // amplitude where has_bias
};

// Owns the bytes that its views point into. Not copyable: views are addresses.
class TinyModel {
 public:
  explicit TinyModel(const TinyOptions &o, uint64_t seed = 1) : options(o), seed_(seed) {
    dims.num_layers = o.num_layers;
    dims.hidden_size = o.hidden_size;
    dims.intermediate_size = o.intermediate_size;
    dims.num_heads = o.num_heads;
    dims.num_kv_heads = o.num_kv_heads;
    dims.head_dim = o.head_dim;
    dims.vocab_size = o.vocab_size;
    dims.rms_eps = 1e-5f;
    dims.attention_scale = 1 / std::sqrt(static_cast<float>(o.head_dim));
    dims.sliding_window = o.sliding_window;
    fill_rope();
    const int q = o.num_heads * o.head_dim, kv = o.num_kv_heads * o.head_dim;
    tensors.embedding = matrix(o.vocab_size, o.hidden_size, 1);
    for (int i = 0; i < o.num_layers; ++i) {
      LayerTensors layer;
      layer.attn_norm = vector(o.hidden_size, 0.3f, 1);
      layer.q = matrix(q, o.hidden_size);
      layer.k = matrix(kv, o.hidden_size);
      layer.v = matrix(kv, o.hidden_size);
      if (o.has_bias) {
        layer.q_bias = vector(q, o.q_bias, 0);
        layer.k_bias = vector(kv, o.k_bias, 0);
        layer.v_bias = vector(kv, 0.5f, 0);
        layer.o_bias = vector(o.hidden_size, 0.5f, 0);
      }
      if (o.has_head_norm) {
        layer.q_norm = vector(o.head_dim, 0.3f, 1);
        layer.k_norm = vector(o.head_dim, 0.3f, 1);
      }
      layer.o = matrix(o.hidden_size, q);
      layer.ffn_norm = vector(o.hidden_size, 0.3f, 1);
      layer.gate = matrix(o.intermediate_size, o.hidden_size);
      layer.up = matrix(o.intermediate_size, o.hidden_size);
      layer.down = matrix(o.hidden_size, o.intermediate_size);
      tensors.layers.push_back(layer);
    }
    tensors.output_norm = vector(o.hidden_size, 0.3f, 1);
    tensors.head = matrix(o.vocab_size, o.hidden_size);
  }
  TinyModel(const TinyModel &) = delete;
  TinyModel &operator=(const TinyModel &) = delete;

  std::vector<int32_t> prompt(int length, uint64_t seed) const {
    Random random(seed);
    std::vector<int32_t> ids;
    for (int i = 0; i < length; ++i) ids.push_back(random.below(options.vocab_size));
    return ids;
  }

  // Logits [ids.size(), vocab_size] in float64 from the dequantised weights.
  std::vector<double> reference(const std::vector<int32_t> &ids) const {
    const size_t n = ids.size();
    const auto hidden = static_cast<size_t>(dims.hidden_size),
               dim = static_cast<size_t>(dims.head_dim);
    const auto heads = static_cast<size_t>(dims.num_heads),
               kv_heads = static_cast<size_t>(dims.num_kv_heads);
    std::vector<Row> x(n), logits;
    for (size_t t = 0; t < n; ++t) {
      std::vector<float> row(hidden);
      cpu::dequantize_row(tensors.embedding.dtype, tensors.embedding.row(ids[t]), dims.hidden_size,
                          row.data());
      x[t].assign(row.begin(), row.end());
    }
    for (const LayerTensors &layer : tensors.layers) {
      std::vector<Row> q(n), k(n), v(n);
      for (size_t t = 0; t < n; ++t) {
        const Row act = norm(x[t], layer.attn_norm);
        q[t] = finish(multiply(layer.q, act), layer.q_bias, layer.q_norm, heads, t, true);
        k[t] = finish(multiply(layer.k, act), layer.k_bias, layer.k_norm, kv_heads, t, true);
        v[t] = finish(multiply(layer.v, act), layer.v_bias, {}, kv_heads, t, false);
      }
      for (size_t t = 0; t < n; ++t) {
        Row out(heads * dim, 0.0);
        const auto window = static_cast<size_t>(dims.sliding_window);
        const size_t first = window > 0 && t + 1 > window ? t + 1 - window : 0;
        for (size_t h = 0; h < heads; ++h) {
          const size_t g = h / (heads / kv_heads);
          Row p;
          for (size_t j = first; j <= t; ++j) {
            double s = 0;
            for (size_t c = 0; c < dim; ++c) s += q[t][h * dim + c] * k[j][g * dim + c];
            p.push_back(s * double{dims.attention_scale});
          }
          const double max = *std::max_element(p.begin(), p.end());
          double total = 0;
          for (double &e : p) total += e = std::exp(e - max);
          for (size_t j = first; j <= t; ++j) {
            for (size_t c = 0; c < dim; ++c)
              out[h * dim + c] += p[j - first] / total * v[j][g * dim + c];
          }
        }
        add(&x[t], multiply(layer.o, out));
        if (layer.o_bias) add(&x[t], values(layer.o_bias));
        const Row act = norm(x[t], layer.ffn_norm);
        Row gate = multiply(layer.gate, act);
        const Row up = multiply(layer.up, act);
        for (size_t i = 0; i < gate.size(); ++i)
          gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
        add(&x[t], multiply(layer.down, gate));
      }
    }
    Row all;
    for (size_t t = 0; t < n; ++t) {
      const Row row = multiply(tensors.head, norm(x[t], tensors.output_norm));
      all.insert(all.end(), row.begin(), row.end());
    }
    return all;
  }

  TinyOptions options;
  ModelDims dims;
  ModelTensors tensors;

 private:
  using Row = std::vector<double>;

  void fill_rope() {
    RopeTables &rope = dims.rope;
    rope.rotary_dim = options.rotary_dim;
    rope.is_neighbor = options.is_neighbor;
    const auto fill = [&](std::vector<float> *table, int count, int step) {
      for (int p = 0; p < count; ++p) {
        for (int i = 0; i < options.rotary_dim / 2; ++i) {
          const double angle = p * step * std::pow(10000.0, -2.0 * i / options.rotary_dim);
          table->push_back(static_cast<float>(std::cos(angle)));
          table->push_back(static_cast<float>(std::sin(angle)));
        }
      }
    };
    fill(&rope.coarse, 4, RopeTables::kFine);
    fill(&rope.fine, RopeTables::kFine, 1);
  }

  MatrixView keep(std::vector<uint8_t> bytes, DType dtype, int rows, int cols) {
    memory_.push_back(std::make_unique<std::vector<uint8_t>>(std::move(bytes)));
    return {memory_.back()->data(), dtype, rows, cols, "tensor " + std::to_string(memory_.size())};
  }

  // Weights of about 1 / sqrt(cols), so that rows keep their size through the layers.
  MatrixView matrix(int rows, int cols, float gain = 1) {
    const DType dtype = cols % static_cast<int>(dtype_info(options.dtype).block_elems) == 0
                            ? options.dtype
                            : DType::kF32;
    std::vector<uint8_t> bytes = make_rows(dtype, rows, cols, Sample::kRandom, seed_++);
    if (is_plain_float(dtype)) {
      Random random(seed_++);
      const float scale = gain / std::sqrt(static_cast<float>(cols));
      for (size_t i = 0; i < static_cast<size_t>(rows) * static_cast<size_t>(cols); ++i) {
        const float value = scale * random.normal();
        if (dtype == DType::kF32) {
          std::memcpy(&bytes[4 * i], &value, 4);
        } else {
          const uint16_t half =
              dtype == DType::kF16 ? float_to_half(value) : float_to_bfloat16(value);
          std::memcpy(&bytes[2 * i], &half, 2);
        }
      }
    } else {
      rescale(&bytes, dtype, rows, cols, gain / std::sqrt(static_cast<float>(cols)));
    }
    return keep(std::move(bytes), dtype, rows, cols);
  }

  // Multiplies the blocks' scales so that the values have this root mean square.
  static void rescale(std::vector<uint8_t> *bytes, DType dtype, int rows, int cols, float wanted) {
    const int count = rows * cols;
    std::vector<float> x(static_cast<size_t>(count));
    cpu::dequantize_row(dtype, bytes->data(), count, x.data());
    double squares = 0;
    for (const float v : x) squares += double{v} * v;
    const float factor = wanted / static_cast<float>(std::sqrt(squares / count));
    const ScaleOffsets offsets = scale_offsets(dtype);
    for (size_t b = 0; b < bytes->size(); b += dtype_info(dtype).block_bytes) {
      for (const int offset : {offsets.d, offsets.min}) {
        if (offset < 0) continue;
        uint16_t half;
        std::memcpy(&half, &(*bytes)[b + static_cast<size_t>(offset)], sizeof half);
        put_half(&(*bytes)[b + static_cast<size_t>(offset)], factor * half_to_float(half));
      }
    }
  }

  MatrixView vector(int size, float amplitude, float center) {
    Random random(seed_++);
    std::vector<uint8_t> bytes(static_cast<size_t>(size) * 4);
    for (int i = 0; i < size; ++i) {
      const float value = center + amplitude * random.symmetric();
      std::memcpy(&bytes[static_cast<size_t>(i) * 4], &value, 4);
    }
    return keep(std::move(bytes), DType::kF32, 1, size);
  }

  static Row values(const MatrixView &tensor) {
    const auto *p = static_cast<const float *>(tensor.data);
    return Row(p, p + tensor.cols);
  }

  static Row multiply(const MatrixView &w, const Row &x) {
    Row out;
    std::vector<float> row(static_cast<size_t>(w.cols));
    for (int64_t r = 0; r < w.rows; ++r) {
      cpu::dequantize_row(w.dtype, w.row(r), w.cols, row.data());
      double sum = 0;
      for (size_t i = 0; i < row.size(); ++i) sum += double{row[i]} * x[i];
      out.push_back(sum);
    }
    return out;
  }

  Row norm(const Row &x, const MatrixView &weight) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double inverse =
        1 / std::sqrt(squares / static_cast<double>(x.size()) + double{dims.rms_eps});
    const Row w = values(weight);
    Row out;
    for (size_t i = 0; i < x.size(); ++i) out.push_back(x[i] * inverse * w[i]);
    return out;
  }

  static void add(Row *x, const Row &y) {
    for (size_t i = 0; i < x->size(); ++i) (*x)[i] += y[i];
  }

  Row finish(Row row, const MatrixView &bias, const MatrixView &weight, size_t num_heads,
             size_t position, bool rotates) const {
    if (bias) add(&row, values(bias));
    const auto dim = static_cast<size_t>(dims.head_dim),
               rotary = static_cast<size_t>(dims.rope.rotary_dim);
    for (size_t h = 0; h < num_heads; ++h) {
      Row head(row.begin() + static_cast<std::ptrdiff_t>(h * dim),
               row.begin() + static_cast<std::ptrdiff_t>((h + 1) * dim));
      if (weight) head = norm(head, weight);
      for (size_t i = 0; rotates && i < rotary / 2; ++i) {
        const size_t a = dims.rope.is_neighbor ? 2 * i : i,
                     b = dims.rope.is_neighbor ? 2 * i + 1 : i + rotary / 2;
        const double angle =
            static_cast<double>(position) *
            std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rotary));
        const double p = head[a], q = head[b];
        head[a] = p * std::cos(angle) - q * std::sin(angle);
        head[b] = p * std::sin(angle) + q * std::cos(angle);
      }
      std::copy(head.begin(), head.end(), row.begin() + static_cast<std::ptrdiff_t>(h * dim));
    }
    return row;
  }

  uint64_t seed_;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> memory_;
};

}  // namespace xllm::testing
