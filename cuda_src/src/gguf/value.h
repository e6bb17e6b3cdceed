// One metadata value of a GGUF file: a typed, bounds-checked view of the mapped bytes. Nothing is
// copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mmap.h"

namespace xllm {

// Value types, by the file's numbers.
enum class GgufType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// "u8", "i32", "f32", "bool", "str", "arr", ...; nullptr for a number that is no type.
const char *gguf_type_label(GgufType type);

// The strings of an array, by index, as views of the mapped file. Owns a table of offsets: 8 bytes
// per string.
class GgufStrings {
 public:
  GgufStrings() = default;
  GgufStrings(const uint8_t *base, std::vector<uint64_t> ends)
      : base_(base), ends_(std::move(ends)) {}
  size_t size() const { return ends_.empty() ? 0 : ends_.size() - 1; }
  bool empty() const { return size() == 0; }
  // String i; i < size(). Any bytes: not necessarily UTF-8, may hold NUL.
  std::string_view operator[](size_t i) const {
    const uint64_t start = ends_[i] + 8;  // past the length field
    return {reinterpret_cast<const char *>(base_ + start), ends_[i + 1] - start};
  }

 private:
  const uint8_t *base_ = nullptr;
  std::vector<uint64_t>
      ends_;  // ends_[0]: start of the first; ends_[i + 1]: end of string i, from base_
};

// The integers of an array (of any integer type), already checked to lie in the range asked for.
class GgufInts {
 public:
  GgufInts() = default;
  GgufInts(const uint8_t *data, size_t size, GgufType type)
      : data_(data), size_(size), type_(type) {}
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t operator[](size_t i) const;

 private:
  const uint8_t *data_ = nullptr;  // not aligned
  size_t size_ = 0;
  GgufType type_ = GgufType::kInt32;
};

// The numbers of a f32 or f64 array; none is NaN.
class GgufFloats {
 public:
  GgufFloats() = default;
  GgufFloats(const uint8_t *data, size_t size, GgufType type)
      : data_(data), size_(size), type_(type) {}
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  double operator[](size_t i) const;

 private:
  const uint8_t *data_ = nullptr;  // not aligned
  size_t size_ = 0;
  GgufType type_ = GgufType::kFloat32;
};

// A key and its value. Lives in its GgufFile and is valid as long as that is.
// Every as_* that finds another type or a value out of range throws Error(kModelMalformed) with one
// line that names the file, the key, the value's byte offset, what was expected and what was found.
class GgufValue {
 public:
  // For GgufFile, which has checked the bytes at `value` for `type`.
  GgufValue(const MappedFile *file, std::string_view key, GgufType type, const uint8_t *value)
      : file_(file),
        key_(key.data()),
        value_(value),
        key_size_(static_cast<uint32_t>(key.size())),
        type_(type) {}

  std::string_view key() const { return {key_, key_size_}; }
  GgufType type() const { return type_; }
  bool is_array() const { return type_ == GgufType::kArray; }
  GgufType element_type() const;  // of an array; type() of anything else
  uint64_t num_elements() const;  // of an array; 1 of anything else
  uint64_t byte_offset() const;   // of the value in its file
  std::string type_name() const;  // "u32", "str", "arr[i32]"

  // Any integer type; never a float, bool or array. min and max are inclusive.
  int64_t as_int(int64_t min = std::numeric_limits<int64_t>::min(),
                 int64_t max = std::numeric_limits<int64_t>::max()) const;
  // f32, f64 or any integer type; finite and in [min, max].
  double as_float(double min = std::numeric_limits<double>::lowest(),
                  double max = std::numeric_limits<double>::max()) const;
  bool as_bool() const;
  std::string_view as_string() const;

  // An array of strings. O(elements); keep the result rather than asking twice.
  GgufStrings as_strings() const;
  // An array of any integer type with every element in [min, max]. A scalar reads as an array of
  // one.
  GgufInts as_ints(int64_t min = std::numeric_limits<int64_t>::min(),
                   int64_t max = std::numeric_limits<int64_t>::max()) const;
  // An array of f32 or f64 without NaN. A scalar float reads as an array of one.
  GgufFloats as_floats() const;

  // Throws unless this is an array of exactly `count` elements of exactly `type` (vocabulary
  // tables: one entry per token).
  void expect_array(GgufType type, uint64_t count) const;

  // The type and the value's bytes in the file: equal for equal values.
  std::pair<GgufType, std::string_view> raw() const;

  // The value as JSON: of an array at most max_elements elements, of a string at most max_bytes
  // bytes (cut between characters and marked with an ellipsis). Bytes that are not UTF-8 become
  // U+FFFD; NaN and infinities become strings.
  std::string to_json(size_t max_elements = 16, size_t max_bytes = 4096) const;

  // An Error(kModelMalformed) about this value, for callers' own checks: "FILE: KEY (byte N):
  // MESSAGE".
  [[noreturn]] void fail(const std::string &message) const;

 private:
  const uint8_t *elements() const;  // the first value
  std::string found() const;        // type and value, for messages

  const MappedFile *file_;
  const char *key_;
  const uint8_t *value_;
  uint32_t key_size_;
  GgufType type_;
};

// `text` for a one-line message: in quotes-free printable ASCII (other bytes as \xNN), cut after 80
// bytes.
std::string printable(std::string_view text);

// A number as JSON, the shortest text that reads back the same; NaN and infinities are strings.
std::string float_json(double number);

}  // namespace xllm
