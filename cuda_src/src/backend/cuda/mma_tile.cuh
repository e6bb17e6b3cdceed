// Products of 5 to 64 tokens on tensor cores: reads each weight once per 64 tokens.
//
// An item of work is a group of row tiles and some of K's slices; a CTA takes items blockIdx.x,
// blockIdx.x + gridDim.x, ... One warp copies, the others compute. A step of the ring is one chunk
// of columns of each slice that is worked on at the same time: the chunks of the group's tiles and
// the activations, which all warps share. The first steps' weights are asked for before the
// previous kernel has finished, activations, which it writes, after.
//
// A computing warp has kRowTiles tiles (a unit) of one slice by 8 * kGroups tokens; warp = (slice *
// units + unit) * token parts + part. Each activation in shared memory thus serves kRowTiles tiles.
// Sums of slices meet in shared memory, in slots: slices that are worked on at the same time in one
// each, to be added up at the end, others in a single one as they come. kPartials leaves them in
// the output instead.
//   shared  barriers, ring [steps] { tiles [slices][tiles][slot_bytes], activations
//           [slices][groups][kActChunkBytes] }, slots [2 if several][slots][units * parts]
//           [outputs of a lane][32] f32
#pragma once

#include "backend/cuda/matmul_args.cuh"
#include "backend/cuda/ring_copies.cuh"
#include "backend/cuda/tile_chunk.cuh"

namespace xllm {
namespace cuda {

constexpr int kTileMaxSteps = 8;  // of the ring
constexpr int kTileBarrierBytes = 128;
static_assert(2 * kTileMaxSteps * 8 <= kTileBarrierBytes, "barriers");

template <int kValue>
struct TypeConstant {
  static constexpr int value = kValue;
};

// The types that a kernel is compiled for: with all of them in one it grows slow to load.
enum class TileTypes { kQ4KQ6K, kAll };
XLLM_HOST_DEVICE constexpr bool contains(TileTypes set, int type) {
  return set == TileTypes::kAll ? type < kNumTileTypes
                                : type == kWeightQ4_K || type == kWeightQ6_K;
}

// How a launch is cut; a matter of speed alone. Units are of kRowTiles tiles.
struct TilePlan {
  int group_units;      // of an item
  int num_units;        // of all segments
  int parallel_slices;  // worked on at the same time
  int item_slices;      // of an item; those of all items of a group are the product's
  int token_parts;      // of 8 * kGroups tokens
  int token_groups;     // of 8 tokens, that exist
  int slot_bytes;       // of a tile in a step
  int num_steps;        // of the ring
  int num_items;
};

struct TileArgs {
  MatmulArgs matmul;
  TilePlan plan;
};

XLLM_HOST_DEVICE int tile_units_of(int num_tiles, int row_tiles) {
  return (num_tiles + row_tiles - 1) / row_tiles;
}
XLLM_HOST_DEVICE int tile_step_bytes(const TilePlan &plan, int row_tiles) {
  return plan.parallel_slices *
         (plan.group_units * row_tiles * plan.slot_bytes + plan.token_groups * kActChunkBytes);
}
XLLM_HOST_DEVICE int tile_slot_floats(const TilePlan &plan, int row_tiles, int groups) {
  const int slots = plan.parallel_slices == 1 ? 1 : 2 * plan.item_slices;
  return slots * plan.group_units * plan.token_parts * row_tiles * groups * 4 * kWarp;
}

// Which tile is tile `index` of a unit. False where there is none.
struct TilePlace {
  int segment, tile;
};
template <int kRowTiles>
__device__ __forceinline__ bool find_tile(const MatmulArgs &args, int unit, int index,
                                          TilePlace *at) {
  if (args.epilogue == kSwiGlu) {  // gate and up in turn
    const int flat = unit * kRowTiles + index;
    *at = {flat & 1, flat >> 1};
  } else {
    int s = 0;
    for (; s + 1 < args.num_segments; ++s) {
      const int units = tile_units_of(args.segments[s].num_tiles, kRowTiles);
      if (unit < units) break;
      unit -= units;
    }
    *at = {s, unit * kRowTiles + index};
  }
  return at->tile < args.segments[at->segment].num_tiles;
}

// The item that a CTA is at.
struct TileItem {
  int index, group, first_slice;

