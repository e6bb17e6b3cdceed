#include <algorithm>
#include <string>

#include "backend/cuda/matmul_kernels.h"
#include "backend/cuda/mma_tile.cuh"
#include "base/error.h"

namespace xllm {
namespace cuda {
namespace {

constexpr int kReservedSharedPerCta = 1024;  // taken by the system

// What a kernel is compiled for.
struct Shape {
  int row_tiles, groups, max_warps, ctas;
};
constexpr Shape kEight = {1, 1, 15, 1}, kSixteen = {1, 2, 15, 1}, kMany = {2, 4, 11, 1};

using TileKernel = void (*)(TileArgs);
template <TileTypes kTypes>
TileKernel kernel_of(const Shape &shape) {
  return shape.row_tiles == 2 ? mma_tile_kernel<kTypes, 2, 4, kMany.max_warps, kMany.ctas>
         : shape.groups == 1  ? mma_tile_kernel<kTypes, 1, 1, kEight.max_warps, kEight.ctas>
                              : mma_tile_kernel<kTypes, 1, 2, kSixteen.max_warps, kSixteen.ctas>;
}

// Shared memory of a CTA.
int shared_limit(const Device &device, const Shape &shape) {
  return std::min(device.max_shared_bytes,
                  device.shared_bytes_per_sm / shape.ctas - kReservedSharedPerCta);
}

bool has_one_type(const MatmulArgs &args) {
  for (int i = 1; i < args.num_segments; ++i)
    if (args.segments[i].type != args.segments[0].type) return false;
  return true;
}

Shape shape_of(const MatmulArgs &args) {
  return args.num_tokens <= 8 ? kEight : args.num_tokens <= 16 ? kSixteen : kMany;
}

int shared_bytes(const TilePlan &plan, const Shape &shape, bool has_slots) {
  // A part of the tokens may reach past the groups that exist; what lies there is read, and left
  // alone.
  const int past = plan.token_parts * shape.groups - plan.token_groups;
  const int slots =
      has_slots ? tile_slot_floats(plan, shape.row_tiles, shape.groups) * 4 : 0;
  return kTileBarrierBytes + plan.num_steps * tile_step_bytes(plan, shape.row_tiles) +
         std::max(slots, past * kActChunkBytes);
}

// Clocks of an SM, roughly: what a plan is chosen by.
struct Cost {
  double clocks;
  TilePlan plan;
};

// The best plan with item_slices slices to an item; clocks are infinite where there is none.
Cost best_plan(const Device &device, const MatmulArgs &args, const Shape &shape, int item_slices) {
  const bool is_swiglu = args.epilogue == kSwiGlu;
  TilePlan plan = {};
  int rows = 0;
  for (int i = 0; i < args.num_segments; ++i) {
    rows += args.segments[i].num_tiles * kTileRows;
    plan.slot_bytes =
        std::max(plan.slot_bytes, static_cast<int>(chunk_bytes(args.segments[i].type)));
    if (!is_swiglu) plan.num_units += tile_units_of(args.segments[i].num_tiles, shape.row_tiles);
  }
  if (is_swiglu) plan.num_units = 2 * args.segments[0].num_tiles / shape.row_tiles;
  plan.token_groups = (args.num_tokens + kActGroup - 1) / kActGroup;
  plan.token_parts = (plan.token_groups + shape.groups - 1) / shape.groups;
  plan.item_slices = item_slices;
  const int item_parts = args.num_slices / item_slices;
  const bool has_slots = item_parts == 1;
  const int round_steps = (args.num_chunks + args.num_slices - 1) / args.num_slices;
  const int most = shared_limit(device, shape);
  Cost best = {1e30, plan};
  for (int parallel = 1; parallel <= item_slices; ++parallel) {
    if (item_slices % parallel != 0) continue;
    for (int units = 1; units * parallel * plan.token_parts <= shape.max_warps; ++units) {
      if (is_swiglu && shape.row_tiles == 1 && units % 2 != 0) continue;
      plan.parallel_slices = parallel;
      plan.group_units = units;
      const int copies = parallel * (units * shape.row_tiles + plan.token_groups);
      if (copies > kWarp) continue;
      const int groups = (plan.num_units + units - 1) / units;
      plan.num_items = groups * item_parts;
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
      const double alone = 1500.0 + 200 * shape.row_tiles * shape.groups;  // a warp's chunk
      const double together = tiles * (60 + 24.0 * plan.token_parts * shape.groups);
      const double clocks = std::max(std::max(weights / 20, step / 36), std::max(alone, together));
      const double start = 1500 + step / 20;
      const double total = start + items * (rounds * clocks + 400) +
                           (has_slots ? 0.0 : 1e-3 * args.num_slices * args.num_tokens * rows);
      if (total < best.clocks) best = {total, plan};
    }
  }
  return best;
}

Cost plan_of(const Device &device, const MatmulArgs &args, const Shape &shape) {
  return best_plan(device, args, shape, args.epilogue == kPartials ? 1 : args.num_slices);
}

}  // namespace

void prepare_tile(Device *device) {
  for (const Shape &shape : {kEight, kSixteen, kMany}) {
    for (const TileKernel kernel :
         {kernel_of<TileTypes::kQ4KQ6K>(shape), kernel_of<TileTypes::kAll>(shape)}) {
      const void *of = reinterpret_cast<const void *>(kernel);
      check(cudaFuncSetAttribute(of, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 device->max_shared_bytes),
            "opt in to shared memory");
      check(cudaFuncSetAttribute(of, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared),
            "prefer shared memory");
    }
  }
}

void launch_mma_tile(const Launch &launch, const MatmulArgs &args) {
  Shape shape = shape_of(args);
  // A unit of two tiles has one type.
  if (args.epilogue == kSwiGlu && shape.row_tiles == 2 && !has_one_type(args)) shape = kSixteen;
  const int at_once = shape.row_tiles == 2 ? kMaxTileTokens : 8 * shape.groups;
  bool is_common = true;
  for (int i = 0; i < args.num_segments; ++i)
    is_common = is_common && contains(TileTypes::kQ4KQ6K, args.segments[i].type);
  for (int first = 0; first < args.num_tokens; first += at_once) {
    TileArgs one = {args, {}};
    one.matmul.first_token = args.first_token + first;
    one.matmul.num_tokens = std::min(at_once, args.num_tokens - first);
    const Cost cost = plan_of(*launch.device, one.matmul, shape);
    if (cost.clocks > 1e29) {
      throw Error(Status::kUnimplemented,
                  "CUDA: this GPU's shared memory holds no tile of the matrix kernels (" +
                      std::to_string(launch.device->max_shared_bytes) +
                      " bytes); use the CPU backend");
    }
    one.plan = cost.plan;
    const TilePlan &plan = one.plan;
    const int warps = plan.parallel_slices * plan.group_units * plan.token_parts + 1;
    launch_kernel(launch, "mma_tile",
                  is_common ? kernel_of<TileTypes::kQ4KQ6K>(shape)
                            : kernel_of<TileTypes::kAll>(shape),
                  dim3(static_cast<unsigned>(std::min(plan.num_items, launch.device->num_sms))),
                  static_cast<unsigned>(warps * kWarp),
                  static_cast<size_t>(
                      shared_bytes(plan, shape, plan.item_slices == args.num_slices)),
                  one);
  }
}

bool tile_wants_partials(const Device &device, const MatmulArgs &args) {
  if (args.epilogue == kSwiGlu || args.num_slices == 1) return false;
  const Shape shape = shape_of(args);
  return best_plan(device, args, shape, 1).clocks <
         best_plan(device, args, shape, args.num_slices).clocks;
}

}  // namespace cuda
}  // namespace xllm
