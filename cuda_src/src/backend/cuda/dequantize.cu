#include <algorithm>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/dequantize.cuh"
#include "backend/cuda/dequantize.h"

namespace xllm {
namespace cuda {

void dequantize(DType dtype, const uint8_t *raw, int64_t num_rows, int64_t num_cols, float *out,
                cudaStream_t stream) {
  DequantizeArgs args = {};
  args.row_bytes = static_cast<int64_t>(dtype_bytes(dtype, static_cast<uint64_t>(num_cols)));
  args.num_cols = num_cols;
  args.type = static_cast<int>(dtype);
  constexpr int64_t kMaxGridY = 65535;
  for (int64_t row = 0; row < num_rows; row += kMaxGridY) {
    args.raw = raw + row * args.row_bytes;
    args.out = out + row * num_cols;
    const dim3 grid(static_cast<unsigned>((num_cols + 255) / 256),
                    static_cast<unsigned>(std::min(kMaxGridY, num_rows - row)));
    dequantize_kernel<<<grid, 256, 0, stream>>>(args);
    check_launch("dequantize");
  }
}

}  // namespace cuda
}  // namespace xllm