  __device__ __forceinline__ void set(const TileArgs &args, int i) {
    const int parts = args.matmul.num_slices / args.plan.item_slices;
    index = i;
    group = i / parts;
    first_slice = i % parts * args.plan.item_slices;
  }
};

// ---- the copying warp: one copy of a step per lane ----

struct TileCopier {
  const uint8_t *from;  // chunk 0 of K, null: this lane has nothing to copy
  int bytes;            // of a chunk
  int missing_bytes;    // of the last chunk of K
  int first, end;       // chunks
  int to;               // in a step

  template <int kRowTiles>
  __device__ __forceinline__ void set(const TileArgs &args, const TileItem &item, int round,
                                      int lane) {
    const TilePlan &plan = args.plan;
    const MatmulArgs &matmul = args.matmul;
    const int tiles = plan.group_units * kRowTiles, weights = plan.parallel_slices * tiles;
    from = nullptr;
    bytes = missing_bytes = first = end = to = 0;
    int slice = 0;
    if (lane < weights) {
      slice = lane / tiles;
      const int index = lane % tiles, unit = item.group * plan.group_units + index / kRowTiles;
      TilePlace at;
      if (unit >= plan.num_units || !find_tile<kRowTiles>(matmul, unit, index % kRowTiles, &at))
        return;
      const MatmulSegment &segment = matmul.segments[at.segment];
      from = segment.tiles + at.tile * segment.tile_bytes;
      bytes = static_cast<int>(chunk_bytes(segment.type));
      missing_bytes = static_cast<int>(static_cast<int64_t>(matmul.num_chunks) * bytes -
                                       segment.tile_bytes);
      to = lane * plan.slot_bytes;
    } else if (lane < weights + plan.parallel_slices * plan.token_groups) {
      const int index = lane - weights, group = index % plan.token_groups;
      slice = index / plan.token_groups;
      from = matmul.act.chunk(matmul.first_token + group * kActGroup, 0);
      bytes = kActChunkBytes;
      to = weights * plan.slot_bytes + index * kActChunkBytes;
    }
    const int in_item = round * plan.parallel_slices + slice;
    if (in_item >= plan.item_slices) return;
    first = slice_first_chunk(item.first_slice + in_item, matmul.num_slices, matmul.num_chunks);
    end = slice_first_chunk(item.first_slice + in_item + 1, matmul.num_slices, matmul.num_chunks);
  }

  // Bytes of this lane's copy for chunk `index` of its slice.
  __device__ __forceinline__ int size(const MatmulArgs &args, int index) const {
    const int chunk = first + index;
    if (from == nullptr || chunk >= end) return 0;
    return bytes - (chunk + 1 == args.num_chunks ? missing_bytes : 0);
  }
};

// By the copying warp: announces `size` bytes of each lane to come in this phase of the barrier.
__device__ __forceinline__ void expect_copies(uint64_t *barrier, int size, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const int total = warp_sum(size);
  if (lane == 0) {
    asm volatile(
        "{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n\t}" ::"r"(
            shared_address(barrier)),
        "r"(total)
        : "memory");
  }
  __syncwarp();
#endif
}
// Asks for them; a lane whose size is 0 asks for nothing.
__device__ __forceinline__ void issue_copies(uint64_t *barrier, uint8_t *to, const uint8_t *from,
                                             int size, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (size > 0) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(to)),
        "l"(from), "r"(size), "r"(shared_address(barrier))
        : "memory");
  }
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  for (int i = 0; i < kWarp; ++i) {
    const int bytes = __shfl_sync(0xffffffffu, size, i);
    const auto source = reinterpret_cast<const uint8_t *>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(from), i));
    const auto target = reinterpret_cast<uint8_t *>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(to), i));
    for (int at = lane * 16; at < bytes; at += kWarp * 16)
      copy_async_16(target + at, source + at);
  }
