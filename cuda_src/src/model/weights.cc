#include "model/weights.h"

#include <charconv>
#include <cmath>
#include <string>
#include <string_view>

#include "base/error.h"

namespace xllm {
namespace {

struct LayerRole {
  const char *suffix;  // behind "blk.N."
  MatrixView LayerTensors::*member;
  Presence presence;
};

// What a layer of this family is made of.
std::vector<LayerRole> layer_roles(const Arch &arch) {
  constexpr Presence kRequired = Presence::kRequired;
  return {
      {"attn_norm.weight", &LayerTensors::attn_norm, kRequired},
      {"attn_q.weight", &LayerTensors::q, kRequired},
      {"attn_k.weight", &LayerTensors::k, kRequired},
      {"attn_v.weight", &LayerTensors::v, kRequired},
      {"attn_q.bias", &LayerTensors::q_bias, arch.qkv_bias},
      {"attn_k.bias", &LayerTensors::k_bias, arch.qkv_bias},
      {"attn_v.bias", &LayerTensors::v_bias, arch.qkv_bias},
      {"attn_q_norm.weight", &LayerTensors::q_norm, arch.qk_norm},
      {"attn_k_norm.weight", &LayerTensors::k_norm, arch.qk_norm},
      {"attn_output.weight", &LayerTensors::o, kRequired},
      {"attn_output.bias", &LayerTensors::o_bias, Presence::kOptional},
      {"ffn_norm.weight", &LayerTensors::ffn_norm, kRequired},
      {"ffn_gate.weight", &LayerTensors::gate, kRequired},
      {"ffn_up.weight", &LayerTensors::up, kRequired},
      {"ffn_down.weight", &LayerTensors::down, kRequired},
  };
}

// Splits "blk.12.attn_q.weight" into 12 and "attn_q.weight"; false for any other form.
bool split_layer_name(std::string_view name, int num_layers, int *layer, std::string_view *suffix) {
  constexpr std::string_view kPrefix = "blk.";
  if (name.substr(0, kPrefix.size()) != kPrefix) return false;
  name.remove_prefix(kPrefix.size());
  const char *end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data(), end, *layer);
  if (parsed.ec != std::errc() || parsed.ptr == end || *parsed.ptr != '.') return false;
  const bool is_padded =
      name[0] == '0' && name[1] != '.';  // "blk.00." would be a second name for layer 0
  if (*layer < 0 || *layer >= num_layers || is_padded) return false;
  *suffix = name.substr(static_cast<size_t>(parsed.ptr - name.data()) + 1);
  return true;
}

std::string file_of(const GgufFile &file, const GgufTensor &tensor) {
  return file.shard(tensor.shard).name() + ": " + printable(tensor.name);
}

std::vector<float> read_rope_divisors(const GgufFile &file, const GgufTensor &tensor,
                                      const ModelConfig &config) {
  const auto num_pairs = static_cast<uint64_t>(config.rope.rotary_dim / 2);
  if (tensor.dtype != DType::kF32 || tensor.num_dims != 1 || tensor.dims[0] != num_pairs) {
    throw Error(Status::kModelMalformed, file_of(file, tensor) + ": expected f32 [" +
                                             std::to_string(num_pairs) + "], found " +
                                             dtype_info(tensor.dtype).name + " [" +
                                             std::to_string(tensor.dims[0]) + "]");
  }
  const auto *values = static_cast<const float *>(tensor.data);
  std::vector<float> divisors(values, values + num_pairs);
  for (const float divisor : divisors) {
    if (!(std::isfinite(divisor) && divisor > 0)) {
      throw Error(
          Status::kModelMalformed,
          file_of(file, tensor) + ": expected positive numbers, found " + std::to_string(divisor));
    }
  }
  return divisors;
}

}  // namespace

BoundTensors bind_tensors(const GgufFile &file, const ModelConfig &config) {
  const std::vector<LayerRole> roles = layer_roles(*config.arch);
  BoundTensors bound;
  ModelTensors &tensors = bound.tensors;
  tensors.layers.resize(static_cast<size_t>(config.num_layers));

  for (const GgufTensor &tensor : file.tensors()) {
    MatrixView *place = nullptr;
    int layer = 0;
    std::string_view suffix;
    if (tensor.name == "token_embd.weight") {
      place = &tensors.embedding;
    } else if (tensor.name == "output_norm.weight") {
      place = &tensors.output_norm;
    } else if (tensor.name == "output.weight") {
      place = &tensors.head;
    } else if (tensor.name == "rope_freqs.weight") {
      bound.rope_divisors = read_rope_divisors(file, tensor, config);
      continue;
    } else if (split_layer_name(tensor.name, config.num_layers, &layer, &suffix)) {
      for (const LayerRole &role : roles) {
        if (suffix == role.suffix && role.presence != Presence::kNever) {
          place = &(tensors.layers[static_cast<size_t>(layer)].*role.member);
        }
      }
    }
    if (place == nullptr) {
      throw Error(
          Status::kModelUnsupported,
          file_of(file, tensor) + " (byte " + std::to_string(tensor.byte_offset) +
              "): a tensor that a " + config.arch->name + " model of " +
              std::to_string(config.num_layers) +
              " layers has no place for; leaving it out would change what the model computes");
    }
    *place = tensor.matrix();
  }

  const auto expect = [&](const MatrixView &view, const std::string &name) {
    if (!view)
      throw Error(Status::kModelMalformed,
                  file.shard(0).name() + ": " + name + ": the tensor is missing");
  };
  expect(tensors.embedding, "token_embd.weight");
  expect(tensors.output_norm, "output_norm.weight");
  for (int layer = 0; layer < config.num_layers; ++layer) {
    for (const LayerRole &role : roles) {
      if (role.presence != Presence::kRequired) continue;
      expect(tensors.layers[static_cast<size_t>(layer)].*role.member,
             "blk." + std::to_string(layer) + "." + role.suffix);
    }
  }
  bound.has_tied_head = !tensors.head;
  if (bound.has_tied_head) tensors.head = tensors.embedding;
  return bound;
}

}  // namespace xllm
