// Launches of mma_few: how a product is cut into groups, and how much shared memory it takes.
#include <algorithm>
#include <string>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/matmul_kernels.h"
#include "backend/cuda/mma_few.cuh"

namespace xllm {
namespace cuda {
namespace {

constexpr int kReservedSharedPerCta = 1024;  // taken by the system from each CTA's share of an SM

using FewKernel = void (*)(FewArgs);
constexpr TypeSet kTypeSets[] = {TypeSet::kQ4KQ6K, TypeSet::kQ8_0, TypeSet::kAll};

template <TypeSet kSet>
FewKernel few_kernel_of(int tokens) {
  return tokens == 1   ? mma_few_kernel<1, kSet>
         : tokens == 2 ? mma_few_kernel<2, kSet>
                       : mma_few_kernel<4, kSet>;
}

FewKernel few_kernel(TypeSet set, int tokens) {
  return set == TypeSet::kQ4KQ6K ? few_kernel_of<TypeSet::kQ4KQ6K>(tokens)
         : set == TypeSet::kQ8_0 ? few_kernel_of<TypeSet::kQ8_0>(tokens)
                                 : few_kernel_of<TypeSet::kAll>(tokens);
}

TypeSet type_set_of(const MatmulArgs &args) {
  for (const TypeSet set : {TypeSet::kQ4KQ6K, TypeSet::kQ8_0}) {
    bool has_all = true;
    for (int i = 0; i < args.num_segments; ++i)
      has_all = has_all && contains(set, args.segments[i].type);
    if (has_all) return set;
  }
  return TypeSet::kAll;
}

}  // namespace

void prepare_few(Device *device) {
  for (const TypeSet set : kTypeSets) {
    for (const int tokens : {1, 2, 4}) {
      const FewKernel kernel = few_kernel(set, tokens);
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 device->max_shared_bytes),
            "set shared memory size");
      prefer_shared_memory(reinterpret_cast<const void *>(kernel));
    }
  }
}

void launch_mma_few(const Launch &launch, const MatmulArgs &args) {
  const Device &device = *launch.device;
  const int tokens = args.num_tokens <= 2 ? args.num_tokens : 4;
  FewArgs few = {};
  few.product = args;
  for (int s = 0; s <= args.num_slices; ++s)
    few.slice_first[s] = slice_first_chunk(s, args.num_slices, args.num_chunks);
  int num_tiles = 0;
  for (int i = 0; i < args.num_segments; ++i) {
    num_tiles += args.segments[i].num_tiles;
    few.slot_bytes = std::max(few.slot_bytes, static_cast<int>(chunk_bytes(args.segments[i].type)));
  }
  // A warp for each slice of as many tiles as there are warps for, without leaving SMs idle.
  const int step = args.epilogue == kSwiGlu ? 2 : 1;
  few.group_tiles = step;
  while ((few.group_tiles + step) * args.num_slices <= kFewMaxWarps &&
         (num_tiles + few.group_tiles) / (few.group_tiles + step) * 10 >= device.num_sms * 9) {
    few.group_tiles += step;
  }
  few.num_groups = (num_tiles + few.group_tiles - 1) / few.group_tiles;
  const int jobs = few.group_tiles * args.num_slices;
  const auto shared_with = [&](int slots) {
    return few_shared_bytes(jobs, slots, few.slot_bytes, args.num_chunks, few.group_tiles,
                            args.num_slices, tokens);
  };
  // As deep a ring as the CTA's share of an SM allows, and two slots at least; deeper than all of a
  // warp's work is of no use.
  const int share =
      device.shared_bytes_per_sm / std::max(1, device.few_ctas) - kReservedSharedPerCta;
  const int most = device.max_shared_bytes;
  const int rounds = (few.num_groups + device.num_sms - 1) / device.num_sms;
  const int longest = (args.num_chunks + args.num_slices - 1) / args.num_slices;
  const int useful = std::min(kFewMaxSlots, rounds * longest);
  few.num_slots = 1;
  for (int slots = 2; slots <= useful; ++slots) {
    if (shared_with(slots) <= (slots == 2 ? most : std::min(share, most))) few.num_slots = slots;
  }
  // A very long K leaves no room for so many tokens at once: fewer, more often.
  if (shared_with(few.num_slots) > most) {
    if (tokens == 1) {
      throw Error(Status::kUnimplemented,
                  "CUDA: a matrix of " + std::to_string(args.num_units * kUnitCols) +
                      " columns is wider than the matrix kernels can take; use the CPU backend");
    }
    MatmulArgs half = args;
    half.num_tokens = tokens / 2;
    launch_mma_few(launch, half);
    half.first_token += half.num_tokens;
    half.num_tokens = args.num_tokens - half.num_tokens;
    launch_mma_few(launch, half);
    return;
  }
  // Warps without a slice help with the activations.
  const int warps = std::max(jobs, std::min(kFewMaxWarps, args.num_chunks));
  launch_kernel(launch, "mma_few", few_kernel(type_set_of(args), tokens),
                dim3(static_cast<unsigned>(std::min(few.num_groups, device.num_sms))),
                static_cast<unsigned>(warps * kWarp),
                static_cast<size_t>(shared_with(few.num_slots)), few);
}

}  // namespace cuda
}  // namespace xllm
