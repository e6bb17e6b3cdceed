// Rows of prompts in tiles against the same rows by themselves, byte for byte, at any depth: what
// is in the cache is random, so nothing has to compute it first. What attention computes is
// compared with float64 in check_stages.cu.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "report.h"
#include "small_model.h"

namespace xllm::check {
namespace {

struct Case {
  const char *name;
  int heads, kv_heads, head_dim, block_size;
};

constexpr Case kCases[] = {
    {"128, groups of 4", 8, 2, 128, 64},   {"128, groups of 6", 6, 1, 128, 64},
    {"64, groups of 3", 6, 2, 64, 16},     {"64, groups of 1", 2, 2, 64, 32},
    {"80, groups of 2", 4, 2, 80, 32},     {"96, groups of 12", 12, 1, 96, 32},
    {"128, groups of 16", 16, 1, 128, 64}, {"256, groups of 2", 4, 2, 256, 64},
};

// The first row's position, and how many rows: from the beginning, over the end of a split, several
// splits, over the place where splits become longer.
constexpr int kSpans[][2] = {{0, 9}, {250, 12}, {500, 70}, {16370, 40}, {18000, 5}};

// Rows by themselves, in the tiles of any GPU, and in those of this one.
enum class Way { kPlain, kNarrow, kTiles };

std::vector<float> attended(TestEngine *engine, int first, int num_rows) {
  TestSequence s;
  for (int i = 0; i < first + num_rows; ++i) s.tokens.push_back(i % 90);
  s.num_computed = first;
  engine->step({&s}, {num_rows});
  engine->release(&s);
  const ModelDims &dims = engine->model->dims;
  std::vector<float> out(static_cast<size_t>(num_rows * dims.num_heads * dims.head_dim));
  engine->backend->synchronize();
  cuda::check(cudaMemcpy(out.data(), cuda::as_cuda(*engine->workspace).attention_out.data<float>(),
                         out.size() * sizeof(float), cudaMemcpyDeviceToHost),
              "read attention");
  return out;
}

}  // namespace

void check_attention(Report *report, bool is_tiny) {
  for (const Case &c : kCases) {
    ModelConfig config;
    config.num_layers = 1;
    config.hidden = 256, config.inner = 256, config.vocab = 96;
    config.heads = c.heads, config.kv_heads = c.kv_heads, config.head_dim = c.head_dim;
    config.q = config.v = config.o = config.gate = config.down = config.embedding = config.head =
        DType::kQ8_0;
    config.has_head_norm = true;
    cuda::CudaBackend backend{BackendOptions()};
    const auto model = make_model(config, 21);
    const int most = is_tiny ? 1024 : 20000;
    TestEngine engine(&backend, *model, c.block_size, most / c.block_size, 2, 22);
    const std::vector<uint8_t> cache =
        random_cache(static_cast<size_t>(engine.kv.num_blocks) * engine.kv.layout.block_bytes());
    for (const auto &[first, num_rows] : kSpans) {
      if (first + num_rows > most) continue;
      std::vector<float> plain;
      for (const Way way : {Way::kPlain, Way::kNarrow, Way::kTiles}) {
        backend.device().has_plain_rows = way == Way::kPlain;
        backend.device().has_narrow_tiles = way == Way::kNarrow;
        engine.pool.fill(cache);
        // The same blocks every time.
        std::sort(engine.free_blocks.begin(), engine.free_blocks.end());
        const std::vector<float> out = attended(&engine, first, num_rows);
        if (way == Way::kPlain) {
          plain = out;
          continue;
        }
        bool is_finite = true;
        for (const float v : plain) is_finite = is_finite && std::isfinite(v);
        size_t at = 0, differing = 0;
        for (size_t i = out.size(); i > 0; --i) {
          if (std::memcmp(&plain[i - 1], &out[i - 1], sizeof(float)) == 0) continue;
          at = i - 1;
          ++differing;
        }
        const auto width = static_cast<size_t>(c.heads * c.head_dim);
        report->verdict("attention " + std::string(c.name) + ": rows " + std::to_string(first) +
                            " to " + std::to_string(first + num_rows) +
                            (way == Way::kNarrow ? " in narrow tiles" : " in tiles"),
                        is_finite && differing == 0,
                        is_finite
                            ? std::to_string(differing) + " of " + std::to_string(out.size()) +
                                  " differ, the first in row " + std::to_string(at / width) +
                                  " column " + std::to_string(at % width) + ": " +
                                  number(static_cast<double>(out[at]), "%.9g") + " for " +
                                  number(static_cast<double>(plain[at]), "%.9g")
                            : "not finite");
      }
    }
    if (is_tiny) return;
  }
}

}  // namespace xllm::check
