// Views of tensors that someone else owns.
#pragma once

#include <cstdint>
#include <string>

#include "tensor/dtype.h"

namespace xllm {

// A row-major matrix of `rows` rows of `cols` elements, each row a whole number of quant blocks; or
// nothing (data null). In GGUF's dimension order that is ne[0] = cols, ne[1] = rows. A vector has
// rows = 1.
struct MatrixView {
  const void *data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  std::string name;  // as in the file, for messages

  explicit operator bool() const { return data != nullptr; }
  uint64_t row_bytes() const { return dtype_bytes(dtype, static_cast<uint64_t>(cols)); }
  uint64_t size_bytes() const { return row_bytes() * static_cast<uint64_t>(rows); }
  const uint8_t *row(int64_t r) const {
    return static_cast<const uint8_t *>(data) + static_cast<uint64_t>(r) * row_bytes();
  }
};

}  // namespace xllm
