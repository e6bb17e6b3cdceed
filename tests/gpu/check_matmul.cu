// Repacking and the matrix products, every type, against float64; and the bytes of one kernel
// against those of another.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "backend/cuda/act_rows.h"
#include "backend/cuda/matmul.h"
#include "backend/cuda/repack.h"
#include "device_array.h"
#include "host_acts.h"
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

// Rows on the device, as they are and as the host quantises them.
struct Acts {
  HostActs host;
  DeviceArray<float> x;
  DeviceArray<uint8_t> bytes;
  ActView view;
};

std::unique_ptr<Acts> acts_of(HostActs host) {
  auto acts = std::unique_ptr<Acts>(
      new Acts{HostActs(), DeviceArray<float>(host.x), DeviceArray<uint8_t>(host.bytes), {}});
  acts->host = std::move(host);
  acts->view = {acts->bytes.data(), acts->host.num_chunks};
  return acts;
}

std::unique_ptr<Acts> random_acts(int tokens, int64_t cols, uint64_t seed) {
  return acts_of(quantize_on_host(random_rows(tokens, cols, seed), tokens, cols));
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
      const int16_t *q = acts.host.q.data() + static_cast<int64_t>(m) * acts.host.num_chunks * 256;
      double sum = 0;
      for (int chunk = 0; chunk < acts.host.num_chunks; ++chunk) {
        double part = 0;
        for (int64_t k = chunk * 256; k < std::min<int64_t>(w.cols, chunk * 256 + 256); ++k)
          part += values[k] * q[k];
        sum += part * static_cast<double>(acts.host.scales[m * acts.host.num_chunks + chunk]);
      }
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

// Every number of tokens that one launch takes, and some that take several; fewer of them where a
// matrix is large.
constexpr int kMaxTokens = 300;
std::vector<int> token_counts(bool has_all, bool is_tiny) {
  // note: whole parts of the tile kernel's tokens: of others it reads groups that do not exist and
  // leaves them alone (mma_tile.cu, shared_bytes), which racecheck would report.
  if (is_tiny) return {1, 2, 4, 8, 16, 32, 64};
  if (!has_all) return {1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 64, 65, 100, 130, 300};
  std::vector<int> counts = {65, 96, 97, 128, 130, 161, 224, 300};
  for (int tokens = 1; tokens <= 64; ++tokens) counts.push_back(tokens);
  return counts;
}

// What a product is asked for beside its matrix and activations. norm_weight: of the rows that a
// product takes as they are; acts then hold them under that norm.
struct Asked {
  const float *bias = nullptr;
  cuda::Finish finish = cuda::Finish::kStore;
  const std::vector<float> *start = nullptr;  // of the output
  const float *norm_weight = nullptr;
  float eps = 0;
  bool leaves_partials = false;
};

// The outputs [tokens][rows], from poison or from `start`.
std::vector<float> run(const cuda::Device &device, const FusedMatrix &matrix, const Acts &acts,
                       int tokens, const Asked &asked = Asked()) {
  const int64_t rows = asked.finish == cuda::Finish::kSwiGlu ? matrix.rows() / 2 : matrix.rows();
  DeviceArray<float> out(static_cast<size_t>(tokens) * rows);
  if (asked.start != nullptr)
    out.fill(std::vector<float>(asked.start->begin(), asked.start->begin() + tokens * rows));
  const DeviceArray<float> partials(
      std::max<size_t>(cuda::partial_floats(matrix.rows(), matrix.cols(), tokens), 1));
  cuda::Product product = {};
  product.matrix = &matrix;
  if (cuda::takes_rows(device, matrix, tokens)) {
    product.rows = {acts.x.data(), acts.host.cols, static_cast<int>(acts.host.cols),
                    asked.norm_weight, asked.eps};
  } else {
    product.act = acts.view;
  }
  product.num_tokens = tokens;
  product.out = out.data();
  product.out_stride = rows;
  product.bias = asked.bias;
  product.finish = asked.finish;
  product.partials = partials.data();
  const cuda::Launch launch = {&device, test_stream()};
  if (asked.leaves_partials) {
    // Bytes do not depend on who adds the slices up.
    cuda::Partials left;
    cuda::matmul(launch, product, &left);
    if (left.data != nullptr) {
      cuda::add_partials(launch, left, tokens, asked.bias, asked.finish == cuda::Finish::kAdd,
                         out.data(), rows);
    }
  } else {
    cuda::matmul(launch, product);
  }
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
      const float y =
          cuda::product_on_host(cuda::weight_type_of(w.dtype), tiles.data(), w.cols, row,
                                acts.host.q.data() + token * acts.host.num_chunks * 256,
                                acts.host.scales.data() + token * acts.host.num_chunks);
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

void check_matmul(Report *report, bool is_tiny) {
  const cuda::Device device = test_device();
  cuda::Device old_device = device;
  old_device.has_int8_mma = false;
  uint64_t seed = 100;
  for (const DType type : kTypes) {
    const bool is_k = dtype_info(type).block_elems == 256;
    if (is_tiny && type != DType::kQ4_K && type != DType::kQ6_K && type != DType::kQ8_0) continue;
    const std::pair<int64_t, int64_t> shapes[] = {
        {100, is_k ? 256 : 288}, {48, is_k ? 2816 : 896}, {272, 4096}, {33, 8960}, {16, 28672}};
    for (const auto &[rows, cols] : shapes) {
      if (is_tiny && rows != 48) continue;
      const HostMatrix m =
          random_matrix(type, rows, cols, 1 / std::sqrt(static_cast<double>(cols)), ++seed);
      const auto on_device = upload(m.view);
      FusedMatrix matrix;
      matrix.parts.push_back(on_device->matrix);
      const auto acts = random_acts(kMaxTokens, cols, ++seed);
      const std::vector<double> reference = reference_product(m.view, *acts, kMaxTokens);
      const std::string name = std::string("matmul ") + dtype_info(type).name + " " +
                               std::to_string(rows) + "x" + std::to_string(cols);
      const std::vector<float> all = run(device, matrix, *acts, kMaxTokens);
      const double error = worst_error(all, reference, kMaxTokens, rows);
      report->verdict(name + ": float64", error < 2e-6, "relative error " + number(error));
      if (!cuda::is_plain(on_device->matrix.type))
        report->verdict(name + ": canonical order", in_canonical_order(m.view, *acts, all), "");
      std::string differs, old_differs;
      for (const int tokens : token_counts(rows == 48, is_tiny)) {
        const std::vector<float> some = run(device, matrix, *acts, tokens);
        if (!same_bytes(some.data(), all.data(), some.size()))
          differs += " " + std::to_string(tokens);
        const std::vector<float> old = run(old_device, matrix, *acts, tokens);
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
      Asked asked;
      asked.bias = device_bias.data();
      asked.finish = cuda::Finish::kAdd;
      asked.start = &start_values;
      const std::vector<float> all = run(device, matrix, *acts, kMaxTokens, asked);
      report->verdict(name + ": float64", worst_error(all, reference, kMaxTokens, rows) < 1e-5,
                      "relative error " + number(worst_error(all, reference, kMaxTokens, rows)));
      std::string differs;
      for (const int tokens : token_counts(false, is_tiny)) {
        for (const cuda::Device *which :
             {&device, static_cast<const cuda::Device *>(&old_device)}) {
          for (const bool leaves : {false, true}) {
            asked.leaves_partials = leaves;
            const std::vector<float> some = run(*which, matrix, *acts, tokens, asked);
            if (!same_bytes(some.data(), all.data(), some.size()))
              differs += " " + std::to_string(tokens);
          }
        }
      }
      report->verdict(name + ": bytes at every M", differs.empty(), differs);
    }
  }

  // SwiGLU; row counts that do not fill tiles.
  for (const DType type : {DType::kQ4_K, DType::kQ6_K, DType::kQ4_1, DType::kQ8_0}) {
    const int64_t cols = 1024;
    for (const int64_t inner : {288, 1000}) {
      if (is_tiny && (inner != 288 || type != DType::kQ4_K)) continue;
      const HostMatrix gate = random_matrix(type, inner, cols, 0.05, 21),
                       up = random_matrix(type, inner, cols, 0.05, 22);
      const auto dg = upload(gate.view), du = upload(up.view);
      FusedMatrix matrix;
      matrix.parts = {dg->matrix, du->matrix};
      const auto acts = random_acts(kMaxTokens, cols, 23);
      std::vector<double> reference = reference_product(gate.view, *acts, kMaxTokens);
      const std::vector<double> u = reference_product(up.view, *acts, kMaxTokens);
      for (size_t i = 0; i < reference.size(); ++i)
        reference[i] = reference[i] / (1 + std::exp(-reference[i])) * u[i];
      Asked asked;
      asked.finish = cuda::Finish::kSwiGlu;
      const std::vector<float> all = run(device, matrix, *acts, kMaxTokens, asked);
      const std::string name =
          std::string("swiglu ") + dtype_info(type).name + " " + std::to_string(inner);
      const double error = worst_error(all, reference, kMaxTokens, inner);
      report->verdict(name + ": float64", error < 5e-6, "relative error " + number(error));
      std::string differs;
      for (const int tokens : token_counts(false, is_tiny)) {
        for (const cuda::Device *which :
             {&device, static_cast<const cuda::Device *>(&old_device)}) {
          const std::vector<float> some = run(*which, matrix, *acts, tokens, asked);
          if (!same_bytes(some.data(), all.data(), some.size()))
            differs += " " + std::to_string(tokens);
        }
      }
      report->verdict(name + ": bytes at every M", differs.empty(), differs);
    }
  }

  // Rows under a norm: what a product quantises itself against what the host does.
  for (const DType type : {DType::kQ4_K, DType::kQ8_0}) {
    for (const int64_t cols : {1536, 4096, 5120}) {
      if (is_tiny && cols != 1536) continue;
      const HostMatrix m = random_matrix(type, 96, cols, 0.02, 31);
      const auto on_device = upload(m.view);
      FusedMatrix matrix;
      matrix.parts.push_back(on_device->matrix);
      const HostMatrix weight = random_vector(cols, 1, 0.3, 32);
      std::vector<float> weights(static_cast<size_t>(cols));
      std::memcpy(weights.data(), weight.bytes.data(), weight.bytes.size());
      const DeviceArray<float> device_weights(weights);
      constexpr float kEps = 1e-5f;
      const auto acts =
          acts_of(quantize_on_host(random_rows(4, cols, 33), 4, cols, weights.data(), kEps));
      Asked asked;
      asked.norm_weight = device_weights.data();
      asked.eps = kEps;
      const std::vector<float> all = run(old_device, matrix, *acts, 4);
      std::string differs;
      for (const int tokens : {1, 2, 3, 4}) {
        const std::vector<float> some = run(device, matrix, *acts, tokens, asked);
        if (!same_bytes(some.data(), all.data(), some.size()))
          differs += " " + std::to_string(tokens);
      }
      report->verdict(std::string("norm before a product ") + dtype_info(type).name + " " +
                          std::to_string(cols) + ": bytes at every M",
                      differs.empty(), differs);
    }
  }
}

void check_rows(Report *report, bool is_tiny) {
  const cuda::Device device = test_device();
  const cuda::Launch launch = {&device, test_stream()};
  constexpr int kTokens = 13;
  constexpr float kEps = 1e-6f;
  for (const int64_t cols : {32, 250, 1536, 4096, 4128, 12288, 16384, 28672}) {
    if (is_tiny && cols != 250 && cols != 4128) continue;
    const HostMatrix weight = random_vector(cols, 1, 0.3, 41), bias = random_vector(cols, 0, 1, 42);
    std::vector<float> weights(static_cast<size_t>(cols)), biases(static_cast<size_t>(cols));
    std::memcpy(weights.data(), weight.bytes.data(), weight.bytes.size());
    std::memcpy(biases.data(), bias.bytes.data(), bias.bytes.size());
    const DeviceArray<float> device_weights(weights), device_bias(biases);
    std::vector<float> x = random_rows(kTokens, cols, 43);
    x[3] = 0;
    for (int64_t i = 0; i < std::min<int64_t>(cols, 256); ++i) x[cols + i] = 0;  // a chunk of zeros
    constexpr int kSlices = 3;
    const std::vector<float> sums = random_rows(kTokens * kSlices, cols, 44);
    const DeviceArray<float> device_sums(sums);
    for (const bool has_norm : {false, true}) {
      if (has_norm && cols > cuda::kMaxNormCols) continue;
      for (const bool has_partials : {false, true}) {
        std::vector<float> added = x;
        for (size_t i = 0; i < added.size() && has_partials; ++i) {
          const float y = (sums[i] + sums[added.size() + i]) + sums[2 * added.size() + i];
          added[i] = added[i] + (y + biases[i % static_cast<size_t>(cols)]);
        }
        const HostActs expected =
            quantize_on_host(added, kTokens, cols, has_norm ? weights.data() : nullptr, kEps);
        const DeviceArray<float> device_x(x);
        DeviceArray<uint8_t> bytes(expected.bytes.size());
        bytes.zero();
        const ActView view = {bytes.data(), expected.num_chunks};
        const cuda::ActRows rows = {device_x.data(), cols, static_cast<int>(cols),
                                    has_norm ? device_weights.data() : nullptr, kEps};
        if (has_partials) {
          cuda::add_and_quantize_rows(launch, {device_sums.data(), kSlices, static_cast<int>(cols)},
                                      device_bias.data(), device_x.data(), rows, kTokens, view);
        } else {
          cuda::quantize_rows(launch, rows, kTokens, view);
        }
        const bool same = bytes.read() == expected.bytes && device_x.read() == added;
        report->verdict("rows of " + std::to_string(cols) + (has_norm ? ", norm" : "") +
                            (has_partials ? ", partial sums" : "") + ": GPU = host",
                        same, "");
        double worst = 0;
        for (int m = 0; m < kTokens && !has_norm; ++m) {
          for (int64_t k = 0; k < cols; ++k) {
            const float scale =
                expected.scales[static_cast<size_t>(m * expected.num_chunks + k / 256)];
            const double off =
                std::fabs(expected.value(m, k) - static_cast<double>(added[m * cols + k]));
            if (scale > 0) worst = std::max(worst, off / static_cast<double>(scale));
          }
        }
        report->verdict("rows of " + std::to_string(cols) + ": within half a step", worst < 0.501,
                        number(worst));
        std::vector<float> expanded(static_cast<size_t>(kTokens) * cols);
        const DeviceArray<float> device_expanded(expanded);
        cuda::expand_acts(launch, view, kTokens, static_cast<int>(cols), device_expanded.data());
        expanded = device_expanded.read();
        bool is_value = true;
        for (size_t i = 0; i < expanded.size(); ++i) {
          const auto n = static_cast<size_t>(cols);
          is_value =
              is_value && expanded[i] == static_cast<float>(expected.value(
                                             static_cast<int>(i / n), static_cast<int64_t>(i % n)));
        }
        report->verdict("rows of " + std::to_string(cols) + ": expanded again", is_value, "");
      }
    }
  }
  // What is not finite is seen in every product of its chunk.
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    std::vector<float> x = random_rows(1, 512, 45);
    x[300] = bad;
    const DeviceArray<float> device_x(x);
    DeviceArray<uint8_t> bytes(static_cast<size_t>(2 * cuda::kActChunkBytes));
    bytes.zero();
    cuda::quantize_rows(launch, {device_x.data(), 512, 512, nullptr, 0.0f}, 1, {bytes.data(), 2});
    const std::vector<uint8_t> found = bytes.read();
    float scale = 0;
    std::memcpy(&scale, found.data() + cuda::kActChunkBytes + cuda::act_codes_bytes(8), 4);
    report->verdict("a scale of what is not finite", !std::isfinite(scale), number(scale));
  }
}

}  // namespace xllm::check
