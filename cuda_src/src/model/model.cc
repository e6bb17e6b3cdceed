#include "model/model.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "model/kv_precision.h"
#include "model/weights.h"

namespace xllm {
namespace {

ModelDims make_dims(const ModelConfig &config, const ModelTensors &tensors) {
  ModelDims dims;
  dims.num_layers = config.num_layers;
  dims.hidden_size = config.hidden_size;
  dims.intermediate_size = config.intermediate_size;
  dims.num_heads = config.num_heads;
  dims.num_kv_heads = config.num_kv_heads;
  dims.head_dim = config.head_dim;
  dims.vocab_size = static_cast<int>(std::min<int64_t>(tensors.head.rows, 0x7fffffff));
  dims.rms_eps = config.rms_eps;
  dims.attention_scale = config.attention_scale;
  dims.sliding_window = config.sliding_window;
  // As far as tables go, whatever the cap on a sequence: a quarter of a megabyte, and nothing
  // depends on max_seq_len.
  dims.rope = make_rope_tables(config.rope, kMaxRopePositions);
  return dims;
}

// Every token that the file names has a row to be embedded by.
void check_vocabulary(const GgufFile &file, const ModelConfig &config,
                      const ModelTensors &tensors) {
  const int64_t rows = tensors.embedding.rows;
  const GgufValue *tokens = file.find("tokenizer.ggml.tokens");
  if (tokens != nullptr && tokens->num_elements() > static_cast<uint64_t>(rows)) {
    tokens->fail("expected at most the " + std::to_string(rows) + " rows of " +
                 tensors.embedding.name + ", found " + std::to_string(tokens->num_elements()) +
                 " tokens");
  }
  if (config.declared_vocab_size > rows) {
    file.require(std::string(config.arch->name) + ".vocab_size")
        .fail("expected at most the " + std::to_string(rows) + " rows of " +
              tensors.embedding.name + ", found " + std::to_string(config.declared_vocab_size));
  }
}

std::vector<TensorTypeUse> count_types(const GgufFile &file) {
  std::vector<TensorTypeUse> uses;
  for (const GgufTensor &tensor : file.tensors()) {
    auto use = std::find_if(uses.begin(), uses.end(),
                            [&](const TensorTypeUse &u) { return u.dtype == tensor.dtype; });
    if (use == uses.end()) {
      use = uses.insert(uses.end(), TensorTypeUse());
      use->dtype = tensor.dtype;
    }
    ++use->num_tensors;
    use->num_elements += tensor.num_elements();
    use->size_bytes += tensor.size_bytes;
  }
  std::stable_sort(uses.begin(), uses.end(), [](const TensorTypeUse &a, const TensorTypeUse &b) {
    return a.size_bytes > b.size_bytes;
  });
  return uses;
}

}  // namespace

Model Model::open(const std::string &path, const ModelOverrides &overrides) {
  return create(GgufFile::open(path), overrides);
}

Model Model::create(GgufFile file, const ModelOverrides &overrides) {
  ModelConfig config = read_model_config(file, overrides);
  return Model(std::move(file), std::move(config));
}

Model::Model(GgufFile file, ModelConfig config)
    : file_(std::move(file)), config_(std::move(config)) {
  BoundTensors bound = bind_tensors(file_, config_);
  tensors_ = std::move(bound.tensors);
  has_tied_head_ = bound.has_tied_head;
  config_.rope.divisors = std::move(bound.rope_divisors);
  dims_ = make_dims(config_, tensors_);
  check_tensors(dims_, tensors_);
  check_vocabulary(file_, config_, tensors_);
  tensor_types_ = count_types(file_);
  for (const TensorTypeUse &use : tensor_types_) num_parameters_ += use.num_elements;

  if (has_tied_head_)
    config_.facts.push_back(
        {"head", "token_embd.weight", "no output.weight: the embedding is the head"});
  if (!config_.rope.divisors.empty()) {
    config_.facts.push_back({"rope_divisors",
                             std::to_string(config_.rope.divisors.size()) + " factors",
                             "rope_freqs.weight"});
  }
  add_kv_types_fact(largest_k_bias(dims_, tensors_), &config_.facts);
}

}  // namespace xllm
