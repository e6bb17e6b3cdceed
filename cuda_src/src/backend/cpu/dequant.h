// Rows of any tensor type as f32.
#pragma once

#include <cstdint>

#include "tensor/dtype.h"

namespace xllm::cpu {

// Writes `cols` (a whole number of quant blocks) elements of one row to out. Bit-equal to the
// `gguf` Python package's dequantiser, which is the reference's: unfused, (d * scale) * q - (dmin *
// min).
void dequantize_row(DType dtype, const void *row, int64_t cols, float *out);

}  // namespace xllm::cpu
