// Repacking and the matrix products, every type, against float64; and the bytes of one kernel
// against those of another.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "backend/cuda/act_quant.cuh"
#include "backend/cuda/matmul.h"
#include "backend/cuda/repack.h"
#include "base/half.h"
#include "device_array.h"
#include "quant_blocks.h"
#include "report.h"
#include "test_device.h"

namespace xllm::check {
namespace {

using cuda::ActView;
using cuda::DeviceMatrix;
using cuda::FusedMatrix;

const DType kTypes[] = {DType::kQ4_0, DType::kQ4_1, DType::kQ5_0, DType::kQ5_1, DType::kQ8_0,
                        DType::kQ4_K, DType::kQ5_K, DType::kQ6_K, DType::kQ3_K, DType::kIQ4_NL,
                        DType::kF16,  DType::kF32,  DType::kBF16};

// Quantised activations made on the host, by the rule of act_quant.cuh.
struct Acts {
  std::vector<double> values;  // [tokens][cols], d * q
  std::vector<int8_t> q;       // [tokens][cols]
  std::vector<float> d, s;     // [tokens][cols / 32]
  DeviceArray<int8_t> codes;
  DeviceArray<float2> scales;
  ActView view;
};

int position_in_block(int k) { return (k & 15) / 4 * 8 + k / 16 * 4 + (k & 3); }

std::unique_ptr<Acts> random_acts(int tokens, int64_t cols, uint64_t seed) {
  const int blocks = static_cast<int>((cols + 63) / 64 * 2);
  const int padded = (tokens + 63) / 64 * 64;
  std::vector<int8_t> codes(static_cast<size_t>(padded) * blocks * 32, 0);
  std::vector<float2> scales(static_cast<size_t>(padded) * blocks, make_float2(0, 0));
  std::vector<double> values(static_cast<size_t>(tokens) * cols);
  std::vector<int8_t> qs(values.size());
  std::vector<float> ds(values.size() / 32), sums(values.size() / 32);
  Random random(seed);
  for (int token = 0; token < tokens; ++token) {
    for (int block = 0; block * 32 < cols; ++block) {
      float x[32], largest = 0;
      const double spread = std::exp(2 * random.normal());
      for (float &v : x) {
        v = static_cast<float>(random.normal() * spread);
        largest = std::max(largest, std::fabs(v));
      }
      const float d = float_from_bits(float_bits(largest / 127.0f) & ~3u);
      const float inverse = d > 0 ? 1.0f / d : 0.0f;
      const size_t entry = (static_cast<size_t>(token / 8) * blocks + block) * 8 + token % 8;
      int sum = 0;
      for (int k = 0; k < 32; ++k) {
        const int q =
            std::max(-127, std::min(127, static_cast<int>(std::nearbyint(x[k] * inverse))));
        sum += q;
        codes[entry * 32 + position_in_block(k)] = static_cast<int8_t>(q);
        const size_t at = static_cast<size_t>(token) * cols + block * 32 + k;
        values[at] = static_cast<double>(d) * q;
        qs[at] = static_cast<int8_t>(q);
      }
      scales[entry] = make_float2(d, d * static_cast<float>(sum));
      const size_t at = static_cast<size_t>(token) * (cols / 32) + block;
      ds[at] = scales[entry].x;
      sums[at] = scales[entry].y;
    }
  }
  auto acts = std::unique_ptr<Acts>(new Acts{std::move(values),
                                             std::move(qs),
                                             std::move(ds),
                                             std::move(sums),
                                             DeviceArray<int8_t>(codes),
                                             DeviceArray<float2>(scales),
                                             {}});
  acts->view = {acts->codes.data(), acts->scales.data(), blocks};
  return acts;
}

struct OnDevice {
  DeviceArray<uint8_t> bytes;
  DeviceMatrix matrix;
};

std::unique_ptr<OnDevice> upload(const MatrixView &view) {
  const int type = cuda::weight_type_of(view.dtype);
  auto made =
      std::unique_ptr<OnDevice>(new OnDevice{DeviceArray<uint8_t>(cuda::device_bytes(view)), {}});
  std::vector<uint8_t> raw(view.size_bytes());
  std::memcpy(raw.data(), view.data, raw.size());
  if (cuda::is_plain(type)) {
    cuda::check(cudaMemcpy(made->bytes.data(), raw.data(), raw.size(), cudaMemcpyHostToDevice),
                "upload");
  } else {
    const DeviceArray<uint8_t> on_device(raw);
    cuda::repack(view.dtype, on_device.data(), view.rows, view.cols, made->bytes.data(), nullptr);
    cuda::check(cudaDeviceSynchronize(), "repack");
  }
  made->matrix = {made->bytes.data(), type, view.rows, view.cols};
  return made;
}

std::vector<double> reference_product(const MatrixView &w, const Acts &acts, int tokens) {
  std::vector<double> y(static_cast<size_t>(tokens) * w.rows);
  for (int64_t row = 0; row < w.rows; ++row) {
    const std::vector<double> values = dequantize_row(w, row);
    for (int m = 0; m < tokens; ++m) {
      const double *x = acts.values.data() + static_cast<size_t>(m) * w.cols;
      double sum = 0;
      for (int64_t k = 0; k < w.cols; ++k) sum += values[k] * x[k];
      y[static_cast<size_t>(m) * w.rows + row] = sum;
    }
  }
  return y;
}

// Worst row of ||out - reference|| / ||reference||; infinite where anything is not finite.
double worst_error(const std::vector<float> &out, const std::vector<double> &reference, int tokens,
                   int64_t width) {
  double worst = 0;
  for (int m = 0; m < tokens; ++m) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < width; ++i) {
      const double r = reference[static_cast<size_t>(m) * width + i],
                   e = out[static_cast<size_t>(m) * width + i] - r;
      error += e * e;
      norm += r * r;
    }
    const double relative = std::sqrt(error / (norm > 0 ? norm : 1));
    worst = relative <= worst ? worst : relative;
    if (!(relative == relative)) return INFINITY;
  }
  return worst;
}

