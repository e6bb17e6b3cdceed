#include "backend/cuda/attention.cuh"
#include "backend/cuda/attention_codes.h"

namespace xllm::cuda {
namespace {

constexpr int kDepth = 2;

template <int kHeadDim, int kGroups, int kBits>
CodeKernel kernel_of(const Device &device) {
  CodeKernel found;
  const int shared = attention_shared_bytes(kHeadDim, kGroups, kDepth, kBits);
  if (attention_static_bytes(kHeadDim, kGroups) + shared > device.max_shared_bytes) return found;
  found.kernel = attention_kernel<kHeadDim, kGroups, kDepth, false, kBits>;
  found.shared_bytes = shared;
  return found;
}

template <int kHeadDim>
CodeKernel kernel_of(const Device &device, int groups, int bits) {
  if (bits == 8)
    return groups == 1 ? kernel_of<kHeadDim, 1, 8>(device) : kernel_of<kHeadDim, 2, 8>(device);
  return groups == 1 ? kernel_of<kHeadDim, 1, 4>(device) : kernel_of<kHeadDim, 2, 4>(device);
}

}  // namespace

CodeKernel code_attention(const Device &device, int head_dim, int groups, int bits) {
  switch (head_dim) {
    case 64:
      return kernel_of<64>(device, groups, bits);
    case 128:
      return kernel_of<128>(device, groups, bits);
    case 256:
      return kernel_of<256>(device, groups, bits);
    default:
      return CodeKernel();
  }
}

void prepare_code_attention(const Device &device) {
  for (const int head_dim : {64, 128, 256}) {
    for (const int groups : {1, 2}) {
      for (const int bits : {8, 4}) {
        const CodeKernel found = code_attention(device, head_dim, groups, bits);
        if (found.kernel == nullptr) continue;
        const void *function = reinterpret_cast<const void *>(found.kernel);
        check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   found.shared_bytes),
              "set shared memory size");
        prefer_shared_memory(function);
      }
    }
  }
}

}  // namespace xllm::cuda
