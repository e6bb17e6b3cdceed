#include "model/key_reader.h"

#include <limits>

#include "base/error.h"

namespace xllm {
namespace {

bool is_float_type(GgufType type) {
  return type == GgufType::kFloat32 || type == GgufType::kFloat64;
}

}  // namespace

const GgufValue *KeyReader::look_up(std::string_view key) {
  skip(key);
  return file_.find(full(key));
}

int KeyReader::uniform_int(const GgufValue &value, int min, int max) const {
  if (!value.is_array()) return static_cast<int>(value.as_int(min, max));
  const GgufInts ints = value.as_ints(min, max);
  if (ints.empty()) value.fail("expected one value or one per layer, found an empty array");
  for (size_t i = 1; i < ints.size(); ++i) {
    if (ints[i] != ints[0]) {
      throw Error(Status::kModelUnsupported,
                  file_.shard(0).name() + ": " + std::string(value.key()) + " (byte " +
                      std::to_string(value.byte_offset()) +
                      "): expected the same value for every layer, found " +
                      std::to_string(ints[0]) + " and " + std::to_string(ints[i]));
    }
  }
  return static_cast<int>(ints[0]);
}

double KeyReader::uniform_float(const GgufValue &value, double min, double max) const {
  if (!value.is_array()) return value.as_float(min, max);
  if (!is_float_type(value.element_type()))
    value.fail("expected a number, found an array of " + value.type_name());
  const GgufFloats floats = value.as_floats();
  if (floats.empty()) value.fail("expected one value or one per layer, found an empty array");
  for (size_t i = 1; i < floats.size(); ++i) {
    if (floats[i] != floats[0]) {
      throw Error(Status::kModelUnsupported,
                  file_.shard(0).name() + ": " + std::string(value.key()) + " (byte " +
                      std::to_string(value.byte_offset()) +
                      "): expected the same value for every layer, found " +
                      std::to_string(floats[0]) + " and " + std::to_string(floats[i]));
    }
  }
  // note: written so that a NaN fails too.
  if (!(floats[0] >= min && floats[0] <= max)) {
    value.fail("expected a number from " + std::to_string(min) + " to " + std::to_string(max) +
               ", found " + std::to_string(floats[0]));
  }
  return floats[0];
}

int KeyReader::get_int(std::string_view key, int min, int max) {
  skip(key);
  return uniform_int(file_.require(full(key)), min, max);
}

int KeyReader::get_int(std::string_view key, int min, int max, int fallback) {
  const GgufValue *value = look_up(key);
  return value == nullptr ? fallback : uniform_int(*value, min, max);
}

double KeyReader::get_float(std::string_view key, double min, double max) {
  skip(key);
  return uniform_float(file_.require(full(key)), min, max);
}

double KeyReader::get_float(std::string_view key, double min, double max, double fallback) {
  const GgufValue *value = look_up(key);
  return value == nullptr ? fallback : uniform_float(*value, min, max);
}

bool KeyReader::get_bool(std::string_view key, bool fallback) {
  const GgufValue *value = look_up(key);
  return value == nullptr ? fallback : value->as_bool();
}

std::string_view KeyReader::get_string(std::string_view key, std::string_view fallback) {
  const GgufValue *value = look_up(key);
  return value == nullptr ? fallback : value->as_string();
}

void KeyReader::expect_neutral(std::string_view key, double neutral, const char *what) {
  const GgufValue *value = look_up(key);
  if (value == nullptr) return;
  const bool is_bool = value->type() == GgufType::kBool;
  const double found =
      is_bool ? (value->as_bool() ? 1 : 0)
      : value->is_array() && !is_float_type(value->element_type())
          ? uniform_int(*value, std::numeric_limits<int>::min(), std::numeric_limits<int>::max())
          : uniform_float(*value, std::numeric_limits<double>::lowest(),
                          std::numeric_limits<double>::max());
  if (found != neutral)
    unsupported(key, std::string("this build has no ") + what + "; found " + value->to_json());
}

void KeyReader::expect_none_left() const {
  for (const GgufValue &value : file_.values()) {
    const std::string key(value.key());
    if (key.compare(0, prefix_.size(), prefix_) == 0 && seen_.count(key) == 0) {
      unsupported(key.substr(prefix_.size()),
                  "unknown to this build, and it may change what the model computes");
    }
  }
}

void KeyReader::unsupported(std::string_view key, const std::string &message) const {
  const GgufValue *value = file_.find(full(key));
  const std::string where =
      value == nullptr ? "" : " (byte " + std::to_string(value->byte_offset()) + ")";
  throw Error(Status::kModelUnsupported,
              file_.shard(0).name() + ": " + printable(full(key)) + where + ": " + message);
}

}  // namespace xllm
