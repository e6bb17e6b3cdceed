// Models of exact shape and mix of types with random weights, for measurements.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "small_model.h"

namespace xllm::check {

struct BenchShape {
  const char *name;
  int layers, hidden, inner, heads, kv_heads, head_dim, vocab;
  bool has_bias, has_head_norm, is_tied;
};

// mix: q4_k_m, q6_k or q8_0.
std::unique_ptr<HostModel> make_shape(const BenchShape &s, const std::string &mix);

// Calls `run` for each of `models`, NAME or NAME:MIX, whose shape is known.
void for_each_model(const std::vector<std::string> &models,
                    const std::function<void(const BenchShape &, const std::string &mix)> &run);

// Keys and values of +-1 spread, never zeros.
void fill_cache(TestEngine *engine);

// Time of one replay of what `issue` puts on the stream, in ms.
double graph_ms(cuda::CudaBackend *backend, const std::function<void()> &issue);

}  // namespace xllm::check
