#include "gguf/value.h"

#include <cmath>
#include <utility>

#include "base/error.h"
#include "gguf/cursor.h"

namespace xllm {
namespace {

constexpr int kMaxArrayDepth = 4;
constexpr uint64_t kMinArrayBytes = 12;  // element type and count

struct TypeInfo {
  const char *label;
  uint32_t size_bytes;  // 0: variable
};
constexpr TypeInfo kTypes[] = {{"u8", 1},  {"i8", 1},  {"u16", 2},  {"i16", 2}, {"u32", 4},
                               {"i32", 4}, {"f32", 4}, {"bool", 1}, {"str", 0}, {"arr", 0},
                               {"u64", 8}, {"i64", 8}, {"f64", 8}};
constexpr uint32_t kNumTypes = sizeof(kTypes) / sizeof(kTypes[0]);

bool is_integer(GgufType type) {
  switch (type) {
    case GgufType::kUint8:
    case GgufType::kInt8:
    case GgufType::kUint16:
    case GgufType::kInt16:
    case GgufType::kUint32:
    case GgufType::kInt32:
    case GgufType::kUint64:
    case GgufType::kInt64:
      return true;
    default:
      return false;
  }
}

bool is_float(GgufType type) { return type == GgufType::kFloat32 || type == GgufType::kFloat64; }

// An integer of `type`; u64 above the range of int64 is the caller's to exclude (exceeds_int64).
int64_t load_int(const uint8_t *data, GgufType type) {
  switch (type) {
    case GgufType::kUint8:
      return load<uint8_t>(data);
    case GgufType::kInt8:
      return load<int8_t>(data);
    case GgufType::kUint16:
      return load<uint16_t>(data);
    case GgufType::kInt16:
      return load<int16_t>(data);
    case GgufType::kUint32:
      return load<uint32_t>(data);
    case GgufType::kInt32:
      return load<int32_t>(data);
    default:
      return load<int64_t>(data);
  }
}

bool exceeds_int64(const uint8_t *data, GgufType type) {
  return type == GgufType::kUint64 && load<uint64_t>(data) >> 63 != 0;
}

double load_float(const uint8_t *data, GgufType type) {
  return type == GgufType::kFloat32 ? double{load<float>(data)} : load<double>(data);
}

std::string int_text(const uint8_t *data, GgufType type) {
  return exceeds_int64(data, type) ? std::to_string(load<uint64_t>(data))
                                   : std::to_string(load_int(data, type));
}

std::string range_text(int64_t min, int64_t max) {
  return "[" + std::to_string(min) + ", " + std::to_string(max) + "]";
}

}  // namespace

const char *gguf_type_label(GgufType type) {
  const auto number = static_cast<uint32_t>(type);
  return number < kNumTypes ? kTypes[number].label : nullptr;
}

uint32_t gguf_type_bytes(GgufType type) {
  const auto number = static_cast<uint32_t>(type);
  return number < kNumTypes ? kTypes[number].size_bytes : 0;
}

GgufType read_type(Cursor *cursor) {
  const uint64_t offset = cursor->offset();
  const auto number = cursor->read<uint32_t>();
  if (number >= kNumTypes) {
    cursor->fail_at(Status::kModelUnsupported, offset,
                    "value type " + std::to_string(number) + " is unknown");
  }
  return static_cast<GgufType>(number);
}

void skip_value(Cursor *cursor, GgufType type, int depth) {
  if (type == GgufType::kString) {
    cursor->read_string();
    return;
  }
  uint64_t count = 1;
  GgufType element = type;
  if (type == GgufType::kArray) {
    if (depth == kMaxArrayDepth) {
      cursor->fail(Status::kModelMalformed,
                   "arrays are nested more than " + std::to_string(kMaxArrayDepth) + " deep");
    }
    element = read_type(cursor);
    count = cursor->read<uint64_t>();
    if (element == GgufType::kString || element == GgufType::kArray) {
      cursor->expect_room(count, element == GgufType::kString ? sizeof(uint64_t) : kMinArrayBytes);
      for (uint64_t i = 0; i < count; ++i) skip_value(cursor, element, depth + 1);
      return;
    }
    cursor->expect_room(count, gguf_type_bytes(element));
  }
  const uint64_t offset = cursor->offset();
  const uint8_t *data = cursor->take(count * gguf_type_bytes(element));
  if (element != GgufType::kBool) return;
  for (uint64_t i = 0; i < count; ++i) {
    if (data[i] > 1) {
      cursor->fail_at(Status::kModelMalformed, offset + i,
                      "expected a bool of 0 or 1, found " + std::to_string(data[i]));
    }
  }
}

int64_t GgufInts::operator[](size_t i) const {
  return load_int(data_ + i * gguf_type_bytes(type_), type_);
}

double GgufFloats::operator[](size_t i) const {
  return load_float(data_ + i * gguf_type_bytes(type_), type_);
}

GgufType GgufValue::element_type() const {
  return is_array() ? static_cast<GgufType>(load<uint32_t>(value_)) : type_;
}

uint64_t GgufValue::num_elements() const {
  return is_array() ? load<uint64_t>(value_ + sizeof(uint32_t)) : 1;
}

uint64_t GgufValue::byte_offset() const { return static_cast<uint64_t>(value_ - file_->data()); }

std::string GgufValue::type_name() const {
  if (!is_array()) return gguf_type_label(type_);
  return std::string("arr[") + gguf_type_label(element_type()) + "]";
}

void GgufValue::fail(const std::string &message) const {
  throw Error(Status::kModelMalformed, file_->name() + ": " + printable(key()) + " (byte " +
                                           std::to_string(byte_offset()) + "): " + message);
}

const uint8_t *GgufValue::elements() const { return is_array() ? value_ + kMinArrayBytes : value_; }

int64_t GgufValue::as_int(int64_t min, int64_t max) const {
  if (!is_integer(type_)) fail("expected an integer, found " + found());
  const bool is_inside = !exceeds_int64(value_, type_) && load_int(value_, type_) >= min &&
                         load_int(value_, type_) <= max;
  if (!is_inside) {
    fail("expected an integer in " + range_text(min, max) + ", found " + int_text(value_, type_));
  }
  return load_int(value_, type_);
}

double GgufValue::as_float(double min, double max) const {
  if (!is_integer(type_) && !is_float(type_)) fail("expected a number, found " + found());
  double number = 0;
  if (is_float(type_)) {
    number = load_float(value_, type_);
  } else if (exceeds_int64(value_, type_)) {
    number = static_cast<double>(load<uint64_t>(value_));
  } else {
    number = static_cast<double>(load_int(value_, type_));
  }
  if (!std::isfinite(number) || number < min || number > max) {
    fail("expected a finite number in [" + float_json(min) + ", " + float_json(max) + "], found " +
         float_json(number));
  }
  return number;
}

bool GgufValue::as_bool() const {
  if (type_ != GgufType::kBool) fail("expected a bool, found " + found());
  return *value_ != 0;
}

std::string_view GgufValue::as_string() const {
  if (type_ != GgufType::kString) fail("expected a string, found " + found());
  return Cursor(file_, byte_offset()).read_string();
}

GgufStrings GgufValue::as_strings() const {
  if (!is_array() || element_type() != GgufType::kString) {
    fail("expected an array of strings, found " + found());
  }
  Cursor cursor(file_, byte_offset() + kMinArrayBytes);
  cursor.describe(key());
  const uint64_t start = cursor.offset();
  const uint64_t count = num_elements();
  std::vector<uint64_t> ends;
  ends.reserve(count + 1);
  ends.push_back(0);
  for (uint64_t i = 0; i < count; ++i) {
    cursor.read_string();
    ends.push_back(cursor.offset() - start);
  }
  return {elements(), std::move(ends)};
}

GgufInts GgufValue::as_ints(int64_t min, int64_t max) const {
  const GgufType type = element_type();
  if (!is_integer(type)) fail("expected integers, found " + found());
  const GgufInts ints(elements(), num_elements(), type);
  const uint32_t stride = gguf_type_bytes(type);
  for (size_t i = 0; i < ints.size(); ++i) {
    const uint8_t *data = elements() + i * stride;
    if (exceeds_int64(data, type) || ints[i] < min || ints[i] > max) {
      fail("element " + std::to_string(i) + ": expected an integer in " + range_text(min, max) +
           ", found " + int_text(data, type));
    }
  }
  return ints;
}

GgufFloats GgufValue::as_floats() const {
  const GgufType type = element_type();
  if (!is_float(type)) fail("expected floats, found " + found());
  const GgufFloats floats(elements(), num_elements(), type);
  for (size_t i = 0; i < floats.size(); ++i) {
    if (std::isnan(floats[i])) fail("element " + std::to_string(i) + " is not a number");
  }
  return floats;
}

std::pair<GgufType, std::string_view> GgufValue::raw() const {
  Cursor cursor(file_, byte_offset());
  cursor.describe(key());
  skip_value(&cursor, type_);
  return {type_, {reinterpret_cast<const char *>(value_), cursor.offset() - byte_offset()}};
}

void GgufValue::expect_array(GgufType type, uint64_t count) const {
  if (!is_array() || element_type() != type || num_elements() != count) {
    fail("expected " + std::to_string(count) + " x arr[" + gguf_type_label(type) + "], found " +
         found());
  }
}

// "u32 7", "f32 1.5", "12 x arr[str]": type and, where short, value.
std::string GgufValue::found() const {
  if (is_array()) return std::to_string(num_elements()) + " x " + type_name();
  return type_name() + " " + to_json(0, 40);
}

}  // namespace xllm
