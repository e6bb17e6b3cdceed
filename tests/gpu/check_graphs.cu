// The fused paths of decode, in graphs, on a model small enough for compute-sanitizer's racecheck:
// the same logits and tokens as without graphs, where each stage ends by itself.
#include <cstring>

#include "report.h"
#include "small_model.h"

namespace xllm::check {
namespace {

struct Run {
  std::vector<float> logits;
  std::vector<int32_t> tokens;
};

Run decode(cuda::CudaBackend *backend, TestEngine *engine, int num_seqs, int vocab, int num_steps) {
  Run run;
  std::vector<TestSequence> sequences(static_cast<size_t>(num_seqs));
  std::vector<TestSequence *> all;
  for (size_t i = 0; i < sequences.size(); ++i) {
    for (size_t t = 0; t < 3 + 5 * i; ++t)
      sequences[i].tokens.push_back(static_cast<int32_t>((7 * i + 3 * t) % 90));
    all.push_back(&sequences[i]);
  }
  std::vector<int> counts;
  for (const TestSequence &s : sequences) counts.push_back(static_cast<int>(s.tokens.size()));
  for (int step = 0; step < num_steps; ++step) {
    const ForwardBatch batch = engine->batch(all, counts);
    engine->forward(batch);
    std::vector<SampleRow> rows(sequences.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].num_choosable = vocab;
      rows[i].temperature = i % 2 == 0 ? 0.0f : 0.8f;
      rows[i].top_k = 20;
      rows[i].top_p = 0.9f;
      rows[i].seed = i;
      rows[i].position = static_cast<uint64_t>(step);
    }
    std::vector<int32_t> chosen(rows.size());
    if (!backend->sample(*engine->workspace, batch, rows, chosen)) chosen.assign(rows.size(), -9);
    const float *logits = backend->host_logits(*engine->workspace);
    run.logits.insert(run.logits.end(), logits, logits + rows.size() * static_cast<size_t>(vocab));
    run.tokens.insert(run.tokens.end(), chosen.begin(), chosen.end());
    for (size_t i = 0; i < sequences.size(); ++i) {
      sequences[i].num_computed += counts[i];
      sequences[i].tokens.push_back(chosen[i]);
      counts[i] = 1;
    }
  }
  for (TestSequence &s : sequences) engine->release(&s);
  return run;
}

}  // namespace

void check_graphs(Report *report, bool is_tiny) {
  ModelConfig config;
  config.num_layers = 2;
  config.hidden = 256, config.inner = 512, config.heads = 4, config.kv_heads = 2;
  config.vocab = 512;
  cuda::CudaBackend backend{BackendOptions()};
  const auto model = make_model(config, 11);
  TestEngine engine(&backend, *model, config.block_size, 64, 16, 12);
  // note: the first step is the prompts', a graph is captured in the third and replayed after it.
  const int num_steps = is_tiny ? 4 : 5;
  for (const int num_seqs : {1, 2, 6, 12}) {
    if (is_tiny && num_seqs == 12) continue;
    backend.set_graphs(false);
    const Run plain = decode(&backend, &engine, num_seqs, config.vocab, num_steps);
    backend.set_graphs(true);
    const Run fused = decode(&backend, &engine, num_seqs, config.vocab, num_steps);
    const bool same = plain.tokens == fused.tokens && plain.logits.size() == fused.logits.size() &&
                      std::memcmp(plain.logits.data(), fused.logits.data(),
                                  plain.logits.size() * sizeof(float)) == 0;
    report->verdict("graphs: " + std::to_string(num_seqs) + " sequences as without", same, "");
  }
}

}  // namespace xllm::check
