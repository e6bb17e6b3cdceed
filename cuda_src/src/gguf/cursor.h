// A bounds-checked position in a mapped file: every read is compared with the bytes that remain.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/mmap.h"
#include "gguf/value.h"

namespace xllm {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF is read where it lies");

// The T at `data`, which need not be aligned.
template <typename T>
T load(const uint8_t *data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

class Cursor {
 public:
  Cursor(const MappedFile *file, uint64_t offset) : file_(file), offset_(offset) {}

  uint64_t offset() const { return offset_; }
  uint64_t remaining() const { return file_->size() - offset_; }
  const uint8_t *position() const { return file_->data() + offset_; }

  // What is being read, for messages; the views must outlive their use here.
  void describe(std::string_view item) { item_ = item; }

  // The start of the next `size` bytes, and past them.
  const uint8_t *take(uint64_t size) {
    if (size > remaining()) fail_short(size);
    const uint8_t *data = position();
    offset_ += size;
    return data;
  }

  template <typename T>
  T read() {
    return load<T>(take(sizeof(T)));
  }

  std::string_view read_string() {
    const uint64_t size = read<uint64_t>();
    return {reinterpret_cast<const char *>(take(size)), static_cast<size_t>(size)};
  }

  // Throws unless `count` records of at least `min_size` bytes each could follow.
  void expect_room(uint64_t count, uint64_t min_size) const {
    if (count > remaining() / min_size) {
      fail(count > kMaxCount ? Status::kModelMalformed : Status::kModelTruncated,
           "expected " + std::to_string(count) + " entries, found " + std::to_string(remaining()) +
               " bytes left in the file");
    }
  }

  // Throws "FILE: ITEM (byte N): MESSAGE".
  [[noreturn]] void fail(Status status, const std::string &message) const {
    fail_at(status, offset_, message);
  }
  [[noreturn]] void fail_at(Status status, uint64_t offset, const std::string &message) const {
    throw Error(status, file_->name() + ": " + printable(item_) + " (byte " +
                            std::to_string(offset) + "): " + message);
  }

 private:
  // A size that no file can have is a wrong number; anything less may be a file cut short.
  static constexpr uint64_t kMaxCount = std::numeric_limits<int64_t>::max();

  [[noreturn]] void fail_short(uint64_t size) const {
    fail(size > kMaxCount ? Status::kModelMalformed : Status::kModelTruncated,
         "expected " + std::to_string(size) + " more bytes, found " + std::to_string(remaining()));
  }

  const MappedFile *file_;
  uint64_t offset_;
  std::string_view item_ = "header";
};

// Bytes of a value of fixed size; 0 for strings, arrays and numbers that are no type.
uint32_t gguf_type_bytes(GgufType type);

// Moves past one value of `type` after checking all of it. `depth`: how many arrays it lies in.
void skip_value(Cursor *cursor, GgufType type, int depth = 0);

// A u32 type number, refused (kModelUnsupported) when it is no type.
GgufType read_type(Cursor *cursor);

}  // namespace xllm
