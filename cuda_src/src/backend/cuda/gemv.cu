#include "backend/cuda/gemv.cuh"
#include "backend/cuda/matmul_kernels.h"

namespace xllm {
namespace cuda {

void launch_gemv(const Launch &launch, const MatmulArgs &args) {
  int tiles = args.segments[0].num_tiles;
  if (args.epilogue != kSwiGlu) {
    for (int i = 1; i < args.num_segments; ++i) tiles += args.segments[i].num_tiles;
  }
  const auto kernel = args.num_tokens == 1   ? gemv_kernel<1>
                      : args.num_tokens <= 4 ? gemv_kernel<4>
                                             : gemv_kernel<8>;
  launch_kernel(launch, "gemv", kernel,
                dim3(static_cast<unsigned>(tiles),
                     static_cast<unsigned>((args.num_tokens + kActGroup - 1) / kActGroup)),
                static_cast<unsigned>(args.num_slices * kWarp), 0, args);
}

}  // namespace cuda
}  // namespace xllm
