// What the sampler adds to a step: the choice of a token for each row of logits that are there, by
// what the requests ask for, from the host's call to the ids in its memory.
#include <algorithm>
#include <chrono>

#include "report.h"
#include "small_model.h"

namespace xllm::check {
namespace {

constexpr int kVocab = 151936;
constexpr int kNumCounts = 500;  // different tokens of a conversation

struct Asked {
  const char *name;
  float temperature;
  int top_k;
  float top_p, min_p;
  bool has_penalties;
};

constexpr Asked kAsked[] = {
    {"largest", 0, 0, 1, 0, false},
    {"largest, penalties", 0, 0, 1, 0, true},
    {"temperature", 0.8f, 0, 1, 0, false},
    {"top_k 40", 0.8f, 40, 1, 0, false},
    {"top_p 0.95", 0.8f, 0, 0.95f, 0, false},
    {"min_p 0.05", 0.8f, 0, 1, 0.05f, false},
    {"top_k, top_p, min_p, penalties", 0.8f, 40, 0.95f, 0.05f, true},
};

double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void bench_sample(Report *report) {
  ModelConfig config;
  config.num_layers = 1;
  config.hidden = 256, config.inner = 256, config.heads = 4, config.kv_heads = 2;
  config.vocab = kVocab;
  cuda::CudaBackend backend{BackendOptions()};
  const auto model = make_model(config, 31);
  TestEngine engine(&backend, *model, config.block_size, 128, 64, 32);
  std::vector<TokenCount> counts;
  for (int i = 0; i < kNumCounts; ++i) counts.push_back({300 * i, i % 3, 1 + i % 5});
  for (const int bs : {1, 8, 64}) {
    std::vector<TestSequence> sequences(static_cast<size_t>(bs));
    std::vector<TestSequence *> all;
    for (size_t i = 0; i < sequences.size(); ++i) {
      sequences[i].tokens = {static_cast<int32_t>(i)};
      all.push_back(&sequences[i]);
    }
    const ForwardBatch batch = engine.batch(all, std::vector<int>(sequences.size(), 1));
    engine.forward(batch);
    backend.synchronize();
    for (const Asked &asked : kAsked) {
      std::vector<double> times;
      for (int round = 0; round < 40; ++round) {
        std::vector<SampleRow> rows(sequences.size());
        for (size_t i = 0; i < rows.size(); ++i) {
          SampleRow &row = rows[i];
          row.num_choosable = kVocab;
          row.temperature = asked.temperature;
          row.top_k = asked.top_k;
          row.top_p = asked.top_p;
          row.min_p = asked.min_p;
          row.seed = i;
          row.position = static_cast<uint64_t>(round);
          if (!asked.has_penalties) continue;
          row.repetition_penalty = 1.1f;
          row.frequency_penalty = row.presence_penalty = 0.1f;
          row.counts = counts;
        }
        std::vector<int32_t> chosen(rows.size(), -9);
        const double start = now_us();
        const bool is_sampled = backend.sample(*engine.workspace, batch, rows, chosen);
        if (round >= 8) times.push_back(now_us() - start);
        if (!is_sampled || *std::min_element(chosen.begin(), chosen.end()) < 0)
          report->verdict(std::string("sampler ") + asked.name, false, "no token chosen");
      }
      std::sort(times.begin(), times.end());
      report->row({{"bench", "sampler"},
                   {"vocab", std::to_string(kVocab)},
                   {"bs", std::to_string(bs)},
                   {"asked", asked.name},
                   {"us", number(times[times.size() / 2])}});
    }
    for (TestSequence &s : sequences) engine.release(&s);
  }
}

}  // namespace xllm::check
