// How a request wants its tokens chosen, as a plain struct, and the ranges of its fields.
//
// The order is one and the same in every backend and path (see sampler.h): bias and mask,
// repetition penalty, frequency and presence penalty, temperature, top_k, top_p, min_p, draw.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"

namespace xllm {

// The defaults are the neutral values: greedy, nothing else applied.
struct SamplingParams {
  float temperature = 0;         // 0: the largest logit, lowest id on a tie, no draw; else (0, 100]
  int32_t top_k = 0;             // 0, or at least the vocabulary: off
  float top_p = 1;               // [0, 1]; 1: off, 0: one token
  float min_p = 0;               // [0, 1]; 0: off, 1: only ties of the best
  float repetition_penalty = 1;  // (0, 100]; prompt and answer; > 0 divided by it, < 0 multiplied
  float frequency_penalty = 0;   // [-100, 100]; times the occurrences among generated tokens
  float presence_penalty = 0;    // [-100, 100]; once for each generated token
  std::optional<uint64_t> seed;  // unset: the engine draws one and echoes it

  // The penalties look back over the whole sequence: there is no window.
  bool has_penalties() const {
    return repetition_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0;
  }
};

// Throws Error(kInvalidArgument) with detail "field" for the first value outside its range; NaN and
// infinity are outside every range.
inline void validate(const SamplingParams &params) {
  const auto check = [](bool is_valid, const char *field, double value, const char *range) {
    if (is_valid) return;
    throw Error(Status::kInvalidArgument,
                std::string(field) + ": expected " + range + ", found " + std::to_string(value),
                {{"field", field}});
  };
  // A comparison with NaN is false, so NaN fails each of these.
  check(params.temperature >= 0 && params.temperature <= 100, "temperature", params.temperature,
        "0 to 100");
  check(params.top_k >= 0, "top_k", params.top_k, "0 or more");
  check(params.top_p >= 0 && params.top_p <= 1, "top_p", params.top_p, "0 to 1");
  check(params.min_p >= 0 && params.min_p <= 1, "min_p", params.min_p, "0 to 1");
  check(params.repetition_penalty > 0 && params.repetition_penalty <= 100, "repetition_penalty",
        params.repetition_penalty, "more than 0, at most 100");
  check(params.frequency_penalty >= -100 && params.frequency_penalty <= 100, "frequency_penalty",
        params.frequency_penalty, "-100 to 100");
  check(params.presence_penalty >= -100 && params.presence_penalty <= 100, "presence_penalty",
        params.presence_penalty, "-100 to 100");
}

}  // namespace xllm
