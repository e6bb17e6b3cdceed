// Reads an architecture's keys and keeps count of them, so that none is ignored in silence.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "gguf/gguf.h"

namespace xllm {

// Keys are named without the architecture: "block_count" is llama.block_count in a llama file. A
// key may hold one value or an array of that same value, one per layer; both mean the same. An
// array whose values differ is refused by name. Every function throws Error naming the key:
// kModelMalformed for a missing key, a wrong type or a value out of range, kModelUnsupported for
// what this build lacks.
class KeyReader {
 public:
  KeyReader(const GgufFile &file, std::string_view arch)
      : file_(file), prefix_(std::string(arch) + ".") {}

  std::string full(std::string_view key) const { return prefix_ + std::string(key); }
  bool has(std::string_view key) const { return file_.find(full(key)) != nullptr; }

  int get_int(std::string_view key, int min, int max);
  int get_int(std::string_view key, int min, int max, int fallback);
  double get_float(std::string_view key, double min, double max);
  double get_float(std::string_view key, double min, double max, double fallback);
  bool get_bool(std::string_view key, bool fallback);
  std::string_view get_string(std::string_view key, std::string_view fallback);
  // A key whose value does not matter here.
  void skip(std::string_view key) { seen_.insert(full(key)); }

  // Refuses a key that is there with another number (or bool, as 0 and 1) than the one that changes
  // nothing.
  void expect_neutral(std::string_view key, double neutral, const char *what);
  // Refuses the first key of the architecture that nothing above has asked for.
  void expect_none_left() const;

  [[noreturn]] void unsupported(std::string_view key, const std::string &message) const;

 private:
  const GgufValue *look_up(std::string_view key);
  int uniform_int(const GgufValue &value, int min, int max) const;
  double uniform_float(const GgufValue &value, double min, double max) const;

  const GgufFile &file_;
  std::string prefix_;
  std::set<std::string> seen_;
};

}  // namespace xllm
