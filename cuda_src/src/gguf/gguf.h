// GGUF model files: metadata and tensors, checked in full before the first value is handed out,
// computed on where they lie.
//
// The bytes (versions 2 and 3, little endian; github.com/ggml-org/ggml docs/gguf.md):
//
//   offset  size  field
//   0       4     magic "GGUF"
//   4       4     u32 version: 2 or 3
//   8       8     u64 num_tensors
//   16      8     u64 num_keys
//   24            num_keys x { string key; u32 type; value }
//                 num_tensors x { string name; u32 num_dims; u64 dims[num_dims]; u32 type;
//                                 u64 offset }
//                 zero bytes up to a multiple of the alignment
//                 the tensor data; each tensor starts at its `offset` from here
//
//   string     u64 size, then that many bytes; no terminator
//   value      u8 i8 bool: 1 byte (a bool is 0 or 1); u16 i16: 2; u32 i32 f32: 4;
//              u64 i64 f64: 8; string; array
//   array      u32 element type; u64 count; count values. Arrays may hold arrays
//   dims       dims[0] is the contiguous one: `rows` rows of `cols` elements have {cols, rows}
//   alignment  the integer under the key general.alignment, 32 without it
//
// What is refused, beyond bytes that contradict this table:
//
//   kModelUnsupported  version 1, or 4 and up; big-endian files; value and tensor types that this
//                      build does not know
//   kModelTruncated    anything that runs past the end of the file
//   kModelMalformed    a key or tensor name that is empty, given twice, or longer than 65,535
//                      (key) or 64 (tensor) bytes; more than 2^20 keys or tensors; arrays nested
//                      more than 4 deep; alignment under 8 or not a power of two; 0 or more than
//                      4 dimensions, a dimension of 0, more than 2^63 - 1 elements or bytes; rows
//                      that are not whole quant blocks; tensors off the alignment or overlapping
//
// A model may be split over files PREFIX-00001-of-00003.gguf, ... Each is a GGUF file of its own
// with the keys split.no (from 0) and split.count; metadata is the first one's. The others may
// hold split.* and general.* and repeat keys of the first with the same value, nothing else.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/mmap.h"
#include "gguf/value.h"
#include "tensor/dtype.h"
#include "tensor/tensor.h"

namespace xllm {

// A tensor of the file. `name` and `data` point into the mapping.
struct GgufTensor {
  std::string_view name;
  DType dtype = DType::kF32;
  uint32_t num_dims = 0;
  uint32_t shard = 0;               // index of the file it lies in
  uint64_t dims[4] = {1, 1, 1, 1};  // dims[0] is the contiguous one; 1 beyond num_dims
  const void *data = nullptr;       // aligned to 8 bytes at least
  uint64_t byte_offset = 0;         // of the data in its file
  uint64_t size_bytes = 0;

  uint64_t num_elements() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
  // As a matrix of dims[1] rows and dims[0] columns; a vector has one row. Throws
  // Error(kModelMalformed) for more dimensions.
  MatrixView matrix() const;
};

// An open model file. Movable, not copyable; views stay valid when it moves and die with it. Const
// use is thread-safe.
class GgufFile {
 public:
  // Opens `path` and, when it is the first of a split model, the others beside it. Reads metadata
  // and tensor table only. Throws Error: kNotFound, kIo (see MappedFile; also for a missing part,
  // naming it), kModelMalformed, kModelTruncated, kModelUnsupported. One line that names the file,
  // the key or tensor and its byte offset.
  static GgufFile open(const std::string &path);

  GgufFile(GgufFile &&) noexcept;
  GgufFile &operator=(GgufFile &&) noexcept;
  ~GgufFile();

  uint32_t version() const;
  uint32_t num_shards() const;
  uint64_t file_bytes() const;      // of all shards
  uint64_t metadata_bytes() const;  // everything that is not tensor data, of all shards
  const MappedFile &shard(uint32_t index) const;

  // Metadata in file order; for a split model the first file's.
  const std::deque<GgufValue> &values() const;
  const GgufValue *find(std::string_view key) const;  // nullptr when absent

  // The value of a key. Without a fallback an absent key throws Error(kModelMalformed) naming it; a
  // key that is there but has another type or lies outside [min, max] always throws.
  int64_t get_int(std::string_view key, int64_t min, int64_t max) const;
  int64_t get_int(std::string_view key, int64_t min, int64_t max, int64_t fallback) const;
  double get_float(std::string_view key, double min, double max) const;
  double get_float(std::string_view key, double min, double max, double fallback) const;
  bool get_bool(std::string_view key, bool fallback) const;
  std::string_view get_string(std::string_view key) const;
  std::string_view get_string(std::string_view key, std::string_view fallback) const;
  const GgufValue &require(std::string_view key) const;

  // Tensors in file order, shard after shard.
  const std::deque<GgufTensor> &tensors() const;
  const GgufTensor *find_tensor(std::string_view name) const;  // nullptr when absent

 private:
  struct Impl;
  explicit GgufFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace xllm
