// Builds GGUF files byte by byte, right or wrong on purpose, and a folder for them that goes away.
#pragma once

#include <stdlib.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "gguf/value.h"

namespace xllm {

// A string of bytes that numbers, strings and values are appended to, as GGUF writes them.
class Bytes {
 public:
  template <typename T>
  Bytes &number(T value) {
    static_assert(std::is_arithmetic_v<T>);
    char raw[sizeof value];
    std::memcpy(raw, &value, sizeof value);
    text_.append(raw, sizeof value);
    return *this;
  }
  Bytes &u32(uint64_t value) { return number(static_cast<uint32_t>(value)); }
  Bytes &u64(uint64_t value) { return number(value); }
  Bytes &raw(std::string_view bytes) {
    text_.append(bytes);
    return *this;
  }
  Bytes &string(std::string_view value) { return u64(value.size()).raw(value); }
  Bytes &type(GgufType type) { return u32(static_cast<uint32_t>(type)); }
  const std::string &text() const { return text_; }

 private:
  std::string text_;
};

template <typename T>
constexpr GgufType type_of() {
  if constexpr (std::is_same_v<T, uint8_t>) return GgufType::kUint8;
  if constexpr (std::is_same_v<T, int8_t>) return GgufType::kInt8;
  if constexpr (std::is_same_v<T, uint16_t>) return GgufType::kUint16;
  if constexpr (std::is_same_v<T, int16_t>) return GgufType::kInt16;
  if constexpr (std::is_same_v<T, uint32_t>) return GgufType::kUint32;
  if constexpr (std::is_same_v<T, int32_t>) return GgufType::kInt32;
  if constexpr (std::is_same_v<T, uint64_t>) return GgufType::kUint64;
  if constexpr (std::is_same_v<T, int64_t>) return GgufType::kInt64;
  if constexpr (std::is_same_v<T, float>) return GgufType::kFloat32;
  if constexpr (std::is_same_v<T, double>) return GgufType::kFloat64;
  if constexpr (std::is_same_v<T, bool>) return GgufType::kBool;
}

// A whole file. Tensors get the next aligned offset and data of their own byte pattern.
class GgufBuilder {
 public:
  uint32_t version = 3;
  uint64_t alignment = 32;  // of the layout; the key general.alignment is the test's to write

  // A key with any bytes behind it (type number included).
  GgufBuilder &key_raw(std::string_view key, std::string_view bytes) {
    keys_.string(key).raw(bytes);
    ++num_keys;
    return *this;
  }
  template <typename T>
  GgufBuilder &key(std::string_view name, T value) {
    return key_raw(name, Bytes().type(type_of<T>()).number(value).text());
  }
  GgufBuilder &key(std::string_view name, const char *value) {
    return key_raw(name, Bytes().type(GgufType::kString).string(value).text());
  }
  template <typename T>
  GgufBuilder &array(std::string_view name, const std::vector<T> &values) {
    Bytes bytes;
    bytes.type(GgufType::kArray).type(type_of<T>()).u64(values.size());
    for (const T value : values) bytes.number(value);
    return key_raw(name, bytes.text());
  }
  GgufBuilder &array(std::string_view name, const std::vector<std::string> &values) {
    Bytes bytes;
    bytes.type(GgufType::kArray).type(GgufType::kString).u64(values.size());
    for (const std::string &value : values) bytes.string(value);
    return key_raw(name, bytes.text());
  }

  // A record of the tensor table, as it stands; adds no data.
  GgufBuilder &tensor_raw(std::string_view name, const std::vector<uint64_t> &dims, uint32_t type,
                          uint64_t offset) {
    tensors_.string(name).u32(dims.size());
    for (const uint64_t dim : dims) tensors_.u64(dim);
    tensors_.u32(type).u64(offset);
    ++num_tensors;
    return *this;
  }
  // A tensor with `size_bytes` bytes of data behind those of the tensors before it.
  GgufBuilder &tensor(std::string_view name, const std::vector<uint64_t> &dims, uint32_t type,
                      uint64_t size_bytes) {
    data_.resize((data_.size() + alignment - 1) / alignment * alignment, '\0');
    tensor_raw(name, dims, type, data_.size());
    for (uint64_t i = 0; i < size_bytes; ++i) {
      data_.push_back(static_cast<char>(num_tensors * 16 + i % 16));
    }
    return *this;
  }

  // The file. `num_keys` and `num_tensors` may be overwritten before.
  std::string build() const {
    std::string bytes = Bytes().raw("GGUF").u32(version).u64(num_tensors).u64(num_keys).text() +
                        keys_.text() + tensors_.text();
    if (data_.empty()) return bytes;
    bytes.resize((bytes.size() + alignment - 1) / alignment * alignment, '\0');
    return bytes + data_;
  }

  uint64_t num_keys = 0;
  uint64_t num_tensors = 0;

 private:
  Bytes keys_;
  Bytes tensors_;
  std::string data_;
};

// A temporary folder.
class TempFolder {
 public:
  TempFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "xllm-test-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = path;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder &) = delete;
  TempFolder &operator=(const TempFolder &) = delete;

  std::string path(const std::string &name) const { return path_ + "/" + name; }
  // Writes `bytes` under `name` and returns the path.
  std::string write(const std::string &name, const std::string &bytes) const {
    std::ofstream(path(name), std::ios::binary | std::ios::trunc) << bytes;
    return path(name);
  }

 private:
  std::string path_;
};

}  // namespace xllm
