// What a launcher needs to know of the device and the stream, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/cuda_check.h"

namespace xllm {
namespace cuda {

struct Device {
  int index = 0;
  int compute_capability = 0;  // 90
  int num_sms = 0;
  uint64_t memory_bytes = 0;
  int max_shared_bytes = 0;  // per CTA, opted in
  int shared_bytes_per_sm = 0;
  int registers_per_sm = 0;
  // Among how many CTAs the matrix kernels of few tokens share out an SM's shared memory. Speed
  // only, never numbers.
  int few_ctas = 1;
  // Slots of a warp of attention for keys and values on their way, 1, 2 or 4; 0: by the grid. Speed
  // only.
  int attention_depth = 0;
  // In tests: rows of prompts by themselves too. Never numbers.
  bool has_plain_rows = false;
  // In tests: rows of prompts in the tiles of GPUs with less shared memory. Never numbers.
  bool has_narrow_tiles = false;
  // Off in tests: the kernels of older GPUs on a newer one.
  bool has_int8_mma = false;
  bool has_wgmma = false;  // in the build that runs
  bool has_dependent_launch = false;
  bool has_clusters = false;
};

struct Launch {
  const Device *device;
  cudaStream_t stream;
};

// Asks for as large a share of an SM's memory for shared memory as the matrix kernels have: kernels
// that differ in it cannot run side by side, so the next one could not start early.
inline void prefer_shared_memory(const void *kernel) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "set the share of shared memory");
}

// Launches kernel(args...) so that it may start before the previous one has ended (it calls
// wait_for_previous_kernel), where the device can; `cluster` CTAs side by side in x share their
// shared memory (1: none do; more only where has_clusters). Checks the launch.
template <typename... Parameters, typename... Arguments>
void launch_clusters(const Launch &launch, const char *name, void (*kernel)(Parameters...),
                     dim3 grid, unsigned cluster, unsigned threads, size_t shared_bytes,
                     Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launch.stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (launch.device->has_dependent_launch) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {cluster, 1, 1};
  }
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
}

template <typename... Parameters, typename... Arguments>
void launch_kernel(const Launch &launch, const char *name, void (*kernel)(Parameters...), dim3 grid,
                   unsigned threads, size_t shared_bytes, Arguments... arguments) {
  launch_clusters(launch, name, kernel, grid, 1, threads, shared_bytes, arguments...);
}

}  // namespace cuda
}  // namespace xllm
