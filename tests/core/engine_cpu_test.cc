// The engine over the CPU backend with tiny models: one request, the same bytes whatever the
// threads, the instruction set, the company, the chunks, the preemptions and the cache.

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "backend/factory.h"
#include "engine_fixture.h"

namespace xllm {
namespace {

std::filesystem::path tiny_model(const std::string &name) {
  return std::filesystem::path(__FILE__).parent_path().parent_path() / "data" / "forward" /
         (name + ".gguf");
}

class CpuEngine : public testing::TestWithParam<std::string> {};

std::unique_ptr<Engine> make_cpu_engine(const std::string &name, DecodeMode mode, int num_threads,
                                        const std::string &instruction_set, EngineConfig config) {
  config.decode_mode = mode;
  BackendOptions options;
  options.num_threads = num_threads;
  options.instruction_set = instruction_set;
  return std::make_unique<Engine>(make_engine_model(ModelFile::open(tiny_model(name).string())),
                                  config, make_backend(BackendKind::kCpu, options));
}

TEST_P(CpuEngine, SameBytesAloneBesideSevenOthersPreemptedAndFromTheCache) {
  Ids prompt;
  for (int i = 0; i < 37; ++i) prompt.push_back((7 * i + i * i / 3) % 48);
  EngineConfig config;
  config.block_size = 16;
  config.kv_memory = 4 << 20;
  for (const DecodeMode mode : {DecodeMode::kBatched, DecodeMode::kPerSlot}) {
    for (const uint64_t seed : {0, 7}) {
      const RequestOptions mine =
          seed == 0 ? request(prompt, 24) : sampled(request(prompt, 24), seed);
      const Answer alone = run(make_cpu_engine(GetParam(), mode, 1, "scalar", config).get(), mine);
      ASSERT_EQ(alone.ids.size(), 24u);
      for (const int num_threads : {1, 3}) {
        EngineConfig busy = config;
        busy.prefill_chunk = num_threads == 1 ? 9 : 64;
        auto engine = make_cpu_engine(GetParam(), mode, num_threads, "", busy);
        busy.kv_memory = 16 * engine->info().plan.sets[0].kv_layout.block_bytes();
        engine = make_cpu_engine(GetParam(), mode, num_threads, "", busy);
        // Whether the others meet, so that blocks run out, is a matter of when this thread runs:
        // again until they did.
        for (int round = 0; round < 100; ++round) {
          std::vector<uint64_t> others;
          for (int i = 0; i < 7; ++i) {
            Ids other = prompt;
            other[0] = i;
            others.push_back(
                engine->submit(sampled(request(other, 30), 70 + static_cast<uint64_t>(i))));
          }
          EXPECT_EQ(run(engine.get(), mine), alone);
          EXPECT_EQ(run(engine.get(), mine), alone);
          for (const uint64_t id : others) {
            EXPECT_EQ(wait_for(engine.get(), id).finished.status, Status::kOk);
          }
          if (mode == DecodeMode::kPerSlot || engine->stats().num_preemptions > 0) break;
        }
        if (mode == DecodeMode::kBatched) {
          EXPECT_GT(engine->stats().num_preemptions, 0u);
        }
        expect_nothing_held(*engine);
      }
    }
  }
}

// Steps of one set between the pieces of the other's load: neither sees the other.
TEST_P(CpuEngine, SameBytesWhileTheOtherSetIsLoaded) {
  Ids prompt;
  for (int i = 0; i < 37; ++i) prompt.push_back((7 * i + i * i / 3) % 48);
  EngineConfig config;
  config.block_size = 16;
  config.kv_memory = 4 << 20;
  config.max_token_gap_s = 1e-6;  // a step after each piece
  for (const DecodeMode first : {DecodeMode::kBatched, DecodeMode::kPerSlot}) {
    const DecodeMode second =
        first == DecodeMode::kBatched ? DecodeMode::kPerSlot : DecodeMode::kBatched;
    RequestOptions steady = sampled(request(prompt, 200), 7), other = request(prompt, 24);
    const Answer alone = run(make_cpu_engine(GetParam(), first, 1, "", config).get(), steady);
    const Answer other_alone = run(make_cpu_engine(GetParam(), second, 1, "", config).get(), other);
    steady.decode_mode = first;
    other.decode_mode = second;
    auto engine = make_cpu_engine(GetParam(), DecodeMode::kAuto, 3, "", config);
    const uint64_t id = engine->submit(steady);
    wait_until([&] { return engine->stats().num_generated_tokens >= 2; });
    EXPECT_EQ(run(engine.get(), other), other_alone);
    EXPECT_EQ(wait_for(engine.get(), id), alone);
    expect_nothing_held(*engine);
  }
}

INSTANTIATE_TEST_SUITE_P(TinyModels, CpuEngine, testing::Values("llama", "llama_q4_1", "qwen3"),
                         [](const auto &info) { return info.param; });

}  // namespace
}  // namespace xllm
