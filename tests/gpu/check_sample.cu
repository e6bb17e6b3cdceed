// The device's sampler against the host's: the same token for every row, whatever the row wants.
#include <cmath>
#include <limits>

#include "report.h"
#include "sampling/mask.h"
#include "sampling/sampler.h"
#include "small_model.h"

namespace xllm::check {
namespace {

constexpr int kRows = 24;

// Logits of one kind; what samplers find hard comes first.
std::vector<float> make_logits(int kind, int vocab, Random *random) {
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float &x : logits) {
    switch (kind) {
      case 0:  // all equal: the order is that of the ids
        x = 1.5f;
        break;
      case 1:  // few values, many ties
        x = static_cast<float>(random->below(5)) * 0.25f - 0.0f;
        break;
      case 2:  // one far above the rest
        x = static_cast<float>(random->normal());
        break;
      case 3:  // far apart: most weigh nothing
        x = static_cast<float>(random->normal() * 200);
        break;
      case 4:  // nearly flat, all in one bin
        x = 3 + static_cast<float>(random->normal() * 1e-4);
        break;
      default:
        x = static_cast<float>(random->normal() * 3);
    }
  }
  if (kind == 2) logits[static_cast<size_t>(random->below(vocab))] = 30;
  return logits;
}

struct RowMemory {
  std::vector<TokenCount> counts;
  std::vector<TokenBias> biases;
  TokenMask mask;
};

// A row's wishes, each of them in some of the cases.
SampleRow make_row(int vocab, Random *random, RowMemory *memory) {
  const auto pick = [&](std::initializer_list<float> values) {
    return values.begin()[random->below(static_cast<int>(values.size()))];
  };
  SampleRow row;
  row.num_choosable = vocab - random->below(vocab / 10);
  row.temperature = pick({0, 0.3f, 0.8f, 1, 1, 1.7f, 20, 1e-4f});
  row.top_k = static_cast<int32_t>(pick({0, 0, 1, 5, 40, 500, 100000}));
  row.top_p = pick({1, 1, 0.95f, 0.5f, 0.9999f, 0});
  row.min_p = pick({0, 0, 0, 0.05f, 0.3f, 1});
  row.seed = random->bits();
  row.position = static_cast<uint64_t>(random->below(100000));
  if (random->below(3) == 0) {
    row.repetition_penalty = pick({1, 1.3f, 0.7f});
    row.frequency_penalty = pick({0, 0.5f, -1});
    row.presence_penalty = pick({0, 0.25f, 100});
    for (int id = random->below(9); id < vocab; id += 1 + random->below(vocab / 20))
      memory->counts.push_back({id, random->below(3), random->below(4)});
    row.counts = memory->counts;
  }
  if (random->below(3) == 0) {
    for (int id = random->below(50); id < vocab; id += 1 + random->below(vocab / 8)) {
      memory->biases.push_back({id, random->below(3) == 0
                                        ? -std::numeric_limits<float>::infinity()
                                        : static_cast<float>(random->normal() * 10)});
    }
    row.biases = memory->biases;
  }
  if (random->below(4) == 0) {
    const bool is_sparse = random->below(2) == 0;
    memory->mask = TokenMask(vocab, !is_sparse);
    for (int i = 0; i < 60; ++i) memory->mask.set(random->below(vocab), is_sparse);
    row.mask = memory->mask.words();
  }
  return row;
}

}  // namespace

void check_sample(Report *report, bool is_quick, bool is_tiny) {
  for (const int vocab : {1000, 32003, 151936}) {
    if (is_tiny && vocab > 1000) continue;
    ModelConfig config;
    config.num_layers = 1;
    config.hidden = 256, config.inner = 256, config.heads = 4, config.kv_heads = 4;
    config.vocab = vocab;
    cuda::CudaBackend backend{BackendOptions()};
    const auto model = make_model(config, 3);
    TestEngine engine(&backend, *model, config.block_size, kRows + 1, kRows, 4);
    Random random(static_cast<uint64_t>(vocab));
    std::vector<TestSequence> sequences(kRows);
    std::vector<TestSequence *> all;
    for (TestSequence &s : sequences) {
      s.tokens = {1};
      all.push_back(&s);
    }
    const ForwardBatch batch = engine.batch(all, std::vector<int>(kRows, 1));
    engine.forward(batch);
    backend.synchronize();  // its logits come before those that are put there
    float *device = cuda::as_cuda(*engine.workspace).logits.data<float>();
    Sampler host;
    std::string differs;
    int num_rows = 0;
    const int num_rounds = is_quick ? 2 : vocab > 100000 ? 12 : 40;
    for (int round = 0; round < num_rounds; ++round) {
      std::vector<RowMemory> memory(kRows);
      std::vector<SampleRow> rows;
      std::vector<std::vector<float>> logits;
      for (int i = 0; i < kRows; ++i) {
        logits.push_back(make_logits(i % 9, vocab, &random));
        rows.push_back(make_row(vocab, &random, &memory[static_cast<size_t>(i)]));
      }
      // What cannot be sampled: a NaN, an infinity, and a mask that forbids everything.
      if (round == 1) {
        logits[3][7] = std::nanf("");
        logits[4][0] = std::numeric_limits<float>::infinity();
        memory[5].mask = TokenMask(vocab, false);
        rows[5].mask = memory[5].mask.words();
      }
      for (size_t i = 0; i < kRows; ++i) {
        cuda::check(cudaMemcpy(device + i * static_cast<size_t>(vocab), logits[i].data(),
                               static_cast<size_t>(vocab) * sizeof(float), cudaMemcpyHostToDevice),
                    "set logits");
      }
      cuda::check(cudaDeviceSynchronize(), "set logits");
      std::vector<int32_t> chosen(kRows, -9);
      if (!backend.sample(*engine.workspace, batch, rows, chosen)) differs += " refused";
      for (size_t i = 0; i < kRows; ++i) {
        const Sampled expected = host.sample(logits[i].data(), rows[i]);
        const int32_t id = expected.outcome == SampleOutcome::kNotFinite      ? -1
                           : expected.outcome == SampleOutcome::kAllForbidden ? -2
                                                                              : expected.token_id;
        ++num_rows;
        if (id == chosen[i] || differs.size() > 200) continue;
        const SampleRow &row = rows[i];
        differs += " [round " + std::to_string(round) + " kind " + std::to_string(i % 9) + ": " +
                   std::to_string(chosen[i]) + " for " + std::to_string(id) + "; temperature " +
                   number(row.temperature) + " top_k " + std::to_string(row.top_k) + " top_p " +
                   number(row.top_p) + " min_p " + number(row.min_p) + " counts " +
                   std::to_string(row.counts.size()) + " biases " +
                   std::to_string(row.biases.size()) + (row.mask != nullptr ? " mask]" : "]");
      }
    }
    report->verdict("sampler, " + std::to_string(vocab) + " ids: " + std::to_string(num_rows) +
                        " rows as on the host",
                    differs.empty(), differs);
  }
}

}  // namespace xllm::check
