#include <algorithm>
#include <string>
#include <vector>

#include "backend/cuda/matmul_kernels.h"
#include "backend/cuda/mma_tile.cuh"
#include "base/error.h"

namespace xllm {
namespace cuda {
namespace {

constexpr int kReservedSharedPerCta = 1024;  // taken by the system
constexpr int kMaxItems = 65535;             // SmallDivisor
constexpr int kMaxLaunchTokens = 1024;
// Fewer tokens than this behind the last whole token tile are a launch of their own, with the plan
// that is best for so many.
constexpr int kMinTokensOfLastTile = 33;
constexpr double kLaunch = 4500;  // clocks between two products

// What a kernel is compiled for: units of row_tiles tiles by 8 * groups tokens, each by unit_warps
// warps; beside at most max_warps of them, copying_warps.
struct Shape {
  int row_tiles, groups, unit_warps, max_warps, copying_warps, ctas;
};
constexpr Shape kEight = {1, 1, 1, 15, 1, 1}, kSixteen = {1, 2, 1, 15, 1, 1},
                kMany = {2, 4, 1, 11, 1, 1}, kWide32 = {4, 4, 4, 16, 4, 1},
                kWide64 = {4, 8, 4, 12, 4, 1};
static_assert(kWide64.max_warps == wide_max_groups(8) * 4 && kWide64.row_tiles == kWideTiles, "");
static_assert(kWide32.max_warps == wide_max_groups(4) * 4 && kWide32.row_tiles == kWideTiles, "");

using TileKernel = void (*)(TileArgs);
template <TileTypes kTypes>
TileKernel kernel_of(const Shape &shape) {
  return shape.unit_warps == 4 && shape.groups == 8 ? wgmma_tile_kernel<8, false>
         : shape.unit_warps == 4                    ? wgmma_tile_kernel<4, false>
         : shape.row_tiles == 2 ? mma_tile_kernel<kTypes, 2, 4, kMany.max_warps, kMany.ctas, false>
         : shape.groups == 1
             ? mma_tile_kernel<kTypes, 1, 1, kEight.max_warps, kEight.ctas, false>
             : mma_tile_kernel<kTypes, 1, 2, kSixteen.max_warps, kSixteen.ctas, false>;
}
// Of several token tiles: the shapes that take 64 tokens at a time.
template <TileTypes kTypes>
TileKernel many_kernel_of(const Shape &shape) {
  return shape.unit_warps == 4 && shape.groups == 8 ? wgmma_tile_kernel<8, true>
         : shape.unit_warps == 4 ? wgmma_tile_kernel<4, true>
                                 : mma_tile_kernel<kTypes, 2, 4, kMany.max_warps, kMany.ctas, true>;
}

// Shared memory of a CTA.
int shared_limit(const Device &device, const Shape &shape) {
  return std::min(device.max_shared_bytes,
                  device.shared_bytes_per_sm / shape.ctas - kReservedSharedPerCta);
}

bool has_common_types(const MatmulArgs &args) {
  bool is_common = true;
  for (int i = 0; i < args.num_segments; ++i)
    is_common = is_common && contains(TileTypes::kQ4KQ6K, args.segments[i].type);
  return is_common;
}

// The shapes that can do it, the best of which is taken.
std::vector<Shape> shapes_of(const Device &device, const MatmulArgs &args) {
  // A unit of more than one tile has one type.
  const bool is_mixed = args.epilogue == kSwiGlu && args.segments[0].type != args.segments[1].type;
  if (args.num_tokens <= 8) return {kEight};
  if (args.num_tokens <= 16 || is_mixed) return {kSixteen};
  if (!device.has_wgmma || !has_common_types(args)) return {kMany};
  if (args.num_tokens <= 32) return {kWide32};
  return {kWide64, kWide32};
}

// Tokens of an item, at most.
int tokens_of_tile(const Shape &shape) {
  return shape.row_tiles > 1 ? kMaxTileTokens : 8 * shape.groups;
}

int shared_bytes(const TilePlan &plan, const Shape &shape, bool has_slots) {
  // A part of the tokens may reach past the groups that exist; what lies there is read, and left
  // alone.
  const int past = plan.token_parts * shape.groups - plan.token_groups;
  const int slots = has_slots ? tile_slot_floats(plan, shape.row_tiles, shape.groups) * 4 : 0;
  return kTileBarrierBytes + plan.num_steps * tile_step_bytes(plan, shape.row_tiles) +
         std::max(slots, past * kActChunkBytes);
}

// Clocks of an SM, roughly: what a plan is chosen by. Fitted to steps of decode on an H200, in
// which the plans of one product at a time were changed.
constexpr double kAlone = 550, kAloneToken = 34, kTile = 22, kTileToken = 7.7;
constexpr double kWideAlone = 1740, kWideAloneToken = 24, kWideTile = 117, kWideTileToken = 3.2;
constexpr double kStart = 800, kItem = 800, kOutput = 80, kCta = 20, kPartial = 1.8e-3;
constexpr double kMemoryRate = 27.6, kSharedRate = 29, kOtherTypes = 1.2;
struct Cost {
  double clocks;
  TilePlan plan;
  Shape shape;
};

// The best plan with item_slices slices to an item; clocks are infinite where there is none.
Cost best_plan(const Device &device, const MatmulArgs &args, const Shape &shape, int item_slices) {
  const bool is_swiglu = args.epilogue == kSwiGlu;
  TilePlan plan = {};
  int rows = 0;
  bool is_q4_k = true;
  for (int i = 0; i < args.num_segments; ++i) {
    is_q4_k = is_q4_k && args.segments[i].type == kWeightQ4_K;
    rows += args.segments[i].num_tiles * kTileRows;
    plan.slot_bytes =
        std::max(plan.slot_bytes, static_cast<int>(chunk_bytes(args.segments[i].type)));
    if (!is_swiglu) plan.num_units += tile_units_of(args.segments[i].num_tiles, shape.row_tiles);
  }
  if (is_swiglu) plan.num_units = tile_units_of(2 * args.segments[0].num_tiles, shape.row_tiles);
  const int tile_tokens = std::min(args.num_tokens, tokens_of_tile(shape));
  plan.token_groups = (tile_tokens + kActGroup - 1) / kActGroup;
  plan.token_tiles = (args.num_tokens + tile_tokens - 1) / tile_tokens;
  plan.token_parts = (plan.token_groups + shape.groups - 1) / shape.groups;
  plan.item_slices = item_slices;
  const int item_parts = args.num_slices / item_slices;
  const bool has_slots = item_parts == 1;
  const int round_steps = (args.num_chunks + args.num_slices - 1) / args.num_slices;
  const int most = shared_limit(device, shape);
  Cost best = {1e30, plan, shape};
  for (int parallel = 1; parallel <= item_slices; ++parallel) {
    if (item_slices % parallel != 0) continue;
    const int warps = parallel * plan.token_parts * shape.unit_warps;  // of a unit
    for (int units = 1; units * warps <= shape.max_warps; ++units) {
      if (is_swiglu && shape.row_tiles == 1 && units % 2 != 0) continue;
      plan.parallel_slices = parallel;
      plan.group_units = units;
      const int copies = parallel * (units * shape.row_tiles + plan.token_groups);
      if (copies > kWarp) continue;
      const int groups = (plan.num_units + units - 1) / units;
      plan.num_items = groups * item_parts * plan.token_tiles;
      if (plan.num_items > kMaxItems) continue;
      const int rounds = item_slices / parallel * round_steps;
      const int items = (plan.num_items + device.num_sms - 1) / device.num_sms;
      // A ring of two steps at least, and of no more than the work has.
      plan.num_steps = 2;
      if (shared_bytes(plan, shape, has_slots) > most) continue;
      while (plan.num_steps < std::min(kTileMaxSteps, rounds * items)) {
        ++plan.num_steps;
        if (shared_bytes(plan, shape, has_slots) <= most) continue;
        --plan.num_steps;
        break;
      }
      const int tiles = parallel * units * shape.row_tiles;
      const double weights = tiles * plan.slot_bytes, step = tile_step_bytes(plan, shape.row_tiles);
      // A warp's chunk alone, and all of a step when they share an SM.
      const double tokens = 8.0 * shape.groups;
      const double alone = shape.unit_warps == 4 ? kWideAlone + kWideAloneToken * tokens
                                                 : kAlone + kAloneToken * shape.row_tiles * tokens;
      const double together = tiles * plan.token_parts * (is_q4_k ? 1 : kOtherTypes) *
                              (shape.unit_warps == 4 ? kWideTile + kWideTileToken * tokens
                                                     : kTile + kTileToken * tokens);
      const double clocks =
          std::max(std::max(weights / kMemoryRate, step / kSharedRate), std::max(alone, together));
      // The epilogue of a warp's outputs, and CTAs: an SM without one takes the rows' kernels.
      const double outputs = 4.0 * shape.row_tiles * shape.groups / shape.unit_warps /
                             (has_slots ? parallel : 1) * (is_swiglu ? 2 : 1);
      const double total = kStart + step / 20 + items * (rounds * clocks + kItem) +
                           kOutput * outputs + kCta * std::min(plan.num_items, device.num_sms) +
                           (has_slots ? 0.0 : kPartial * args.num_slices * args.num_tokens * rows);
      if (total < best.clocks) best = {total, plan, shape};
    }
  }
  return best;
}

void set_divisors(const MatmulArgs &args, const Shape &shape, TilePlan *plan) {
  plan->rounds = plan->item_slices / plan->parallel_slices;
  plan->round_steps = (args.num_chunks + args.num_slices - 1) / args.num_slices;
  plan->item_parts = args.num_slices / plan->item_slices;
  plan->by_token_tiles.set(plan->token_tiles);
  plan->by_parts.set(plan->item_parts);
  plan->by_tiles.set(plan->group_units * shape.row_tiles);
  plan->by_token_groups.set(plan->token_groups);
  plan->by_units.set(plan->group_units);
  plan->by_token_parts.set(plan->token_parts);
  for (int s = 0; s <= args.num_slices; ++s)
    plan->slice_chunk[s] =
        static_cast<int16_t>(slice_first_chunk(s, args.num_slices, args.num_chunks));
}

Cost plan_of(const Device &device, const MatmulArgs &args, int item_slices) {
  Cost best = {};
  for (const Shape &shape : shapes_of(device, args)) {
    const Cost cost = best_plan(device, args, shape, item_slices);
    if (best.clocks == 0 || cost.clocks < best.clocks) best = cost;
  }
  return best;
}

void run_plan(const Launch &launch, const MatmulArgs &args, const Cost &cost) {
  const Shape &shape = cost.shape;
  TileArgs one = {args, cost.plan};
  set_divisors(args, shape, &one.plan);
  const TilePlan &plan = one.plan;
  const int warps = plan.parallel_slices * plan.group_units * plan.token_parts * shape.unit_warps +
                    shape.copying_warps;
  const bool is_many = plan.token_tiles > 1;
  const TileKernel kernel =
      has_common_types(args)
          ? (is_many ? many_kernel_of<TileTypes::kQ4KQ6K>(shape)
                     : kernel_of<TileTypes::kQ4KQ6K>(shape))
          : (is_many ? many_kernel_of<TileTypes::kAll>(shape) : kernel_of<TileTypes::kAll>(shape));
  launch_kernel(launch, "mma_tile", kernel,
                dim3(static_cast<unsigned>(std::min(plan.num_items, launch.device->num_sms))),
                static_cast<unsigned>(warps * kWarp),
                static_cast<size_t>(shared_bytes(plan, shape, plan.item_slices == args.num_slices)),
                one);
}

}  // namespace

void prepare_tile(Device *device) {
  const auto prepare = [device](TileKernel kernel) {
    const void *of = reinterpret_cast<const void *>(kernel);
    check(cudaFuncSetAttribute(of, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               device->max_shared_bytes),
          "opt in to shared memory");
    prefer_shared_memory(of);
  };
  for (const Shape &shape : {kEight, kSixteen, kMany, kWide32, kWide64}) {
    prepare(kernel_of<TileTypes::kQ4KQ6K>(shape));
    prepare(kernel_of<TileTypes::kAll>(shape));
  }
  for (const Shape &shape : {kMany, kWide32, kWide64}) {
    prepare(many_kernel_of<TileTypes::kQ4KQ6K>(shape));
    prepare(many_kernel_of<TileTypes::kAll>(shape));
  }
  // Built for another architecture than sm_90a, the kernel has no body, and needs next to nothing.
  cudaFuncAttributes wide = {};
  check(cudaFuncGetAttributes(&wide, reinterpret_cast<const void *>(wgmma_tile_kernel<8, false>)),
        "describe a kernel");
  device->has_wgmma = device->compute_capability == 90 && wide.numRegs > 64;
}

void launch_mma_tile(const Launch &launch, const MatmulArgs &args) {
  const Device &device = *launch.device;
  // Kernels of fewer tokens than a whole tile take one part of them after the other.
  const int tile = tokens_of_tile(shapes_of(device, args).front());
  const int at_once = tile < kMaxTileTokens ? tile : args.num_tokens;
  for (int first = 0; first < args.num_tokens; first += at_once) {
    MatmulArgs one = args;
    one.first_token = args.first_token + first;
    one.num_tokens = std::min(at_once, args.num_tokens - first);
    const Cost cost = plan_of(device, one, args.epilogue == kPartials ? 1 : args.num_slices);
    if (cost.clocks > 1e29) {
      throw Error(Status::kUnimplemented,
                  "CUDA: this GPU's shared memory holds no tile of the matrix kernels (" +
                      std::to_string(device.max_shared_bytes) + " bytes); use the CPU backend");
    }
    run_plan(launch, one, cost);
  }
}

bool tile_wants_partials(const Device &device, const MatmulArgs &args) {
  if (args.epilogue == kSwiGlu || args.num_slices == 1) return false;
  return plan_of(device, args, 1).clocks < plan_of(device, args, args.num_slices).clocks;
}

int tile_launch_tokens(const Device &device, const MatmulArgs &args, bool may_cut) {
  const int most = std::min(args.num_tokens, kMaxLaunchTokens), rest = most % kMaxTileTokens;
  if (most <= kMaxTileTokens) return most;
  MatmulArgs one = args;
  one.num_tokens = rest >= kMinTokensOfLastTile ? most : most - rest;
  if (!may_cut) return one.num_tokens;
  // Few rows and few token tiles: tile by tile, with the slices of each spread over the SMs.
  const int all = one.num_tokens, tiles = (all + kMaxTileTokens - 1) / kMaxTileTokens;
  const double together = plan_of(device, one, args.num_slices).clocks;
  one.num_tokens = kMaxTileTokens;
  return together < tiles * (plan_of(device, one, 1).clocks + kLaunch) ? all : kMaxTileTokens;
}

}  // namespace cuda
}  // namespace xllm