const int kTokenCounts[] = {1, 2, 3, 7, 8, 9, 16, 33, 64, 65, 130};
constexpr int kMaxTokens = 130;

std::vector<float> run(const cuda::Device &device, const FusedMatrix &matrix, const Acts &acts,
                       int tokens, const float *bias, bool is_added,
                       const std::vector<float> *start) {
  const int64_t rows = matrix.rows();
  DeviceArray<float> out(static_cast<size_t>(tokens) * rows);
  if (start != nullptr) {
    cuda::check(cudaMemcpy(out.data(), start->data(), static_cast<size_t>(tokens) * rows * 4,
                           cudaMemcpyHostToDevice),
                "copy");
  }
  const DeviceArray<float> partials(std::max<size_t>(cuda::partial_floats(matrix, tokens), 1));
  cuda::Product product = {};
  product.matrix = &matrix;
  product.act = &acts.view;
  product.num_tokens = tokens;
  product.out = out.data();
  product.out_stride = rows;
  product.bias = bias;
  product.is_added = is_added;
  product.partials = partials.data();
  cuda::matmul({&device, test_stream()}, product);
  return out.read();
}

bool same_bytes(const float *a, const float *b, size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

// Outputs of three tokens against the host's additions in the order that matmul_args.cuh defines.
bool in_canonical_order(const MatrixView &w, const Acts &acts, const std::vector<float> &out) {
  const std::vector<uint8_t> tiles = cuda::repack_on_host(w);
  for (const int64_t token : {0, 5, 129}) {
    for (int64_t row = 0; row < w.rows; ++row) {
      const float y = cuda::product_on_host(
          cuda::weight_type_of(w.dtype), tiles.data(), w.cols, row, acts.q.data() + token * w.cols,
          acts.d.data() + token * (w.cols / 32), acts.s.data() + token * (w.cols / 32));
      if (!same_bytes(&y, &out[static_cast<size_t>(token * w.rows + row)], 1)) return false;
    }
  }
  return true;
}

}  // namespace

void check_repack(Report *report) {
  for (const DType type : kTypes) {
    if (cuda::is_plain(cuda::weight_type_of(type))) continue;
    const int64_t rows = 37, cols = dtype_info(type).block_elems == 256 ? 768 : 32 * 9;
    const HostMatrix m = random_matrix(type, rows, cols, 1, 11);
    const std::string name = std::string("repack ") + dtype_info(type).name;
    const std::vector<uint8_t> tiles = cuda::repack_on_host(m.view);
    double worst = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<double> values = dequantize_row(m.view, row);
      for (int64_t col = 0; col < cols; ++col) {
        const double v =
            cuda::tile_value_on_host(cuda::weight_type_of(type), tiles.data(), cols, row, col);
        worst = std::max(worst, std::fabs(v - values[col]));
      }
    }
    report->verdict(name + ": values", worst < 2e-6, "largest difference " + number(worst));
    if (type != DType::kQ3_K && type != DType::kIQ4_NL) {
      const std::vector<uint8_t> back = cuda::unpack_on_host(type, tiles, rows, cols);
      report->verdict(name + ": round trip", back == m.bytes, "");
    }
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) continue;
    const auto device = upload(m.view);
    report->verdict(name + ": GPU = host", device->bytes.read() == tiles, "");
  }
}

