// Stands in for matrix kernels that are not built yet. TO BE DELETED with the last of them.
#include "backend/cuda/matmul_kernels.h"

namespace xllm {
namespace cuda {

__attribute__((weak)) void prepare_few(Device *) {}
__attribute__((weak)) void launch_mma_few(const Launch &launch, const MatmulArgs &args) {
  launch_mma_tile(launch, args);
}
}  // namespace cuda
}  // namespace xllm
