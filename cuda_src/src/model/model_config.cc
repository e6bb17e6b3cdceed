#include "model/model_config.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "model/key_reader.h"

namespace xllm {
namespace {

// Upper bounds far above any model, and low enough that products of two of them fit in 64 bits.
constexpr int kMaxLayers = 1024;
constexpr int kMaxWidth = 1 << 24;
constexpr int kMaxHeads = 1 << 16;
constexpr int kMaxHeadDim = 1 << 12;
constexpr int kMaxInt = 0x7fffffff;

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

// Features of other families and of adapters: each key with the value at which it changes nothing.
struct NeutralKey {
  const char *key;
  double neutral;
  const char *what;
};
constexpr NeutralKey kNeutralKeys[] = {
    {"expert_count", 0, "mixture of experts"},
    {"expert_used_count", 0, "mixture of experts"},
    {"expert_shared_count", 0, "mixture of experts"},
    {"logit_scale", 1, "logit scale"},
    {"residual_scale", 1, "residual scale"},
    {"embedding_scale", 1, "embedding scale"},
    {"attn_logit_softcapping", 0, "soft cap of attention scores"},
    {"final_logit_softcapping", 0, "soft cap of logits"},
    {"attention.clamp_kqv", 0, "clamp of Q, K and V"},
    {"attention.max_alibi_bias", 0, "ALiBi"},
    {"attention.causal", 1, "attention without a causal mask"},
    {"use_parallel_residual", 0, "parallel residual"},
    {"pooling_type", 0, "pooling of embeddings"},
    {"rope.scaling.yarn_log_multiplier", 0, "yarn log multiplier"},
};

const Arch *read_arch(const GgufFile &file) {
  const std::string_view type = file.get_string("general.type", "model");
  if (type != "model") {
    throw Error(Status::kModelUnsupported, file.shard(0).name() +
                                               ": general.type: expected model, found " +
                                               printable(type) + "; open the model's own file");
  }
  const std::string_view name = file.get_string("general.architecture");
  const Arch *arch = find_arch(name);
  if (arch == nullptr) {
    throw Error(Status::kModelUnsupported, file.shard(0).name() +
                                               ": general.architecture: expected one of " +
                                               arch_names() + ", found " + printable(name));
  }
  const int64_t quantization = file.get_int("general.quantization_version", 0, kMaxInt, 2);
  if (quantization != 2) {
    throw Error(Status::kModelUnsupported,
                file.shard(0).name() + ": general.quantization_version: expected 2, found " +
                    std::to_string(quantization) + "; convert the file anew");
  }
  return arch;
}

void read_attention(KeyReader *keys, ModelConfig *config) {
  const std::string prefix = std::string(config->arch->name) + ".";
  config->num_heads = keys->get_int("attention.head_count", 1, kMaxHeads);
  config->num_kv_heads = keys->get_int("attention.head_count_kv", 1, kMaxHeads, config->num_heads);
  if (!keys->has("attention.head_count_kv")) {
    config->facts.push_back({"num_kv_heads", std::to_string(config->num_kv_heads),
                             "no " + prefix + "attention.head_count_kv: as many as query heads"});
  }
  if (config->num_heads % config->num_kv_heads != 0) {
    throw Error(Status::kModelMalformed,
                prefix + "attention.head_count_kv: expected a divisor of the " +
                    std::to_string(config->num_heads) + " query heads, found " +
                    std::to_string(config->num_kv_heads));
  }

  if (keys->has("attention.key_length")) {
    config->head_dim = keys->get_int("attention.key_length", 2, kMaxHeadDim);
  } else {
    if (config->hidden_size % config->num_heads != 0) {
      throw Error(Status::kModelMalformed,
                  prefix + "attention.key_length: missing, and embedding_length " +
                      std::to_string(config->hidden_size) + " is no multiple of the " +
                      std::to_string(config->num_heads) + " heads");
    }
    config->head_dim = config->hidden_size / config->num_heads;
    config->facts.push_back(
        {"head_dim", std::to_string(config->head_dim),
         "no " + prefix + "attention.key_length: embedding_length / head_count"});
  }
  keys->skip("attention.key_length");
  const int value_length =
      keys->get_int("attention.value_length", 1, kMaxHeadDim, config->head_dim);
  if (value_length != config->head_dim) {
    keys->unsupported("attention.value_length", "expected the key length " +
                                                    std::to_string(config->head_dim) + ", found " +
                                                    std::to_string(value_length));
  }

  const double scale = keys->get_float("attention.scale", 0, 1e6, 0);  // 0: as if absent
  config->attention_scale =
      static_cast<float>(scale > 0 ? scale : 1 / std::sqrt(static_cast<double>(config->head_dim)));
  if (scale > 0) {
    config->facts.push_back({"attention_scale", number(scale), prefix + "attention.scale"});
  }
  config->sliding_window = keys->get_int("attention.sliding_window", 0, kMaxInt, 0);
  if (config->sliding_window > 0) {
    config->facts.push_back({"sliding_window", std::to_string(config->sliding_window),
                             prefix + "attention.sliding_window, in every layer"});
  }
}

RopeScaling read_rope_scaling_type(KeyReader *keys, ModelConfig *config) {
  const std::string key = keys->full("rope.scaling.type");
  const bool has_factor = keys->has("rope.scaling.factor") || keys->has("rope.scale_linear");
  if (!keys->has("rope.scaling.type") && has_factor) {
    config->facts.push_back({"rope_scaling", "linear", "a factor without " + key});
  }
  const std::string_view type =
      keys->get_string("rope.scaling.type", has_factor ? "linear" : "none");
  if (type == "none") return RopeScaling::kNone;
  if (type == "linear") return RopeScaling::kLinear;
  if (type == "yarn") return RopeScaling::kYarn;
  keys->unsupported("rope.scaling.type", "expected none, linear or yarn, found " + printable(type));
}

void read_rope(KeyReader *keys, const ModelOverrides &overrides, ModelConfig *config) {
  const std::string prefix = std::string(config->arch->name) + ".";
  RopeParams &rope = config->rope;
  rope.is_neighbor = config->arch->is_rope_neighbor;
  config->facts.push_back({"rope_pairs",
                           rope.is_neighbor ? "neighbours (2i, 2i + 1)" : "halves (i, i + d/2)",
                           "general.architecture = " + std::string(config->arch->name)});

  rope.rotary_dim = keys->get_int("rope.dimension_count", 2, kMaxHeadDim, config->head_dim);
  if (!keys->has("rope.dimension_count")) {
    config->facts.push_back({"rope_dim", std::to_string(rope.rotary_dim),
                             "no " + prefix + "rope.dimension_count: the whole head"});
  }
  if (rope.rotary_dim > config->head_dim || rope.rotary_dim % 2 != 0) {
    throw Error(Status::kModelMalformed,
                prefix + "rope.dimension_count: expected an even number up to the head size " +
                    std::to_string(config->head_dim) + ", found " +
                    std::to_string(rope.rotary_dim));
  }

  rope.freq_base = keys->get_float("rope.freq_base", 1.001, 1e15, 10000);
  if (overrides.rope_freq_base) {
    rope.freq_base = *overrides.rope_freq_base;
    if (!(rope.freq_base >= 1.001 && rope.freq_base <= 1e15)) {
      throw Error(
          Status::kInvalidArgument,
          "rope_freq_base: expected a number from 1.001 to 1e15, found " + number(rope.freq_base),
          {{"field", "rope_freq_base"}});
    }
    config->facts.push_back({"rope_freq_base", number(rope.freq_base), "flag"});
  } else if (!keys->has("rope.freq_base")) {
    config->facts.push_back(
        {"rope_freq_base", number(rope.freq_base), "no " + prefix + "rope.freq_base: the paper's"});
  }

  rope.scaling = read_rope_scaling_type(keys, config);
  const double legacy_factor = keys->get_float("rope.scale_linear", 0.001, 1e6, 1);
  if (keys->has("rope.scaling.factor") || rope.scaling != RopeScaling::kYarn) {
    rope.factor = keys->get_float("rope.scaling.factor", 0.001, 1e6, legacy_factor);
  } else {
    rope.factor = keys->get_float("rope.scaling.factor", 0.001, 1e6);
  }
  rope.attention_factor = keys->get_float("rope.scaling.attn_factor", 1e-6, 1e6, 1) *
                          keys->get_float("rope.scaling.yarn_attn_factor", 1e-6, 1e6, 1);
  rope.original_context =
      keys->get_int("rope.scaling.original_context_length", 1, kMaxInt, config->context_length);
  rope.extrapolation_factor = keys->get_float("rope.scaling.yarn_ext_factor", -1, 1, 1);
  if (rope.extrapolation_factor < 0) rope.extrapolation_factor = 1;  // negative: not set
  rope.beta_fast = keys->get_float("rope.scaling.yarn_beta_fast", 1e-6, 1e6, 32);
  rope.beta_slow = keys->get_float("rope.scaling.yarn_beta_slow", 1e-6, 1e6, 1);
  keys->skip("rope.scaling.finetuned");  // how the context was reached, not a number
  if (rope.scaling != RopeScaling::kNone) {
    config->facts.push_back({"rope_scaling",
                             std::string(rope.scaling == RopeScaling::kYarn ? "yarn" : "linear") +
                                 " x " + number(rope.factor),
                             keys->full("rope.scaling.type")});
  }
  if (rope.scaling == RopeScaling::kYarn && !keys->has("rope.scaling.original_context_length")) {
    config->facts.push_back(
        {"rope_original_context", number(rope.original_context),
         "no " + prefix + "rope.scaling.original_context_length: context_length"});
  }
}

// Llama files say how their rows are ordered; the two names in use mean the order that this family
// is stored in.
void check_data_layout(KeyReader *keys, const ModelConfig &config) {
  const std::string_view layout = keys->get_string("tensor_data_layout", "reference");
  const bool is_known =
      layout == "reference" || (config.rope.is_neighbor && layout == "Meta AI original pth");
  if (!is_known)
    keys->unsupported("tensor_data_layout", "expected reference, found " + printable(layout));
}

}  // namespace

ModelConfig read_model_config(const GgufFile &file, const ModelOverrides &overrides) {
  ModelConfig config;
  config.arch = read_arch(file);
  config.display_name = std::string(file.get_string("general.name", ""));
  KeyReader keys(file, config.arch->name);

  config.num_layers = keys.get_int("block_count", 1, kMaxLayers);
  config.context_length = keys.get_int("context_length", 1, kMaxInt);
  config.hidden_size = keys.get_int("embedding_length", 1, kMaxWidth);
  config.intermediate_size = keys.get_int("feed_forward_length", 1, kMaxWidth);
  config.rms_eps = static_cast<float>(keys.get_float("attention.layer_norm_rms_epsilon", 0, 1));
  config.declared_vocab_size = keys.get_int("vocab_size", 1, kMaxInt, 0);
  read_attention(&keys, &config);
  read_rope(&keys, overrides, &config);
  check_data_layout(&keys, config);
  for (const NeutralKey &neutral : kNeutralKeys) {
    keys.expect_neutral(neutral.key, neutral.neutral, neutral.what);
  }
  keys.expect_none_left();

  if (overrides.context_length) {
    if (*overrides.context_length < 1) {
      throw Error(
          Status::kInvalidArgument,
          "context_length: expected at least 1, found " + std::to_string(*overrides.context_length),
          {{"field", "context_length"}});
    }
    config.context_length = *overrides.context_length;
    config.facts.push_back({"context_length", std::to_string(config.context_length), "flag"});
  } else {
    config.facts.push_back(
        {"context_length", std::to_string(config.context_length), keys.full("context_length")});
  }
  return config;
}

int resolve_max_seq_len(const ModelConfig &config, int requested, bool allow_beyond_context) {
  if (requested == 0) return std::min(config.context_length, kMaxRopePositions);
  const bool is_beyond = requested > config.context_length && !allow_beyond_context;
  const int limit = is_beyond ? config.context_length : kMaxRopePositions;
  if (requested >= 1 && requested <= limit) return requested;
  throw Error(
      Status::kInvalidArgument,
      "max_seq_len: expected 1 to " + std::to_string(limit) +
          (is_beyond
               ? " (the model's context; the flag that allows more gives no promise of quality)"
               : " (the most this build can address)") +
          ", found " + std::to_string(requested),
      {{"field", "max_seq_len"}, {"limit", std::to_string(limit)}});
}

}  // namespace xllm
