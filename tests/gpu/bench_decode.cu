// Decode steps of models of exact shape and Q4_K_M mix, random weights, through the Backend
// interface: ms per step, share of the floor, and where the time goes by stage.
#include <algorithm>
#include <chrono>

#include "base/half.h"
#include "bench_shapes.h"
#include "report.h"

namespace xllm::check {
namespace {

struct StageBytes {
  double qkv = 0, o = 0, ffn = 0, head = 0;
  double all() const { return qkv + o + ffn + head; }
};
StageBytes streamed(const HostModel &model) {
  StageBytes b;
  for (const LayerTensors &l : model.tensors.layers) {
    b.qkv += static_cast<double>(l.q.size_bytes() + l.k.size_bytes() + l.v.size_bytes());
    b.o += static_cast<double>(l.o.size_bytes());
    b.ffn += static_cast<double>(l.gate.size_bytes() + l.up.size_bytes() + l.down.size_bytes());
  }
  b.head = static_cast<double>(model.tensors.head.size_bytes());
  return b;
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// "CTAS" (0: as usual), with "-" behind it for launches that are not dependent.
struct Variant {
  int ctas = 0;
  bool is_dependent = true;
};

Variant parse_variant(const std::string &text) {
  Variant v;
  (void)std::sscanf(text.c_str(), "%d", &v.ctas);
  v.is_dependent = text.find('-') == std::string::npos;
  return v;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

void bench_model(Report *report, const Options &options, const BenchShape &shape,
                 const std::string &mix) {
  const std::string name = std::string(shape.name) + " " + mix;
  const auto model = make_shape(shape, mix);
  cuda::CudaBackend backend{BackendOptions()};
  backend.device().attention_depth = options.attention_depth;
  const int most = *std::max_element(options.batch_sizes.begin(), options.batch_sizes.end());
  const int block_size = 64;
  const int per_seq = (options.context + options.num_steps + 40 + block_size - 1) / block_size;
  const double load_start = now_ms();
  TestEngine engine(&backend, *model, block_size, per_seq * most + 1, most, 3);
  const double load_ms = now_ms() - load_start;
  const StageBytes bytes = streamed(*model);
  report->row({{"bench", "load"},
               {"model", name},
               {"ms", number(load_ms)},
               {"streamed_gb", number(bytes.all() / 1e9)},
               {"device_gb", number(static_cast<double>(engine.weights->size_bytes()) / 1e9)}});
  for (const int bs : options.batch_sizes) {
    fill_cache(&engine);
    std::vector<TestSequence> seqs(static_cast<size_t>(bs));
    std::vector<TestSequence *> all;
    Random random(5);
    for (TestSequence &s : seqs) {
      for (int i = 0; i < options.context + options.num_steps + 40; ++i)
        s.tokens.push_back(random.below(shape.vocab));
      s.num_computed = options.context;
      all.push_back(&s);
    }
    const double kv_bytes = static_cast<double>(engine.kv.layout.bytes_per_token()) *
                            (options.context + options.num_steps / 2.0) * bs;
    const double floor_ms = (bytes.all() + kv_bytes) / options.read_bandwidth * 1e3;
    const std::vector<int> ones(static_cast<size_t>(bs), 1);
    std::map<bool, double> step_ms;
    for (const bool has_graphs : {true, false}) {
      backend.set_graphs(has_graphs);
      for (TestSequence &s : seqs) s.num_computed = options.context;
      std::vector<double> times;
      for (int step = 0; step < options.num_steps; ++step) {
        ForwardBatch b = engine.batch(all, ones);
        if (step > 0)
          std::fill(b.token_ids.begin(), b.token_ids.end(), ForwardBatch::kSampledOnDevice);
        std::vector<SampleRow> rows(all.size());
        for (SampleRow &row : rows) row.num_choosable = shape.vocab;
        std::vector<int32_t> chosen(all.size());
        const double start = now_ms();
        engine.forward(b);
        const bool is_sampled = backend.sample(*engine.workspace, b, rows, chosen);
        const double ms = now_ms() - start;
        if (step >= 8) times.push_back(ms);
        if (!is_sampled || *std::min_element(chosen.begin(), chosen.end()) < 0) {
          report->verdict(name + ": a token is chosen", false,
                          "bs " + std::to_string(bs) + " step " + std::to_string(step));
          break;
        }
        for (TestSequence &s : seqs) s.num_computed += 1;
      }
      step_ms[has_graphs] = times.empty() ? -1 : median(times);
    }
    // The device alone: steps launched back to back.
    backend.set_graphs(true);
    const ForwardBatch b = engine.batch(all, ones);
    cudaEvent_t start, stop;
    cuda::check(cudaEventCreate(&start), "event");
    cuda::check(cudaEventCreate(&stop), "event");
    for (int i = 0; i < 4; ++i) engine.forward(b);
    backend.synchronize();
    cuda::check(cudaEventRecord(start, backend.stream()), "event");
    constexpr int kBackToBack = 20;
    for (int i = 0; i < kBackToBack; ++i) engine.forward(b);
    cuda::check(cudaEventRecord(stop, backend.stream()), "event");
    cuda::check(cudaEventSynchronize(stop), "event");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, start, stop), "event");
    (void)cudaEventDestroy(start);
    (void)cudaEventDestroy(stop);
    const double device_ms = static_cast<double>(ms) / kBackToBack;
    report->row({{"bench", "decode"},
                 {"model", name},
                 {"bs", std::to_string(bs)},
                 {"step_ms", number(step_ms[true])},
                 {"device_ms", number(device_ms)},
                 {"eager_ms", number(step_ms[false])},
                 {"floor_ms", number(floor_ms)},
                 {"share", number(floor_ms / step_ms[true] * 100, "%.1f%%")},
                 {"device_share", number(floor_ms / device_ms * 100, "%.1f%%")}});
    auto &ws = *engine.workspace;
    const auto &w = *engine.weights;
    // Stages by themselves, each with the input that the one before it would have left.
    cuda::CudaWorkspace &state = cuda::as_cuda(ws);
    const auto input_hidden = [&](const float *norm) {
      state.set_input({state.x.data<float>(), shape.hidden, shape.hidden, norm, 1e-6f});
    };
    const auto run_qkv = [&](int i) {
      input_hidden(state.weights->layers[i].attn_norm);
      backend.qkv(ws, w, i, engine.kv, b);
    };
    const auto run_o = [&](int i) {
      const int cols = shape.heads * shape.head_dim;
      state.set_input({state.attention_out.data<float>(), cols, cols, nullptr, 0.0f});
      backend.o_proj(ws, w, i, b);
    };
    const auto run_ffn = [&](int i) {
      input_hidden(state.weights->layers[i].ffn_norm);
      backend.ffn(ws, w, i, b);
    };
    const auto run_head = [&] {
      input_hidden(state.weights->output_norm);
      backend.head(ws, w, b);
    };
    if (options.has_breakdown) {
      const int layers = shape.layers;
      const auto each = [&](const auto &stage) {
        return graph_ms(&backend, [&] {
          for (int i = 0; i < layers; ++i) stage(i);
        });
      };
      const double qkv = each(run_qkv);
      const double attention = each([&](int i) { backend.attention(ws, w, i, engine.kv, b); });
      const double o = each(run_o);
      const double ffn = each(run_ffn);
      const double head = graph_ms(&backend, run_head);
      const auto with_rate = [&](double stage_ms, double stage_bytes) {
        return number(stage_ms) + " (" + number(stage_bytes / stage_ms / 1e9, "%.2f") + " TB/s)";
      };
      report->row({{"bench", "stages"},
                   {"model", name},
                   {"bs", std::to_string(bs)},
                   {"qkv_ms", with_rate(qkv, bytes.qkv)},
                   {"attention_ms", number(attention)},
                   {"o_proj_ms", with_rate(o, bytes.o)},
                   {"ffn_ms", with_rate(ffn, bytes.ffn)},
                   {"head_ms", with_rate(head, bytes.head)}});
    }
    // What another share of an SM does, and launches that are not dependent.
    const cuda::Device usual = backend.device();
    for (const std::string &text : options.variants) {
      const Variant v = parse_variant(text);
      cuda::Device &device = backend.device();
      device = usual;
      if (v.ctas > 0) device.few_ctas = v.ctas;
      device.has_dependent_launch = v.is_dependent && usual.has_dependent_launch;
      const double step = graph_ms(&backend, [&] {
        input_hidden(state.weights->layers[0].attn_norm);
        for (int i = 0; i < shape.layers; ++i) {
          backend.qkv(ws, w, i, engine.kv, b);
          backend.attention(ws, w, i, engine.kv, b);
          backend.o_proj(ws, w, i, b);
          backend.ffn(ws, w, i, b);
        }
        backend.head(ws, w, b);
      });
      const auto each_us = [&](const auto &stage) {
        const double ms = graph_ms(&backend, [&] {
          for (int i = 0; i < shape.layers; ++i) stage(i);
        });
        return number(ms / shape.layers * 1e3);
      };
      report->row({{"bench", "variant"},
                   {"model", name},
                   {"bs", std::to_string(bs)},
                   {"variant", text},
                   {"layers_and_head_ms", number(step)},
                   {"qkv_us", each_us(run_qkv)},
                   {"o_us", each_us(run_o)},
                   {"ffn_us", each_us(run_ffn)},
                   {"head_us", number(1e3 * graph_ms(&backend, run_head))}});
    }
    backend.device() = usual;
    for (TestSequence &s : seqs) engine.release(&s);
  }
}

}  // namespace

void bench_decode(Report *report, const Options &options) {
  for_each_model(options.models, [&](const BenchShape &shape, const std::string &mix) {
    bench_model(report, options, shape, mix);
  });
}

}  // namespace xllm::check
