// Every stage of whole steps against float64, each from what the device itself handed to it; and
// the bytes of sequences alone against those of the same sequences in company, in other chunks,
// with and without graphs.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/half.h"
#include "report.h"
#include "small_model.h"

namespace xllm::check {
namespace {

using Rows = std::vector<double>;

std::vector<ModelConfig> configs() {
  std::vector<ModelConfig> all;
  ModelConfig c;
  c.name = "head norms, 64";
  c.has_head_norm = true;
  all.push_back(c);
  c = ModelConfig();
  c.name = "bias, 128, groups of 6";
  c.hidden = 768, c.inner = 864, c.heads = 6, c.kv_heads = 1, c.head_dim = 128;
  c.q = DType::kQ8_0, c.v = DType::kQ5_0, c.o = DType::kQ5_1, c.gate = DType::kQ4_0,
  c.down = DType::kQ8_0;
  c.embedding = DType::kQ8_0, c.head = DType::kQ5_K, c.has_bias = true, c.block_size = 64;
  all.push_back(c);
  c = ModelConfig();
  c.name = "neighbour pairs, groups of 16";
  c.hidden = 576, c.inner = 1536, c.heads = 16, c.kv_heads = 1, c.head_dim = 64;
  c.q = c.v = c.o = c.gate = c.down = c.embedding = c.head = DType::kQ4_1;
  c.is_neighbor = true, c.has_o_bias = true, c.block_size = 32;
  all.push_back(c);
  c = ModelConfig();
  c.name = "window, 32, f16 gate and up";
  c.hidden = 128, c.inner = 352, c.heads = 4, c.kv_heads = 4, c.head_dim = 32;
  c.q = c.v = c.o = c.down = DType::kQ8_0, c.embedding = DType::kF16, c.gate = DType::kF16,
  c.head = DType::kBF16;
  c.window = 50, c.block_size = 8;
  all.push_back(c);
  c = ModelConfig();
  c.name = "window, 64";
  c.window = 70;
  all.push_back(c);
  c = ModelConfig();
  c.name = "tied, groups of 3";
  c.hidden = 576, c.inner = 1536, c.heads = 9, c.kv_heads = 3, c.head_dim = 64;
  c.q = c.v = c.o = c.gate = c.down = c.embedding = DType::kQ4_1;
  c.is_tied = true;
  all.push_back(c);
  c = ModelConfig();
  c.name = "heads of 48";
  c.hidden = 192, c.inner = 320, c.heads = 4, c.kv_heads = 2, c.head_dim = 48;
  c.q = c.v = c.o = c.gate = c.down = c.embedding = c.head = DType::kQ8_0;
  all.push_back(c);
  return all;
}

Rows product(const MatrixView &w, const Rows &x, int rows) {
  Rows y(static_cast<size_t>(rows) * w.rows);
  for (int64_t r = 0; r < w.rows; ++r) {
    const Rows values = dequantize_row(w, r);
    for (int m = 0; m < rows; ++m) {
      double sum = 0;
      for (int64_t k = 0; k < w.cols; ++k)
        sum += values[k] * x[static_cast<size_t>(m) * w.cols + k];
      y[static_cast<size_t>(m) * w.rows + r] = sum;
    }
  }
  return y;
}

Rows rms_norm(const Rows &x, const MatrixView &weight, int rows, double eps) {
  const Rows w = dequantize_row(weight, 0);
  const size_t n = w.size();
  Rows y(x.size());
  for (int m = 0; m < rows; ++m) {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += x[m * n + i] * x[m * n + i];
    const double inverse = 1 / std::sqrt(sum / static_cast<double>(n) + eps);
    for (size_t i = 0; i < n; ++i) y[m * n + i] = x[m * n + i] * inverse * w[i];
  }
  return y;
}

Rows wide(const std::vector<float> &v, size_t count) {
  return Rows(v.begin(), v.begin() + static_cast<long>(count));
}

double relative(const Rows &out, const Rows &reference) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    error += (out[i] - reference[i]) * (out[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  const double r = std::sqrt(error / (norm > 0 ? norm : 1));
  return r == r ? r : INFINITY;
}

// Activations are quantised by chunks of 256 columns in steps of the largest / 1016.
constexpr int64_t kChunk = 256;
double step_of(const double *x, int64_t count) {
  double largest = 0;
  for (int64_t k = 0; k < count; ++k) largest = std::max(largest, std::fabs(x[k]));
  return largest / 1016;
}

// Largest distance of quantised activations from what they stand for, in quantisation steps of
// their chunk.
double quantisation_error(const Rows &act, const Rows &reference, int rows, int64_t cols) {
  double worst = 0;
  for (int m = 0; m < rows; ++m) {
    for (int64_t first = 0; first < cols; first += kChunk) {
      const double *x = reference.data() + m * cols + first;
      const int64_t count = std::min(kChunk, cols - first);
      const double step = std::max(step_of(x, count), 1e-9);
      for (int64_t k = 0; k < count; ++k) {
        const double off = std::fabs(act[m * cols + first + k] - x[k]) / step;
        worst = off <= worst ? worst : off;
        if (!(off == off)) return INFINITY;
      }
    }
  }
  return worst;
}

Rows quantised(const Rows &x, int rows, int64_t cols) {
  Rows y(x.size());
  for (int m = 0; m < rows; ++m) {
    for (int64_t first = 0; first < cols; first += kChunk) {
      const int64_t count = std::min(kChunk, cols - first);
      const double d = step_of(x.data() + m * cols + first, count);
      for (int64_t k = m * cols + first; k < m * cols + first + count; ++k)
        y[k] = d > 0 ? std::nearbyint(x[k] / d) * d : 0;
    }
  }
  return y;
}

// One step, looked at after every stage.
class StageCheck {
 public:
  StageCheck(TestEngine *engine, Report *report, std::string name)
      : e_(*engine), report_(*report), name_(std::move(name)) {}

  void run(const ForwardBatch &b, bool checks_all) {
    rows_ = b.num_tokens();
    const ModelDims &dims = e_.model->dims;
    const ModelTensors &t = e_.model->tensors;
    auto &backend = *e_.backend;
    Workspace &ws = *e_.workspace;
    const int64_t hidden = dims.hidden_size, q_cols = int64_t{dims.num_heads} * dims.head_dim;
    backend.set_graphs(false);
    backend.run_step(ws, b, [&] {
      backend.embed(ws, *e_.weights, b);
      Rows x(static_cast<size_t>(rows_) * hidden);
      for (int m = 0; m < rows_; ++m) {
        const Rows row = dequantize_row(t.embedding, b.token_ids[m]);
        std::copy(row.begin(), row.end(), x.begin() + m * hidden);
      }
      Rows residual = tap(Tap::kResidual, hidden);
      verdict("embed", relative(residual, x), 1e-6);
      Rows act = tap(Tap::kActivations, hidden);
      steps("embed's norm", act, rms_norm(residual, t.layers[0].attn_norm, rows_, dims.rms_eps),
            hidden);
      for (int i = 0; i < dims.num_layers; ++i) {
        const LayerTensors &layer = t.layers[i];
        const std::string at = "layer " + std::to_string(i) + " ";
        backend.qkv(ws, *e_.weights, i, e_.kv, b);
        const Rows q = tap(Tap::kQuery, q_cols);
        const std::vector<uint8_t> pool = e_.pool.read();
        if (checks_all) qkv(at, layer, i, b, act, q, pool);
        backend.attention(ws, *e_.weights, i, e_.kv, b);
        const Rows attended = tap(Tap::kActivations, q_cols);
        attention(at, i, b, q, pool, attended);
        backend.o_proj(ws, *e_.weights, i, b);
        Rows next = tap(Tap::kResidual, hidden);
        if (checks_all) {
          Rows y = product(layer.o, attended, rows_);
          for (int64_t k = 0; k < static_cast<int64_t>(y.size()); ++k) {
            y[k] += residual[k] + (layer.o_bias ? vector_at_cached(layer.o_bias, k % hidden) : 0);
          }
          verdict(at + "o_proj", relative(next, y), 1e-5);
        }
        residual = next;
        act = tap(Tap::kActivations, hidden);
        steps(at + "o_proj's norm", act, rms_norm(residual, layer.ffn_norm, rows_, dims.rms_eps),
              hidden);
        backend.ffn(ws, *e_.weights, i, b);
        next = tap(Tap::kResidual, hidden);
        if (checks_all) {
          const Rows g = product(layer.gate, act, rows_), u = product(layer.up, act, rows_);
          Rows h(g.size());
          for (size_t k = 0; k < h.size(); ++k) h[k] = g[k] / (1 + std::exp(-g[k])) * u[k];
          const Rows y = product(layer.down, quantised(h, rows_, dims.intermediate_size), rows_);
          Rows added(y.size());
          for (size_t k = 0; k < y.size(); ++k) added[k] = next[k] - residual[k];
          verdict(at + "ffn", relative(added, y), 1e-3);
        }
        residual = next;
        act = tap(Tap::kActivations, hidden);
        const MatrixView &norm =
            i + 1 < dims.num_layers ? t.layers[i + 1].attn_norm : t.output_norm;
        steps(at + "ffn's norm", act, rms_norm(residual, norm, rows_, dims.rms_eps), hidden);
      }
      backend.head(ws, *e_.weights, b);
      Rows wanted;
      for (const int32_t row : b.logit_rows)
        wanted.insert(wanted.end(), act.begin() + row * hidden, act.begin() + (row + 1) * hidden);
      const Rows reference = product(t.head, wanted, b.num_logits());
      std::vector<float> logits;
      backend.read_tap(ws, Tap::kLogits, &logits);
      verdict("head", relative(wide(logits, reference.size()), reference), 1e-5);
    });
    backend.set_graphs(true);
  }

 private:
  Rows tap(Tap which, int64_t cols) {
    std::vector<float> values;
    e_.backend->read_tap(*e_.workspace, which, &values);
    return wide(values, static_cast<size_t>(rows_ * cols));
  }
  void verdict(const std::string &what, double error, double limit) {
    report_.verdict(name_ + ": " + what, error < limit, "relative error " + number(error));
  }
  void steps(const std::string &what, const Rows &act, const Rows &reference, int64_t cols) {
    const double off = quantisation_error(act, reference, rows_, cols);
    report_.verdict(name_ + ": " + what, off < 0.52,
                    "largest distance " + number(off) + " of a quantisation step");
  }
  double vector_at_cached(const MatrixView &v, int64_t i) {
    if (cached_from_ != v.data) {
      cached_ = dequantize_row(v, 0);
      cached_from_ = v.data;
    }
    return cached_[static_cast<size_t>(i)];
  }

  const uint16_t *cache_row(const std::vector<uint8_t> &pool, int layer, int64_t kv_index,
                            int index) const {
    const KvLayout &layout = e_.kv.layout;
    const int64_t block = kv_index / layout.block_size, offset = kv_index % layout.block_size;
    const uint64_t at = static_cast<uint64_t>(block) * layout.block_bytes() +
                        static_cast<uint64_t>(layer) * layout.layer_bytes() +
                        static_cast<uint64_t>(index) * layout.page_bytes() +
                        static_cast<uint64_t>(offset) * layout.row_bytes();
    return reinterpret_cast<const uint16_t *>(pool.data() + at);
  }

  void qkv(const std::string &at, const LayerTensors &layer, int index, const ForwardBatch &b,
           const Rows &act, const Rows &q, const std::vector<uint8_t> &pool) {
    const ModelDims &dims = e_.model->dims;
    const int dim = dims.head_dim, pairs = dims.rope.rotary_dim / 2;
    const auto finish = [&](Rows y, const MatrixView &bias, const MatrixView &norm, int heads,
                            bool is_rotated) {
      for (int m = 0; m < rows_; ++m) {
        for (int h = 0; h < heads; ++h) {
          double *x = y.data() + (static_cast<size_t>(m) * heads + h) * dim;
          for (int i = 0; i < dim && bias; ++i) x[i] += vector_at_cached(bias, h * dim + i);
          if (norm) {
            double sum = 0;
            for (int i = 0; i < dim; ++i) sum += x[i] * x[i];
            const double inverse = 1 / std::sqrt(sum / dim + static_cast<double>(dims.rms_eps));
            for (int i = 0; i < dim; ++i) x[i] *= inverse * vector_at_cached(norm, i);
          }
          for (int i = 0; i < pairs && is_rotated; ++i) {
            const double angle = b.positions[m] * std::pow(10000.0, -2.0 * i / dim);
            const int first = dims.rope.is_neighbor ? 2 * i : i,
                      second = dims.rope.is_neighbor ? 2 * i + 1 : i + pairs;
            const double u = x[first], v = x[second];
            x[first] = u * std::cos(angle) - v * std::sin(angle);
            x[second] = u * std::sin(angle) + v * std::cos(angle);
          }
        }
      }
      return y;
    };
    verdict(at + "q",
            relative(q, finish(product(layer.q, act, rows_), layer.q_bias, layer.q_norm,
                               dims.num_heads, true)),
            5e-4);
    const auto cached = [&](int first) {
      Rows out;
      for (int m = 0; m < rows_; ++m) {
        for (int h = 0; h < dims.num_kv_heads; ++h) {
          const uint16_t *row = cache_row(pool, index, b.kv_indices[m], first + h);
          for (int i = 0; i < dim; ++i) out.push_back(static_cast<double>(half_to_float(row[i])));
        }
      }
      return out;
    };
    verdict(at + "k",
            relative(cached(0), finish(product(layer.k, act, rows_), layer.k_bias, layer.k_norm,
                                       dims.num_kv_heads, true)),
            5e-4);
    verdict(at + "v",
            relative(cached(dims.num_kv_heads), finish(product(layer.v, act, rows_), layer.v_bias,
                                                       MatrixView(), dims.num_kv_heads, false)),
            5e-4);
  }

  void attention(const std::string &at, int layer, const ForwardBatch &b, const Rows &q,
                 const std::vector<uint8_t> &pool, const Rows &out) {
    const ModelDims &dims = e_.model->dims;
    const int dim = dims.head_dim, group = dims.num_heads / dims.num_kv_heads,
              block_size = e_.kv.layout.block_size;
    Rows reference(static_cast<size_t>(rows_) * dims.num_heads * dim, 0.0);
    for (int m = 0; m < rows_; ++m) {
      const int32_t *table = b.block_tables.data() + b.seq_index[m] * b.max_blocks;
      const int context = b.positions[m] + 1,
                start = dims.sliding_window > 0 ? std::max(0, context - dims.sliding_window) : 0;
      const auto index_of = [&](int p) {
        return int64_t{table[p / block_size]} * block_size + p % block_size;
      };
      for (int h = 0; h < dims.num_heads; ++h) {
        const double *query = q.data() + (static_cast<size_t>(m) * dims.num_heads + h) * dim;
        double *y = reference.data() + (static_cast<size_t>(m) * dims.num_heads + h) * dim;
        std::vector<double> score(context);
        double top = -INFINITY, total = 0;
        for (int p = start; p < context; ++p) {
          const uint16_t *k = cache_row(pool, layer, index_of(p), h / group);
          double dot = 0;
          for (int i = 0; i < dim; ++i) dot += query[i] * static_cast<double>(half_to_float(k[i]));
          score[p] = dot * static_cast<double>(dims.attention_scale);
          top = std::max(top, score[p]);
        }
        for (int p = start; p < context; ++p) {
          const double weight = std::exp(score[p] - top);
          total += weight;
          const uint16_t *v = cache_row(pool, layer, index_of(p), dims.num_kv_heads + h / group);
          for (int i = 0; i < dim; ++i) y[i] += weight * static_cast<double>(half_to_float(v[i]));
        }
        for (int i = 0; i < dim; ++i) y[i] /= total;
      }
    }
    // Probabilities are f16: up to 2^-11 of a value, half a quantisation step beside the
    // rounding's.
    const double off = quantisation_error(out, reference, rows_, int64_t{dims.num_heads} * dim);
    report_.verdict(name_ + ": " + at + "attention", off < 1.05,
                    "largest distance " + number(off) + " of a quantisation step");
  }

  TestEngine &e_;
  Report &report_;
  std::string name_;
  int rows_ = 0;
  Rows cached_;
  const void *cached_from_ = nullptr;
};

TestSequence random_sequence(int length, int vocab, uint64_t seed) {
  TestSequence s;
  Random random(seed);
  for (int i = 0; i < length; ++i) s.tokens.push_back(random.below(vocab));
  return s;
}

}  // namespace

void check_stages(Report *report, bool is_quick) {
  for (const ModelConfig &config : configs()) {
    cuda::CudaBackend backend{BackendOptions()};
    const auto model = make_model(config, 1000);
    TestEngine engine(&backend, *model, config.block_size, 2000 / config.block_size, 8, 5);
    std::vector<TestSequence> seqs;
    for (const int length : {80, 9, 140, 4})
      seqs.push_back(random_sequence(length, config.vocab, 50 + static_cast<uint64_t>(length)));
    std::vector<TestSequence *> all;
    for (TestSequence &s : seqs) all.push_back(&s);
    StageCheck check(&engine, report, config.name + ", prompts");
    const std::vector<int> prompt = {70, 5, 131, 1};
    check.run(engine.batch(all, prompt), true);
    for (size_t i = 0; i < all.size(); ++i) all[i]->num_computed += prompt[i];
    StageCheck mixed(&engine, report, config.name + ", decode and a chunk");
    mixed.run(engine.batch(all, {1, 1, 5, 1}), true);
    if (is_quick) return;
  }
  // A long context: splits of more than the smallest size.
  ModelConfig config;
  config.name = "17000 keys";
  config.num_layers = 1;
  config.heads = 8, config.kv_heads = 2, config.head_dim = 128, config.block_size = 64;
  cuda::CudaBackend backend{BackendOptions()};
  const auto model = make_model(config, 1);
  TestEngine engine(&backend, *model, config.block_size, 340, 4, 6);
  TestSequence a = random_sequence(17100, config.vocab, 1),
               b = random_sequence(4200, config.vocab, 2);
  while (a.num_computed < 17000) engine.step({&a}, {500});
  while (b.num_computed < 4095) engine.step({&b}, {819});
  StageCheck check(&engine, report, config.name);
  check.run(engine.batch({&a, &b}, {3, 4}), false);
}

void check_invariance(Report *report, bool is_quick) {
  for (const ModelConfig &config : configs()) {
    cuda::CudaBackend backend{BackendOptions()};
    const auto model = make_model(config, 77);
    TestEngine engine(&backend, *model, config.block_size, 20000 / config.block_size, 64, 9);
    const auto vocab = static_cast<size_t>(config.vocab);
    const int lengths[] = {37, 5, 128, 64, 1, 200, 19, 90, 33};
    constexpr int kSteps = 12;
    const auto best = [&](const float *logits) {
      return static_cast<int32_t>(std::max_element(logits, logits + vocab) - logits);
    };
    // Alone, without graphs, the prompt in one piece.
    std::vector<std::vector<float>> alone;
    std::vector<TestSequence> prompts;
    backend.set_graphs(false);
    for (size_t i = 0; i < 9; ++i) {
      prompts.push_back(random_sequence(lengths[i], config.vocab, 300 + i));
      TestSequence s = prompts.back();
      std::vector<float> history = engine.step({&s}, {lengths[i]});
      for (int step = 0; step < kSteps; ++step) {
        s.tokens.push_back(best(history.data() + history.size() - vocab));
        const std::vector<float> next = engine.step({&s}, {1});
        history.insert(history.end(), next.begin(), next.end());
      }
      bool finite = true;
      for (const float v : history) finite = finite && std::isfinite(v);
      report->verdict(config.name + ": finite logits", finite, "sequence " + std::to_string(i));
      alone.push_back(history);
      engine.release(&s);
    }
    // The same in chunks.
    for (const int chunk : {1, 7, 64}) {
      std::string differs;
      for (const size_t i : {0u, 2u, 5u}) {
        TestSequence s = prompts[i];
        std::vector<float> logits;
        while (s.num_computed < lengths[i])
          logits = engine.step({&s}, {std::min(chunk, lengths[i] - s.num_computed)});
        if (std::memcmp(logits.data(), alone[i].data(), vocab * 4) != 0)
          differs += " " + std::to_string(i);
        engine.release(&s);
      }
      report->verdict(config.name + ": prompts in chunks of " + std::to_string(chunk),
                      differs.empty(), "sequences that differ:" + differs);
    }
    // In company: `copies` of each sequence start together and decode together, graphs on and off,
    // the device choosing the tokens.
    for (const bool has_graphs : {false, true}) {
      for (const int copies : {1, 7}) {
        backend.set_graphs(has_graphs);
        std::vector<TestSequence> many;
        for (int c = 0; c < copies; ++c) many.insert(many.end(), prompts.begin(), prompts.end());
        std::vector<TestSequence *> all;
        std::vector<int> counts;
        for (size_t i = 0; i < many.size(); ++i) {
          all.push_back(&many[i]);
          counts.push_back(lengths[i % 9]);
        }
        std::string differs;
        std::vector<float> logits = engine.step(all, counts);
        for (int step = 0; step <= kSteps; ++step) {
          for (size_t i = 0; i < all.size(); ++i) {
            if (std::memcmp(logits.data() + i * vocab,
                            alone[i % 9].data() + static_cast<size_t>(step) * vocab,
                            vocab * 4) != 0 &&
                differs.size() < 60) {
              differs += " step " + std::to_string(step) + " sequence " + std::to_string(i) + ";";
            }
          }
          if (step == kSteps) break;
          for (size_t i = 0; i < all.size(); ++i)
            all[i]->tokens.push_back(best(logits.data() + i * vocab));
          ForwardBatch b = engine.batch(all, std::vector<int>(all.size(), 1));
          engine.forward(b);
          std::vector<SampleRow> rows(all.size());
          for (SampleRow &row : rows) row.num_choosable = config.vocab;
          std::vector<int32_t> chosen(all.size(), -2);
          const bool is_sampled = backend.sample(*engine.workspace, b, rows, chosen);
          const float *now = backend.host_logits(*engine.workspace);
          logits.assign(now, now + all.size() * vocab);
          for (size_t i = 0; i < all.size(); ++i) {
            all[i]->num_computed += 1;
            if (!is_sampled || chosen[i] != best(logits.data() + i * vocab)) differs += " sampler";
          }
        }
        report->verdict(config.name + ": " + std::to_string(all.size()) + " at once, graphs " +
                            (has_graphs ? "on" : "off"),
                        differs.empty(), differs);
        for (TestSequence &s : many) engine.release(&s);
      }
    }
    // A token that never leaves the device gives the bytes of one that did.
    {
      TestSequence s = prompts[0];
      engine.step({&s}, {lengths[0]});
      std::vector<float> logits;
      bool same = true;
      for (int step = 0; step < 6; ++step) {
        std::vector<SampleRow> rows(1);
        rows[0].num_choosable = config.vocab;
        std::vector<int32_t> chosen(1);
        ForwardBatch last;
        last.logit_rows = {0};
        backend.sample(*engine.workspace, last, rows, chosen);
        s.tokens.push_back(chosen[0]);
        ForwardBatch b = engine.batch({&s}, {1});
        b.token_ids[0] = ForwardBatch::kSampledOnDevice;
        engine.forward(b);
        s.num_computed += 1;
        const float *now = backend.host_logits(*engine.workspace);
        same = same && std::memcmp(now, alone[0].data() + static_cast<size_t>(step + 1) * vocab,
                                   vocab * 4) == 0;
      }
      report->verdict(config.name + ": sampled on the device", same, "");
      engine.release(&s);
    }
    if (is_quick) return;
  }
}

}  // namespace xllm::check
