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

template <TypeSet kSet, int kSlots>
FewKernel few_kernel_of(int tokens) {
  return tokens == 1   ? mma_few_kernel<1, kSet, kSlots>
         : tokens == 2 ? mma_few_kernel<2, kSet, kSlots>
                       : mma_few_kernel<4, kSet, kSlots>;
}

template <int kSlots>
FewKernel few_kernel_of(TypeSet set, int tokens) {
  return set == TypeSet::kQ4KQ6K ? few_kernel_of<TypeSet::kQ4KQ6K, kSlots>(tokens)
         : set == TypeSet::kQ8_0 ? few_kernel_of<TypeSet::kQ8_0, kSlots>(tokens)
                                 : few_kernel_of<TypeSet::kAll, kFewSlots>(tokens);
}

FewKernel few_kernel(TypeSet set, int tokens, int slots) {
  return slots == kFewManySlots ? few_kernel_of<kFewManySlots>(set, tokens)
                                : few_kernel_of<kFewSlots>(set, tokens);
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
      for (const int slots : {kFewSlots, kFewManySlots}) {
        const FewKernel kernel = few_kernel(set, tokens, slots);
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   device->max_shared_bytes),
              "set shared memory size");
        prefer_shared_memory(reinterpret_cast<const void *>(kernel));
      }
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
  const int longest = (args.num_chunks + args.num_slices - 1) / args.num_slices;
  const bool is_halved = 2 * few.group_tiles * args.num_slices <= kFewMaxWarps &&
                         args.num_chunks / args.num_slices >= 2 && longest <= 2 * kHalfChunks + 1;
  few.num_halves = is_halved ? 2 : 1;
  const int jobs = few.group_tiles * args.num_slices * few.num_halves;
  const int tile_places = few_tile_places(args.num_slices, few.num_halves);
  const auto shared_with = [&](int slots) {
    return few_shared_bytes(jobs, slots, few.slot_bytes, args.num_chunks, few.group_tiles,
                            tile_places, tokens);
  };
  // An SM is to have one CTA of this kernel and one of the next, which loads its first weights
  // while this one is at work. So that no two of one kernel come to one SM, products take turns in
  // taking more than half of an SM and less: o and down, which add to the residual, take more.
  const bool takes_more = args.epilogue == kAddTo;
  const bool is_alone = device.few_ctas == 1;
  const int fifths = is_alone ? 5 : takes_more ? 3 : 2;
  const int share = device.shared_bytes_per_sm / 5 * fifths - kReservedSharedPerCta;
  const int least = takes_more || is_alone ? device.shared_bytes_per_sm / 2 : 0;
  const int most = device.max_shared_bytes;
  // The deeper ring where there is room and use for it.
  const int rounds = (few.num_groups + device.num_sms - 1) / device.num_sms;
  const TypeSet set = type_set_of(args);
  const bool is_deep = set != TypeSet::kAll && rounds * longest > kFewSlots * few.num_halves &&
                       shared_with(kFewManySlots) <= std::min(share, most);
  const int slots = is_deep ? kFewManySlots : kFewSlots;
  const int shared = shared_with(slots);
  // A very long K leaves no room for so many tokens at once: fewer, more often.
  if (shared > most) {
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
  launch_kernel(launch, "mma_few", few_kernel(set, tokens, slots),
                dim3(static_cast<unsigned>(std::min(few.num_groups, device.num_sms))),
                static_cast<unsigned>(kFewMaxWarps * kWarp),
                static_cast<size_t>(std::max(least, shared)), few);
}

}  // namespace cuda
}  // namespace xllm
