#include "backend/cuda/prompt_attention.cuh"
#include "backend/cuda/prompt_attention.h"

namespace xllm::cuda {
namespace {

struct Choice {
  int head_dim, depth;
  void (*kernel)(AttentionArgs);
};

// Of a head size, the deepest ring first.
constexpr Choice kChoices[] = {
    {64, 4, prompt_attention_kernel<64, 4>},   {80, 2, prompt_attention_kernel<80, 2>},
    {96, 2, prompt_attention_kernel<96, 2>},   {128, 4, prompt_attention_kernel<128, 4>},
    {128, 2, prompt_attention_kernel<128, 2>}, {256, 2, prompt_attention_kernel<256, 2>},
};

bool has_room(const Device &device, const Choice &choice) {
  return prompt_static_bytes(choice.head_dim) +
             prompt_shared_bytes(choice.head_dim, choice.depth) <=
         device.max_shared_bytes;
}

const Choice *find(const Device &device, int head_dim) {
  for (const Choice &choice : kChoices) {
    if (choice.head_dim == head_dim && has_room(device, choice)) return &choice;
  }
  return nullptr;
}

}  // namespace

void prepare_prompt_attention(const Device &device) {
  for (const Choice &choice : kChoices) {
    if (!has_room(device, choice)) continue;
    const void *function = reinterpret_cast<const void *>(choice.kernel);
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               prompt_shared_bytes(choice.head_dim, choice.depth)),
          "set shared memory size");
    prefer_shared_memory(function);
  }
}

bool has_prompt_attention(const Device &device, int head_dim) {
  return find(device, head_dim) != nullptr;
}

void prompt_attention(const Launch &launch, const AttentionArgs &args, int num_splits,
                      int num_tiles) {
  const Choice &choice = *find(*launch.device, args.head_dim);
  launch_kernel(launch, "prompt_attention", choice.kernel,
                dim3(static_cast<unsigned>(num_splits), static_cast<unsigned>(args.kv.num_kv_heads),
                     static_cast<unsigned>(num_tiles)),
                kAttentionThreads,
                static_cast<size_t>(prompt_shared_bytes(choice.head_dim, choice.depth)), args);
}

}  // namespace xllm::cuda
