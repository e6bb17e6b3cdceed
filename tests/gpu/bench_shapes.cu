#include <algorithm>
#include <cmath>
#include <map>

#include "base/half.h"
#include "bench_shapes.h"

namespace xllm::check {
namespace {

const BenchShape kShapes[] = {
    {"qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, false, true, false},
    {"llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256, false, false, false},
    {"qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 128, 151936, true, false, true},
};

}  // namespace

// One set of host tensors per type, shared by all layers: the device holds its own copy for each.
std::unique_ptr<HostModel> make_shape(const BenchShape &s, const std::string &mix) {
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

void for_each_model(const std::vector<std::string> &models,
                    const std::function<void(const BenchShape &, const std::string &mix)> &run) {
  for (const std::string &wanted : models) {
    const size_t colon = wanted.find(':');
    const std::string mix = colon == std::string::npos ? "q4_k_m" : wanted.substr(colon + 1);
    for (const BenchShape &shape : kShapes) {
      if (wanted.substr(0, colon) == shape.name) run(shape, mix);
    }
  }
}

// note: before every batch size, because stages that
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

double graph_ms(cuda::CudaBackend *backend, const std::function<void()> &issue) {
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

}  // namespace xllm::check
