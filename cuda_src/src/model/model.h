// A model file, opened and understood: everything but the device and the tokenizer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "gguf/gguf.h"
#include "model/fact.h"
#include "model/model_config.h"

namespace xllm {

struct TensorTypeUse {
  DType dtype = DType::kF32;
  int num_tensors = 0;
  uint64_t num_elements = 0;
  uint64_t size_bytes = 0;
};

// Owns the map that tensors() points into. Movable; views stay valid.
class Model {
 public:
  // Reads metadata and the tensor table, no weights. Throws what GgufFile::open, read_model_config,
  // bind_tensors and check_tensors throw.
  static Model open(const std::string &path, const ModelOverrides &overrides = {});
  // The same of a file that is already open; takes it over.
  static Model create(GgufFile file, const ModelOverrides &overrides = {});

  const GgufFile &file() const {
    return file_;
  }  // the tokenizer and the chat template are read from here
  const ModelConfig &config() const { return config_; }
  const ModelDims &dims() const { return dims_; }  // the same whatever max_seq_len is
  const ModelTensors &tensors() const { return tensors_; }
  bool has_tied_head() const { return has_tied_head_; }
  uint64_t num_parameters() const { return num_parameters_; }
  // By bytes, largest first.
  const std::vector<TensorTypeUse> &tensor_types() const { return tensor_types_; }
  // What was concluded about the model, with its source.
  const std::vector<Fact> &facts() const { return config_.facts; }

 private:
  Model(GgufFile file, ModelConfig config);

  GgufFile file_;
  ModelConfig config_;
  ModelTensors tensors_;
  ModelDims dims_;
  bool has_tied_head_ = false;
  uint64_t num_parameters_ = 0;
  std::vector<TensorTypeUse> tensor_types_;
};

}  // namespace xllm
