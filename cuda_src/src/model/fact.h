// What was concluded about a model, with its source: shown by `xllm inspect` and GetModel, so that
// no guess is silent.
#pragma once

#include <string>
#include <vector>

namespace xllm {

struct Fact {
  std::string name;    // "context_length"
  std::string value;   // as text
  std::string source;  // the key, the rule, or the flag it comes from
};

}  // namespace xllm
