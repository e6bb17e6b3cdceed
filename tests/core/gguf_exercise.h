// Uses of an open GGUF file that a damaged one must survive; shared by the tests and the fuzzer.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "gguf/gguf.h"
#include "gguf/vocab_arrays.h"

namespace xllm {

// Touches everything that a file offers, whatever it is.
inline uint64_t read_everything(const GgufFile &file) {
  uint64_t sum = 0;
  for (const GgufValue &value : file.values()) {
    sum += value.to_json().size() + value.type_name().size() + value.raw().second.size();
    for (int way = 0; way < 7; ++way) {
      try {
        if (way == 0) sum += static_cast<uint64_t>(value.as_int());
        if (way == 1) sum += value.as_float() > 0;
        if (way == 2) sum += value.as_string().size();
        if (way == 3) sum += value.as_bool();
        if (way == 4) sum += value.as_ints().size();
        if (way == 5) sum += value.as_floats().size();
        if (way == 6) {
          const GgufStrings strings = value.as_strings();
          for (size_t i = 0; i < strings.size(); ++i) sum += strings[i].size();
        }
      } catch (const Error &error) {
        sum += error.message().size();
      }
    }
  }
  for (const GgufTensor &tensor : file.tensors()) {
    const auto *data = static_cast<const uint8_t *>(tensor.data);
    for (uint64_t i = 0; i < tensor.size_bytes; ++i) sum += data[i];
  }
  try {
    sum += read_vocab_arrays(file).tokens.size();
  } catch (const Error &error) {
    sum += error.message().size();
  }
  return sum;
}

}  // namespace xllm
