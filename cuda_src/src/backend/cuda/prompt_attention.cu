#include <algorithm>

#include "backend/cuda/prompt_attention.cuh"
#include "backend/cuda/prompt_attention.h"

namespace xllm::cuda {
namespace {

struct Choice {
  int head_dim, bits;  // bits: of a value in the cache
  void (*kernel)(AttentionArgs);
};

constexpr Choice kChoices[] = {
    {64, 16, prompt_attention_kernel<64>},     {80, 16, prompt_attention_kernel<80>},
    {96, 16, prompt_attention_kernel<96>},     {128, 16, prompt_attention_kernel<128>},
    {64, 8, prompt_attention_kernel<64, 8>},   {64, 4, prompt_attention_kernel<64, 4>},
    {128, 8, prompt_attention_kernel<128, 8>}, {128, 4, prompt_attention_kernel<128, 4>},
};

int shared_bytes(const Choice &choice) { return prompt_shared_bytes(choice.head_dim, choice.bits); }

bool has_room(const Device &device, const Choice &choice) {
  return prompt_static_bytes(choice.head_dim) + shared_bytes(choice) <= device.max_shared_bytes;
}

const Choice *find(const Device &device, int head_dim, int bits) {
  for (const Choice &choice : kChoices) {
    if (choice.head_dim == head_dim && choice.bits == bits && has_room(device, choice))
      return &choice;
  }
  return nullptr;
}

}  // namespace

void prepare_prompt_attention(const Device &device) {
  prepare_wide_attention(device);
  for (const Choice &choice : kChoices) {
    if (!has_room(device, choice)) continue;
    const void *function = reinterpret_cast<const void *>(choice.kernel);
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               shared_bytes(choice)),
          "set shared memory size");
    prefer_shared_memory(function);
  }
}

bool has_prompt_attention(const Device &device, int head_dim, int group_size, int bits) {
  return has_wide_attention(device, head_dim, group_size, bits) ||
         (prompt_piece_rows(group_size) >= 2 && find(device, head_dim, bits) != nullptr);
}

void prompt_attention(const Launch &launch, AttentionArgs args, int num_splits, int num_tiles,
                      int num_rows) {
  if (has_wide_attention(*launch.device, args.head_dim, args.group_size, args.kv.bits))
    return wide_attention(launch, args, num_splits, num_tiles, num_rows);
  num_tiles *= prompt_tile_pieces(args.group_size);
  const Choice &choice = *find(*launch.device, args.head_dim, args.kv.bits);
  // CTAs for about two rounds of the device, of as many splits as that leaves each. Speed only.
  const int64_t all = int64_t{num_splits} * num_tiles * args.kv.num_kv_heads;
  const int64_t wanted = 2 * int64_t{launch.device->num_sms};
  args.splits_per_cta =
      static_cast<int>(std::min((all + wanted - 1) / wanted, int64_t{num_splits}));
  const int ctas = (num_splits + args.splits_per_cta - 1) / args.splits_per_cta;
  launch_kernel(launch, "prompt_attention", choice.kernel,
                dim3(static_cast<unsigned>(num_tiles), static_cast<unsigned>(args.kv.num_kv_heads),
                     static_cast<unsigned>(ctas)),
                kPromptThreads, static_cast<size_t>(shared_bytes(choice)), args);
}

}  // namespace xllm::cuda
