// Decode steps of models of exact shape and Q4_K_M mix, random weights, through the Backend
// interface: ms per step, share of the floor, and where the time goes by stage.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "base/half.h"
#include "report.h"
#include "small_model.h"

namespace xllm::check {
namespace {

struct Shape {
  const char *name;
  int layers, hidden, inner, heads, kv_heads, head_dim, vocab;
  bool has_bias, has_head_norm, is_tied;
};

const Shape kShapes[] = {
    {"qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, false, true, false},
    {"llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256, false, false, false},
    {"qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 128, 151936, true, false, true},
};

// One set of host tensors per type, shared by all layers: the device holds its own copy for each.
std::unique_ptr<HostModel> make_shape(const Shape &s, const std::string &mix) {
  auto model = std::make_unique<HostModel>();
  ModelDims &dims = model->dims;
  dims.num_layers = s.layers;
  dims.hidden_size = s.hidden;
  dims.intermediate_size = s.inner;
  dims.num_heads = s.heads;
  dims.num_kv_heads = s.kv_heads;
  dims.head_dim = s.head_dim;
  dims.vocab_size = s.vocab;
  dims.rms_eps = 1e-6f;
  dims.attention_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_dim)));
  make_rope(&dims, 1e6, 40960);
  uint64_t seed = 1;
  std::map<std::string, MatrixView> made;
  const auto matrix = [&](DType type, int64_t rows, int64_t cols, const std::string &name) {
    const std::string key = name + dtype_info(type).name;
    if (made.count(key) == 0)
      made[key] = model->keep(random_matrix(
          type, rows, cols, 0.7 / std::sqrt(static_cast<double>(cols)), ++seed, name));
    return made[key];
  };
  const auto vector = [&](int64_t size, const std::string &name) {
    if (made.count(name) == 0) made[name] = model->keep(random_vector(size, 1, 0.1, ++seed, name));
    return made[name];
  };
  const DType base = mix == "q6_k" ? DType::kQ6_K : mix == "q8_0" ? DType::kQ8_0 : DType::kQ4_K;
  ModelTensors &t = model->tensors;
  const int64_t q_rows = int64_t{s.heads} * s.head_dim, kv_rows = int64_t{s.kv_heads} * s.head_dim;
  for (int i = 0; i < s.layers; ++i) {
    // Q4_K_M keeps attn_v and ffn_down of half of the layers in q6_k: the first and last eighth,
    // and every third between.
    const bool has_more = mix == "q4_k_m" && (i < s.layers / 8 || i >= 7 * s.layers / 8 ||
                                              (i - s.layers / 8) % 3 == 2);
    const DType more = has_more ? DType::kQ6_K : base;
    LayerTensors layer;
    layer.attn_norm = vector(s.hidden, "attn_norm");
    layer.q = matrix(base, q_rows, s.hidden, "q");
    layer.k = matrix(base, kv_rows, s.hidden, "k");
    layer.v = matrix(more, kv_rows, s.hidden, "v");
    if (s.has_bias) {
      layer.q_bias = vector(q_rows, "q_bias");
      layer.k_bias = vector(kv_rows, "k_bias");
      layer.v_bias = vector(kv_rows, "v_bias");
    }
    if (s.has_head_norm) {
      layer.q_norm = vector(s.head_dim, "q_norm");
      layer.k_norm = vector(s.head_dim, "k_norm");
    }
    layer.o = matrix(base, s.hidden, q_rows, "o");
    layer.ffn_norm = vector(s.hidden, "ffn_norm");
    layer.gate = matrix(base, s.inner, s.hidden, "gate");
    layer.up = matrix(base, s.inner, s.hidden, "up");
    layer.down = matrix(more, s.hidden, s.inner, "down");
    t.layers.push_back(layer);
  }
  t.output_norm = vector(s.hidden, "output_norm");
  const DType head = mix == "q4_k_m" ? DType::kQ6_K : base;
  t.embedding = matrix(s.is_tied ? head : base, s.vocab, s.hidden, "embedding");
  t.head = s.is_tied ? t.embedding : matrix(head, s.vocab, s.hidden, "head");
  return model;
}

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

// Time of one replay of what `issue` puts on the stream, in ms.
template <typename Issue>
double graph_ms(cuda::CudaBackend *backend, const Issue &issue) {
  const cudaStream_t stream = backend->stream();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaEvent_t start, stop;
  cuda::check(cudaEventCreate(&start), "event");
  cuda::check(cudaEventCreate(&stop), "event");
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  issue();
  cuda::check(cudaStreamEndCapture(stream, &graph), "capture");
  cuda::check(cudaGraphInstantiate(&exec, graph, 0), "graph");
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    cuda::check(cudaEventRecord(start, stream), "event");
    cuda::check(cudaGraphLaunch(exec, stream), "graph");
    cuda::check(cudaEventRecord(stop, stream), "event");
    cuda::check(cudaEventSynchronize(stop), "event");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, start, stop), "event");
    if (i >= 2) times.push_back(ms);
  }
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaEventDestroy(start);
  (void)cudaEventDestroy(stop);
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]);
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

// Keys and values of +-1 spread, never zeros. note: before every batch size, because stages that
// run alone add to the residual again and again and leave what they make of it in the cache.
void fill_cache(TestEngine *engine) {
  std::vector<uint16_t> noise(size_t{1} << 22);
  Random random(4);
  for (uint16_t &v : noise) v = float_to_half(static_cast<float>(random.uniform() * 2 - 1));
  const uint64_t bytes =
      engine->kv.layout.block_bytes() * static_cast<uint64_t>(engine->kv.num_blocks);
  const uint64_t piece = std::min<uint64_t>(noise.size() * 2, bytes);
  cuda::check(cudaMemcpy(engine->pool.data(), noise.data(), piece, cudaMemcpyHostToDevice), "fill");
  for (uint64_t at = piece; at < bytes; at += piece) {
    cuda::check(cudaMemcpy(engine->pool.data() + at, engine->pool.data(),
                           std::min(piece, bytes - at), cudaMemcpyDeviceToDevice),
                "fill the cache");
  }
}

void bench_model(Report *report, const Options &options, const Shape &shape,
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
  for (const std::string &wanted : options.models) {
    const size_t colon = wanted.find(':');
    const std::string mix = colon == std::string::npos ? "q4_k_m" : wanted.substr(colon + 1);
    for (const Shape &shape : kShapes) {
      if (wanted.substr(0, colon) == shape.name) bench_model(report, options, shape, mix);
    }
  }
}

}  // namespace xllm::check