#endif
}
// After the last of a phase.
__device__ __forceinline__ void finish_copies(uint64_t *barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

// Steps of a round: chunks of its longest slice.
__device__ __forceinline__ int tile_round_steps(const MatmulArgs &args) {
  return (args.num_chunks + args.num_slices - 1) / args.num_slices;
}

struct TileRing {
  uint64_t *full, *empty;
  uint8_t *base;
  int step_bytes, num_steps;
  int step;
  uint32_t parity;

  __device__ __forceinline__ void advance() {
    if (++step == num_steps) {
      step = 0;
      parity ^= 1;
    }
  }
};

template <int kRowTiles>
__device__ __forceinline__ void copy_items(const TileArgs &args, TileRing ring, int lane) {
  const TilePlan &plan = args.plan;
  const int steps = tile_round_steps(args.matmul);
  const int rounds = (plan.item_slices + plan.parallel_slices - 1) / plan.parallel_slices;
  const int weights = plan.parallel_slices * plan.group_units * kRowTiles;
  TileCopier copier;
  TileItem item;
  item.set(args, static_cast<int>(blockIdx.x));
  copier.set<kRowTiles>(args, item, 0, lane);
  const int early = min(steps, ring.num_steps);
  for (int i = 0; i < early; ++i) {
    const int size = copier.size(args.matmul, i);
    expect_copies(ring.full + i, size, lane);
    if (lane >= weights) continue;
    issue_copies(ring.full + i, ring.base + i * ring.step_bytes + copier.to,
                 copier.from + static_cast<int64_t>(copier.first + i) * copier.bytes, size, lane);
  }
  __syncwarp();
  wait_for_previous_kernel();
  bool is_first_lap = true;
  for (int round = 0, done = 0;;) {
    for (int i = done; i < steps; ++i) {
      const int size = copier.size(args.matmul, i);
      const bool is_early = i < early && is_first_lap && round == 0 &&
                            item.index == static_cast<int>(blockIdx.x);
      if (!is_early) {
        if (!is_first_lap) wait_for_phase(ring.empty + ring.step, ring.parity ^ 1);
        expect_copies(ring.full + ring.step, size, lane);
      }
      issue_copies(ring.full + ring.step, ring.base + ring.step * ring.step_bytes + copier.to,
                   copier.from + static_cast<int64_t>(copier.first + i) * copier.bytes,
                   is_early && lane < weights ? 0 : size, lane);
      finish_copies(ring.full + ring.step);
      ring.advance();
      if (ring.step == 0) is_first_lap = false;
    }
    if (++round == rounds) {
      round = 0;
      if (item.index + static_cast<int>(gridDim.x) >= plan.num_items) return;
      item.set(args, item.index + static_cast<int>(gridDim.x));
    }
    copier.set<kRowTiles>(args, item, round, lane);
  }
}

// ---- the computing warps ----

// One slice: `chunks` of them from `first`; the rest of the round's steps pass by.
template <int kType, int kRowTiles, int kGroups>
__device__ __forceinline__ void tile_slice(const MatmulArgs &args, TileRing *ring, int first,
                                           int chunks, int steps,
                                           const int (&tile_at)[kRowTiles], int acts_at, int lane,
                                           float (&acc)[kRowTiles][kGroups][4]) {
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    wait_for_phase(ring->full + ring->step, ring->parity);
    if (i < chunks) {
      const uint8_t *step = ring->base + ring->step * ring->step_bytes;
      const uint8_t *tiles[kRowTiles];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) tiles[r] = step + tile_at[r];
      const TileActs acts = {step + acts_at};
      tile_chunk<kType, kRowTiles, kGroups>(
          tiles, acts, min(kUnitsPerChunk, args.num_units - (first + i) * kUnitsPerChunk), lane,
          acc);
    }
    __syncwarp();
    if (lane == 0) arrive(ring->empty + ring->step);
    ring->advance();
  }
}

// Adds up a slice's sums in its slot, or leaves them in the output of kPartials.
template <int kRowTiles, int kGroups>
__device__ __forceinline__ void store_slice(const TileArgs &args, int slice, bool is_first,
                                            const TilePlace (&at)[kRowTiles],
                                            const bool (&has)[kRowTiles], int first_token,
                                            float *slot, int lane,
                                            const float (&acc)[kRowTiles][kGroups][4]) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      if (args.matmul.epilogue == kPartials) {
        const MatmulSegment &segment = args.matmul.segments[at[r].segment];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = at[r].tile * kTileRows + g + 8 * (j >> 1);
          const int token = first_token + n * 8 + 2 * t + (j & 1);
          if (has[r] && row < segment.num_rows && token < args.matmul.num_tokens) {
            args.matmul.out[(static_cast<int64_t>(slice) * args.matmul.num_tokens + token) *
                                args.matmul.out_stride +
                            segment.out_row + row] = acc[r][n][j];
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float *to = slot + ((r * kGroups + n) * 4 + j) * kWarp + lane;
          *to = is_first ? acc[r][n][j] : __fadd_rn(*to, acc[r][n][j]);
        }
      }
    }
  }
}

