// Stands in for matrix kernels that are not built yet. TO BE DELETED with the last of them.
#include "backend/cuda/matmul_kernels.h"

namespace xllm {
namespace cuda {

__attribute__((weak)) void prepare_few(Device *device) { device->has_int8_mma = false; }
__attribute__((weak)) void launch_mma_few(const Launch &launch, const MatmulArgs &args) {
  launch_gemv(launch, args);
}
__attribute__((weak)) void prepare_tile(Device *) {}
__attribute__((weak)) void launch_mma_tile(const Launch &launch, const MatmulArgs &args) {
  launch_gemv(launch, args);
}
__attribute__((weak)) bool tile_wants_partials(const Device &, const MatmulArgs &) { return false; }

}  // namespace cuda
}  // namespace xllm
