// Rows of a file to f32 rows on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "tensor/dtype.h"

namespace xllm {
namespace cuda {

// Rows [0, num_rows) at `raw` (device memory, as in the file, any type) to out [num_rows,
// num_cols].
void dequantize(DType dtype, const uint8_t *raw, int64_t num_rows, int64_t num_cols, float *out,
                cudaStream_t stream);

}  // namespace cuda
}  // namespace xllm
