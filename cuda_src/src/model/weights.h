// A model file's tensors by their roles.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "gguf/gguf.h"
#include "model/model_config.h"

namespace xllm {

struct BoundTensors {
  ModelTensors tensors;              // views of the file's map
  std::vector<float> rope_divisors;  // rope_freqs.weight; empty: none
  bool has_tied_head = false;
};

// Every tensor of the file is given its role or refused by name; every role that the architecture
// requires is filled or its tensor named as missing. Shapes and types are check_tensors' business
// (backend.h). Throws Error(kModelMalformed) for a missing tensor, Error(kModelUnsupported) for one
// without a role.
BoundTensors bind_tensors(const GgufFile &file, const ModelConfig &config);

}  // namespace xllm