void check_matmul(Report *report) {
  const cuda::Device device = test_device();
  cuda::Device old_device = device;
  old_device.has_int8_mma = false;
  uint64_t seed = 100;
  for (const DType type : kTypes) {
    const bool is_k = dtype_info(type).block_elems == 256;
    const std::pair<int64_t, int64_t> shapes[] = {
        {100, is_k ? 256 : 288}, {48, is_k ? 2816 : 896}, {272, 4096}, {33, 8960}, {16, 28672}};
    for (const auto &[rows, cols] : shapes) {
      const HostMatrix m =
          random_matrix(type, rows, cols, 1 / std::sqrt(static_cast<double>(cols)), ++seed);
      const auto on_device = upload(m.view);
      FusedMatrix matrix;
      matrix.parts.push_back(on_device->matrix);
      const auto acts = random_acts(kMaxTokens, cols, ++seed);
      const std::vector<double> reference = reference_product(m.view, *acts, kMaxTokens);
      const std::string name = std::string("matmul ") + dtype_info(type).name + " " +
                               std::to_string(rows) + "x" + std::to_string(cols);
      const std::vector<float> all =
          run(device, matrix, *acts, kMaxTokens, nullptr, false, nullptr);
      const double error = worst_error(all, reference, kMaxTokens, rows);
      report->verdict(name + ": float64", error < 1e-5, "relative error " + number(error));
      if (!cuda::is_plain(on_device->matrix.type))
        report->verdict(name + ": canonical order", in_canonical_order(m.view, *acts, all), "");
      std::string differs, old_differs;
      for (const int tokens : kTokenCounts) {
        const std::vector<float> some = run(device, matrix, *acts, tokens, nullptr, false, nullptr);
        if (!same_bytes(some.data(), all.data(), some.size()))
          differs += " " + std::to_string(tokens);
        const std::vector<float> old =
            run(old_device, matrix, *acts, tokens, nullptr, false, nullptr);
        if (!same_bytes(old.data(), all.data(), old.size()))
          old_differs += " " + std::to_string(tokens);
      }
      report->verdict(name + ": bytes at every M", differs.empty(),
                      differs.empty() ? "" : "differs at M" + differs);
      report->verdict(name + ": dp4a = mma", old_differs.empty(),
                      old_differs.empty() ? "" : "differs at M" + old_differs);
    }
  }

  // Three matrices of different types in one product, with bias, added to what is there; row counts
  // that do not fill tiles.
  {
    const int64_t cols = 1536;
    const HostMatrix q = random_matrix(DType::kQ4_K, 320, cols, 0.02, 1),
                     k = random_matrix(DType::kQ5_0, 72, cols, 0.02, 2),
                     v = random_matrix(DType::kQ6_K, 72, cols, 0.02, 3),
                     f = random_matrix(DType::kF16, 72, cols, 0.02, 4);
    const auto dq = upload(q.view), dk = upload(k.view), dv = upload(v.view), df = upload(f.view);
    for (const bool has_plain : {false, true}) {
      FusedMatrix matrix;
      matrix.parts = {dq->matrix, dk->matrix, has_plain ? df->matrix : dv->matrix};
      const int64_t rows = matrix.rows();
      const auto acts = random_acts(kMaxTokens, cols, 7);
      const HostMatrix bias = random_vector(rows, 0, 1, 5),
                       start = random_vector(rows * kMaxTokens, 0, 1, 6);
      std::vector<float> bias_values(rows), start_values(rows * kMaxTokens);
      std::memcpy(bias_values.data(), bias.bytes.data(), bias.bytes.size());
      std::memcpy(start_values.data(), start.bytes.data(), start.bytes.size());
      const DeviceArray<float> device_bias(bias_values);
      std::vector<double> reference(static_cast<size_t>(rows) * kMaxTokens);
      int64_t at = 0;
      for (const MatrixView *part : {&q.view, &k.view, has_plain ? &f.view : &v.view}) {
        const std::vector<double> y = reference_product(*part, *acts, kMaxTokens);
        for (int m = 0; m < kMaxTokens; ++m) {
          for (int64_t i = 0; i < part->rows; ++i) {
            const size_t to = static_cast<size_t>(m) * rows + at + i;
            reference[to] =
                y[static_cast<size_t>(m) * part->rows + i] + bias_values[at + i] + start_values[to];
          }
        }
        at += part->rows;
      }
      const std::string name =
          has_plain ? "fused product with an f16 part" : "fused product q4_k|q5_0|q6_k";
      const std::vector<float> all =
          run(device, matrix, *acts, kMaxTokens, device_bias.data(), true, &start_values);
      report->verdict(name + ": float64", worst_error(all, reference, kMaxTokens, rows) < 1e-5,
                      "relative error " + number(worst_error(all, reference, kMaxTokens, rows)));
      std::string differs;
      for (const int tokens : kTokenCounts) {
        for (const cuda::Device *which :
             {&device, static_cast<const cuda::Device *>(&old_device)}) {
          const std::vector<float> some =
              run(*which, matrix, *acts, tokens, device_bias.data(), true, &start_values);
          if (!same_bytes(some.data(), all.data(), some.size()))
            differs += " " + std::to_string(tokens);
        }
      }
      report->verdict(name + ": bytes at every M", differs.empty(), differs);
    }
  }

  // SwiGLU with its quantiser.
  for (const DType type : {DType::kQ4_K, DType::kQ6_K, DType::kQ4_1, DType::kQ8_0}) {
    const int64_t cols = 1024, inner = 288;
    const HostMatrix gate = random_matrix(type, inner, cols, 0.05, 21),
                     up = random_matrix(type, inner, cols, 0.05, 22);
    const auto dg = upload(gate.view), du = upload(up.view);
    const auto acts = random_acts(kMaxTokens, cols, 23);
    const std::vector<double> g = reference_product(gate.view, *acts, kMaxTokens),
                              u = reference_product(up.view, *acts, kMaxTokens);
    const int blocks = static_cast<int>((inner + 63) / 64 * 2);
    const auto run_swiglu = [&](const cuda::Device &on, int tokens) {
      DeviceArray<int8_t> codes(static_cast<size_t>(192) * blocks * 32);
      DeviceArray<float2> scales(static_cast<size_t>(192) * blocks);
      cuda::matmul_swiglu({&on, test_stream()}, dg->matrix, du->matrix, acts->view, nullptr, tokens,
                          {codes.data(), scales.data(), blocks});
      return std::make_pair(codes.read(), scales.read());
    };
    const auto all = run_swiglu(device, kMaxTokens);
    double worst = 0;
    for (int m = 0; m < kMaxTokens; ++m) {
      for (int b = 0; b < inner / 32; ++b) {
        const size_t entry = (static_cast<size_t>(m / 8) * blocks + b) * 8 + m % 8;
        const double d = all.second[entry].x;
        int sum = 0;
        for (int k = 0; k < 32; ++k) {
          const size_t i = static_cast<size_t>(m) * inner + b * 32 + k;
          const double h = g[i] / (1 + std::exp(-g[i])) * u[i];
          const int q = all.first[entry * 32 + position_in_block(k)];
          sum += q;
          const double off = std::fabs(q * d - h) / (d > 0 ? d : 1);
          worst = off <= worst ? worst : off;
          if (!(off == off)) worst = INFINITY;
        }
        if (std::fabs(all.second[entry].y - d * sum) > 1e-5 * std::fabs(d * 127)) worst = INFINITY;
      }
    }
    const std::string name = std::string("swiglu ") + dtype_info(type).name;
    report->verdict(name + ": float64", worst < 0.51,
                    "largest distance " + number(worst) + " of a quantisation step");
    std::string differs;
    for (const int tokens : kTokenCounts) {
      for (const cuda::Device *which : {&device, static_cast<const cuda::Device *>(&old_device)}) {
        const auto some = run_swiglu(*which, tokens);
        bool same = true;
        for (int m = 0; m < tokens; ++m) {
          for (int b = 0; b < inner / 32; ++b) {
            const size_t entry = (static_cast<size_t>(m / 8) * blocks + b) * 8 + m % 8;
            same = same && std::memcmp(&some.second[entry], &all.second[entry], 8) == 0 &&
                   std::memcmp(&some.first[entry * 32], &all.first[entry * 32], 32) == 0;
          }
        }
        if (!same) differs += " " + std::to_string(tokens);
      }
    }
    report->verdict(name + ": bytes at every M", differs.empty(), differs);
  }
}

}  // namespace xllm::check
