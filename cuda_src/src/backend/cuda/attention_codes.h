// Attention over a cache of 8 or 4 bits (attention.cuh): its kernels.
#pragma once

#include "backend/cuda/attention_args.cuh"
#include "backend/cuda/launch.h"

namespace xllm::cuda {

using AttentionKernel = void (*)(AttentionArgs);

struct CodeKernel {
  AttentionKernel kernel = nullptr;  // null: attention_any_kernel takes this
  int shared_bytes = 0;
};

// groups: of 8 query heads per kv head, 1 or 2; bits: 8 or 4. Keys and values of the step's rows
// are in the cache.
CodeKernel code_attention(const Device &device, int head_dim, int groups, int bits);

// Opts the kernels in to the shared memory they use; once per device.
void prepare_code_attention(const Device &device);

}  // namespace xllm::cuda
