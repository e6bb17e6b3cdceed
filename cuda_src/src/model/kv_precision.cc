#include "model/kv_precision.h"

#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "base/half.h"

namespace xllm {
namespace {

float element(const MatrixView &vector, int64_t i) {
  const auto *bytes = static_cast<const uint8_t *>(vector.data);
  if (vector.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, bytes + i * 4, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes + i * 2, sizeof bits);
  return vector.dtype == DType::kF16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

std::string number(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", static_cast<double>(value));
  return text;
}

}  // namespace

KBias largest_k_bias(const ModelDims &dims, const ModelTensors &tensors) {
  KBias largest;
  for (const LayerTensors &layer : tensors.layers) {
    if (!layer.k_bias) continue;
    for (int head = 0; head < dims.num_kv_heads; ++head) {
      double sum = 0;
      for (int c = 0; c < dims.head_dim; ++c) {
        const double value = element(layer.k_bias, int64_t{head} * dims.head_dim + c);
        sum += value * value;
      }
      const auto rms = static_cast<float>(std::sqrt(sum / dims.head_dim));
      if (rms <= largest.rms) continue;
      largest = {rms, layer.k_bias.name, head};
    }
  }
  return largest;
}

void check_kv_precision(KvType type, const KBias &bias) {
  if (type != KvType::kInt4 || bias.rms <= kMaxInt4KBias) return;
  throw Error(Status::kInvalidArgument,
              "kv_type int4: the keys of this model do not bear it: " + bias.tensor +
                  " has a root mean square of " + number(bias.rms) + " in KV head " +
                  std::to_string(bias.kv_head) + ", expected at most " + number(kMaxInt4KBias) +
                  "; use kv_type int8 or f16",
              {{"field", "kv_type"}});
}

void add_kv_types_fact(const KBias &bias, std::vector<Fact> *facts) {
  if (bias.rms == 0) return;
  const bool bears_int4 = bias.rms <= kMaxInt4KBias;
  facts->push_back({"kv_types", bears_int4 ? "f16, int8, int4" : "f16, int8; int4 is refused",
                    bias.tensor + ": root mean square " + number(bias.rms) + " in KV head " +
                        std::to_string(bias.kv_head) + "; int4 takes up to " +
                        number(kMaxInt4KBias)});
}

}  // namespace xllm
