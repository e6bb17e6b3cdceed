// Attention of a piece of a prompt at several depths, by itself: us of a layer, and TFLOPS of the
// keys that the rows attend to.
#include <algorithm>

#include "report.h"
#include "small_model.h"

namespace xllm::check {
namespace {

struct Shape {
  const char *name;
  int heads, kv_heads, head_dim;
};

constexpr Shape kShapes[] = {{"qwen3-8b, llama3-8b", 32, 8, 128}, {"qwen2.5-1.5b", 12, 2, 128}};
constexpr int kContexts[] = {512, 2048, 16384, 32768};
constexpr int kRows = 2048;  // of the piece, which ends with the context

// Median of a few calls, each by itself.
double attention_us(cuda::CudaBackend *backend, TestEngine *engine, const ForwardBatch &batch,
                    int num_calls) {
  cudaEvent_t start, stop;
  cuda::check(cudaEventCreate(&start), "event");
  cuda::check(cudaEventCreate(&stop), "event");
  std::vector<float> times;
  for (int i = 0; i < num_calls + 1; ++i) {
    cuda::check(cudaEventRecord(start, backend->stream()), "event");
    backend->attention(*engine->workspace, *engine->weights, 0, engine->kv, batch);
    cuda::check(cudaEventRecord(stop, backend->stream()), "event");
    cuda::check(cudaEventSynchronize(stop), "event");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, start, stop), "event");
    if (i > 0) times.push_back(ms);
  }
  (void)cudaEventDestroy(start);
  (void)cudaEventDestroy(stop);
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]) * 1e3;
}

}  // namespace

void bench_prompt_attention(Report *report, const Options &options) {
  for (const Shape &shape : kShapes) {
    ModelConfig config;
    config.num_layers = 1;
    config.hidden = 256, config.inner = 256, config.vocab = 96;
    config.heads = shape.heads, config.kv_heads = shape.kv_heads, config.head_dim = shape.head_dim;
    config.q = config.v = config.o = config.gate = config.down = config.embedding = config.head =
        DType::kQ8_0;
    config.has_head_norm = true;
    const auto model = make_model(config, 31);
    cuda::CudaBackend backend{BackendOptions()};
    const int block_size = 64;
    TestEngine engine(&backend, *model, block_size, 32768 / block_size + 1, 1, 32);
    engine.pool.fill(
        random_cache(static_cast<size_t>(engine.kv.num_blocks) * engine.kv.layout.block_bytes()));
    for (const int context : kContexts) {
      if (options.is_quick && context < 32768) continue;
      TestSequence s;
      for (int i = 0; i < context; ++i) s.tokens.push_back(i % config.vocab);
      s.num_computed = std::max(0, context - kRows);
      const int num_rows = context - s.num_computed;
      const ForwardBatch batch = engine.batch({&s}, {num_rows});
      engine.forward(batch);
      for (const bool is_narrow : {true, false}) {
        backend.device().has_narrow_tiles = is_narrow;
        const double us = attention_us(&backend, &engine, batch, options.is_quick ? 1 : 5);
        const double keys = num_rows * (context - (num_rows - 1) / 2.0);
        const double flop = 4.0 * keys * shape.heads * shape.head_dim;
        report->row({{"bench", "prompt_attention"},
                     {"model", shape.name},
                     {"context", std::to_string(context)},
                     {"rows", std::to_string(num_rows)},
                     {"tiles", is_narrow ? "narrow" : "as usual"},
                     {"us", number(us)},
                     {"tflops", number(flop / us * 1e-6)}});
      }
      backend.device().has_narrow_tiles = false;
      engine.release(&s);
    }
  }
}

}  // namespace xllm::check
