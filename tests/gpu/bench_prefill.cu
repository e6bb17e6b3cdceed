// A piece of a prompt through the layers of models of exact shape and mix, random weights: us per
// layer and 64 tokens by stage, and tokens a second of the whole step.
#include <algorithm>

#include "bench_shapes.h"
#include "report.h"

namespace xllm::check {
namespace {

// ms of one step of those launched back to back.
double step_ms(TestEngine *engine, const ForwardBatch &b) {
  constexpr int kSteps = 3;
  cudaEvent_t start, stop;
  cuda::check(cudaEventCreate(&start), "event");
  cuda::check(cudaEventCreate(&stop), "event");
  engine->forward(b);
  cuda::check(cudaEventRecord(start, engine->backend->stream()), "event");
  for (int i = 0; i < kSteps; ++i) engine->forward(b);
  cuda::check(cudaEventRecord(stop, engine->backend->stream()), "event");
  cuda::check(cudaEventSynchronize(stop), "event");
  float ms = 0;
  cuda::check(cudaEventElapsedTime(&ms, start, stop), "event");
  (void)cudaEventDestroy(start);
  (void)cudaEventDestroy(stop);
  return static_cast<double>(ms) / kSteps;
}

void bench_model(Report *report, const Options &options, BenchShape shape, const std::string &mix) {
  shape.vocab = 4096;  // a prompt has logits of one row, and a vocabulary takes seconds to make
  const auto model = make_shape(shape, mix);
  cuda::CudaBackend backend{BackendOptions()};
  const int most = *std::max_element(options.prompt_tokens.begin(), options.prompt_tokens.end());
  constexpr int kBlockSize = 64;
  TestEngine engine(&backend, *model, kBlockSize, most / kBlockSize + 2, 1, 3);
  for (const int tokens : options.prompt_tokens) {
    fill_cache(&engine);
    TestSequence sequence;
    Random random(5);
    for (int i = 0; i < tokens; ++i) sequence.tokens.push_back(random.below(shape.vocab));
    const ForwardBatch b = engine.batch({&sequence}, {tokens});
    const double step = step_ms(&engine, b);
    auto &ws = *engine.workspace;
    const auto &w = *engine.weights;
    cuda::CudaWorkspace &state = cuda::as_cuda(ws);
    const auto input_hidden = [&](const float *norm) {
      state.set_input({state.x.data<float>(), shape.hidden, shape.hidden, norm, 1e-6f});
    };
    // us per layer and 64 tokens.
    const auto each = [&](const std::function<void(int)> &stage) {
      const double ms = graph_ms(&backend, [&] {
        for (int i = 0; i < shape.layers; ++i) stage(i);
      });
      return number(ms * 1e3 / shape.layers * 64 / tokens);
    };
    const std::string qkv = each([&](int i) {
      input_hidden(state.weights->layers[static_cast<size_t>(i)].attn_norm);
      backend.qkv(ws, w, i, engine.kv, b);
    });
    const std::string attention = each([&](int i) { backend.attention(ws, w, i, engine.kv, b); });
    const std::string o = each([&](int i) {
      const int cols = shape.heads * shape.head_dim;
      state.set_input({state.attention_out.data<float>(), cols, cols, nullptr, 0.0f});
      backend.o_proj(ws, w, i, b);
    });
    const std::string ffn = each([&](int i) {
      input_hidden(state.weights->layers[static_cast<size_t>(i)].ffn_norm);
      backend.ffn(ws, w, i, b);
    });
    report->row({{"bench", "prefill"},
                 {"model", std::string(shape.name) + " " + mix},
                 {"tokens", std::to_string(tokens)},
                 {"step_ms", number(step)},
                 {"tokens_per_s", number(tokens / step * 1e3, "%.0f")},
                 {"qkv_us", qkv},
                 {"attention_us", attention},
                 {"o_us", o},
                 {"ffn_us", ffn}});
    engine.release(&sequence);
  }
}

}  // namespace

void bench_prefill(Report *report, const Options &options) {
  for_each_model(options.models, [&](const BenchShape &shape, const std::string &mix) {
    bench_model(report, options, shape, mix);
  });
}

}  // namespace xllm::check
