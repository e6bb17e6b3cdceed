// Weights on their way to the device: which types there are, how large they become, and the kernels
// that rearrange them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

namespace xllm {
namespace cuda {

// The WeightType (planes.cuh) that a matrix of this type becomes, or -1 where there is none.
int weight_type_of(DType dtype);
bool is_plain(int weight_type);

// Bytes of a tile of 16 rows and `cols` columns; of all tiles of a matrix; or of its rows where the
// type is plain.
uint64_t tile_bytes(int weight_type, int64_t cols);
uint64_t device_bytes(const MatrixView &matrix);

// Rearranges rows [0, num_rows) at `raw` (device memory, as in the file) into the tiles at `tiles`;
// the last tile is filled with zeros.
void repack(DType dtype, const uint8_t *raw, int64_t num_rows, int64_t num_cols, uint8_t *tiles,
            cudaStream_t stream);

// The host's twins, for tests: tiles from rows, and the rows' quant blocks from tiles (types that
// are stored as themselves only).
std::vector<uint8_t> repack_on_host(const MatrixView &matrix);
std::vector<uint8_t> unpack_on_host(DType dtype, const std::vector<uint8_t> &tiles,
                                    int64_t num_rows, int64_t num_cols);
// The f32 value of (row, col) of tiles that lie in host memory.
float tile_value_on_host(int weight_type, const uint8_t *tiles, int64_t num_cols, int64_t row,
                         int64_t col);
// One output of a product in the canonical order (matmul_args.cuh), bit for bit: codes [num_cols] q
// of one token in the order of the columns, scales [chunks of 256] its dx.
float product_on_host(int weight_type, const uint8_t *tiles, int64_t num_cols, int64_t row,
                      const int16_t *codes, const float *scales);

}  // namespace cuda
}  // namespace xllm