// One slice of one type, from the ring to where its sums go.
template <int kType, int kRowTiles, int kGroups>
__device__ __forceinline__ void run_slice(const TileArgs &args, TileRing *ring, int slice,
                                          bool is_first, int steps,
                                          const int (&tile_at)[kRowTiles], int acts_at,
                                          const TilePlace (&at)[kRowTiles],
                                          const bool (&has)[kRowTiles], int first_token,
                                          float *slot, int lane) {
  const MatmulArgs &matmul = args.matmul;
  const int first = slice_first_chunk(slice, matmul.num_slices, matmul.num_chunks);
  const int end = slice_first_chunk(slice + 1, matmul.num_slices, matmul.num_chunks);
  float acc[kRowTiles][kGroups][4] = {};
  tile_slice<kType, kRowTiles, kGroups>(matmul, ring, first, end - first, steps, tile_at, acts_at,
                                        lane, acc);
  store_slice<kRowTiles, kGroups>(args, slice, is_first, at, has, first_token, slot, lane, acc);
}

__device__ __forceinline__ void sync_computing_warps(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

template <TileTypes kTypes, int kRowTiles, int kGroups>
__device__ __forceinline__ void compute_items(const TileArgs &args, TileRing ring, float *slots,
                                              int warp, int lane) {
  const TilePlan &plan = args.plan;
  const MatmulArgs &matmul = args.matmul;
  constexpr int kOutputs = kRowTiles * kGroups * 4;
  const int part = warp % plan.token_parts;
  const int unit = warp / plan.token_parts % plan.group_units;
  const int lane_slice = warp / plan.token_parts / plan.group_units;
  const int first_token = part * kGroups * kActGroup;
  const int steps = tile_round_steps(matmul);
  const int rounds = (plan.item_slices + plan.parallel_slices - 1) / plan.parallel_slices;
  const int places = plan.group_units * plan.token_parts;  // warps of a slice
  const int place = unit * plan.token_parts + part;
  const int tiles = plan.group_units * kRowTiles;
  const bool is_parallel = plan.parallel_slices > 1;
  int tile_at[kRowTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
    tile_at[r] = (lane_slice * tiles + unit * kRowTiles + r) * plan.slot_bytes;
  const int acts_at = plan.parallel_slices * tiles * plan.slot_bytes +
                      (lane_slice * plan.token_groups + part * kGroups) * kActChunkBytes;

  int set = 0;
  TileItem item;
  for (int index = static_cast<int>(blockIdx.x); index < plan.num_items;
       index += static_cast<int>(gridDim.x)) {
    item.set(args, index);
    const int product_unit = item.group * plan.group_units + unit;
    TilePlace at[kRowTiles];
    bool has[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      has[r] = product_unit < plan.num_units &&
               find_tile<kRowTiles>(matmul, product_unit, r, &at[r]);
      if (!has[r]) at[r] = {0, 0};
    }
    const int type = matmul.segments[at[0].segment].type;
    float *item_slots = slots + set * plan.item_slices * places * kOutputs * kWarp;
    for (int round = 0; round < rounds; ++round) {
      const int in_item = round * plan.parallel_slices + lane_slice;
      if (!has[0] || in_item >= plan.item_slices) {
        for (int i = 0; i < steps; ++i) {
          wait_for_phase(ring.full + ring.step, ring.parity);
          if (lane == 0) arrive(ring.empty + ring.step);
          ring.advance();
        }
        continue;
      }
      const int slice = item.first_slice + in_item;
      const bool is_first = is_parallel || in_item == 0;
      float *slot = item_slots + ((is_parallel ? in_item : 0) * places + place) * kOutputs * kWarp;
      const auto run = [&](auto constant) {
        constexpr int kType = decltype(constant)::value;
        if constexpr (contains(kTypes, kType)) {
          run_slice<kType, kRowTiles, kGroups>(args, &ring, slice, is_first, steps, tile_at,
                                               acts_at, at, has, first_token, slot, lane);
        }
      };
      switch (type) {
        case kWeightQ4_K: run(TypeConstant<kWeightQ4_K>()); break;
        case kWeightQ6_K: run(TypeConstant<kWeightQ6_K>()); break;
        case kWeightQ5_K: run(TypeConstant<kWeightQ5_K>()); break;
        case kWeightQ8_0: run(TypeConstant<kWeightQ8_0>()); break;
        case kWeightQ4_0: run(TypeConstant<kWeightQ4_0>()); break;
        case kWeightQ4_1: run(TypeConstant<kWeightQ4_1>()); break;
        case kWeightQ5_0: run(TypeConstant<kWeightQ5_0>()); break;
        default: run(TypeConstant<kWeightQ5_1>()); break;
      }
    }
    if (matmul.epilogue == kPartials) continue;
    // The sums of an output: by the warps that share its tile, a part of the outputs each; gate and
    // up in two units where a unit is one tile.
    const bool has_pairs = matmul.epilogue == kSwiGlu && kRowTiles == 1;
    if (is_parallel || has_pairs) {
      sync_computing_warps(plan.parallel_slices * places * kWarp);
      set ^= is_parallel ? 1 : 0;
    }
    const auto sum_of = [&](int from_place, int output) {
      const float *slot = item_slots + (from_place * kOutputs + output) * kWarp + lane;
      float y = *slot;
      if (is_parallel) {
        for (int s = 1; s < plan.item_slices; ++s)
          y = __fadd_rn(y, slot[s * places * kOutputs * kWarp]);
      }
      return y;
    };
    const int g = lane >> 2, t = lane & 3;
    const int workers = plan.parallel_slices * (has_pairs ? 2 : 1);
    const int worker = lane_slice + (has_pairs ? plan.parallel_slices * (unit & 1) : 0);
    const bool is_swiglu = matmul.epilogue == kSwiGlu;
    const int count = !has[0] ? 0 : is_swiglu && kRowTiles == 2 ? kOutputs / 2 : kOutputs;
    const int gate_place = has_pairs ? place - (unit & 1) * plan.token_parts : place;
    for (int output = worker; output < count; output += workers) {
      const int r = output / (kGroups * 4), n = output / 4 % kGroups, j = output & 3;
      const int token = first_token + n * 8 + 2 * t + (j & 1);
      const int row = at[0].tile * kTileRows + r * kTileRows + g + 8 * (j >> 1);
      if (token >= matmul.num_tokens) continue;
      float y = sum_of(gate_place, output);
      if (is_swiglu) {
        const float up = kRowTiles == 2 ? sum_of(place, output + kOutputs / 2)
                                        : sum_of(gate_place + plan.token_parts, output);
        if (row >= matmul.segments[0].num_rows) continue;
        matmul.out[static_cast<int64_t>(matmul.first_token + token) * matmul.out_stride + row] =
            swiglu(y, up);
      } else {
        finish_output(matmul, matmul.segments[at[0].segment], row, token, y);
      }
    }
    if (has_pairs && !is_parallel) sync_computing_warps(places * kWarp);
  }
}

// kCtas of it share an SM, so that the next product's first weights are on their way while this one
// finishes.
template <TileTypes kTypes, int kRowTiles, int kGroups, int kMaxWarps, int kCtas>
__global__ void __launch_bounds__((kMaxWarps + 1) * kWarp, kCtas)
    mma_tile_kernel(const __grid_constant__ TileArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 5, 0);
  const int computing = static_cast<int>(blockDim.x) / kWarp - 1;
  TileRing ring;
  ring.full = reinterpret_cast<uint64_t *>(shared);
  ring.empty = ring.full + kTileMaxSteps;
  ring.base = shared + kTileBarrierBytes;
  ring.step_bytes = tile_step_bytes(args.plan, kRowTiles);
  ring.num_steps = args.plan.num_steps;
  ring.step = 0;
  ring.parity = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < ring.num_steps; ++i) {
      init_barrier(ring.full + i, stage_arrivals());
      init_barrier(ring.empty + i, computing);
    }
    publish_barriers();
  }
  __syncthreads();
  let_next_kernel_start();
  if (warp == computing) {
    copy_items<kRowTiles>(args, ring, lane);
    return;
  }
  // Its outputs may be what the previous kernel still reads.
  wait_for_previous_kernel();
  compute_items<kTypes, kRowTiles, kGroups>(
      args, ring, reinterpret_cast<float *>(ring.base + ring.num_steps * ring.step_bytes), warp,
      lane);
}

}  // namespace cuda
}  // namespace xllm
