// Products of 5 tokens and more on tensor cores.
//
// An item of work is a group of row tiles, some of K's slices and a part of the tokens, 64 at most
// (a token tile); a CTA takes items blockIdx.x, blockIdx.x + gridDim.x, ... Items of all token
// tiles of a group follow one another, so that its weights come from memory once and from L2 for
// the others. One warp copies (four beside warp groups), the others compute. A step
// of the ring is one chunk of columns of each slice that is worked on at the same time: the chunks
// of the group's tiles and the activations, which all warps share. The first steps' weights are
// asked for before the previous kernel has finished, activations, which it writes, after.
//
// kUnitWarps computing warps have kRowTiles tiles (a unit) of one slice by 8 * kGroups tokens: one
// warp, or, where wgmma multiplies, a warp group of four with a tile each. warp = ((slice * units +
// unit) * token parts + part) * kUnitWarps + warp of the unit. Each activation that is read from
// shared memory thus serves kRowTiles tiles.
// Sums of slices meet in shared memory, in slots: slices that are worked on at the same time in one
// each, to be added up at the end, others in a single one as they come. kPartials leaves them in
// the output instead.
//   shared  barriers, ring [steps] { tiles [slices][tiles][slot_bytes], activations
//           [slices][groups][kActChunkBytes] }, slots [2 if several][slots][warps of a slice]
//           [outputs of a lane][32] f32
#pragma once

#include "backend/cuda/matmul_args.cuh"
#include "backend/cuda/ring_copies.cuh"
#include "backend/cuda/wgmma_chunk.cuh"

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
  return set == TileTypes::kAll ? type < kNumTileTypes : type == kWeightQ4_K || type == kWeightQ6_K;
}

// Division of small numbers, without one.
struct SmallDivisor {
  uint32_t inverse;
  int divisor;

  XLLM_HOST_DEVICE void set(int d) {
    inverse = d == 1 ? 0 : 0xffffffffu / static_cast<uint32_t>(d) + 1;
    divisor = d;
  }
  // n / d for 0 <= n < 65536.
  __device__ __forceinline__ int quotient(int n) const {
    return divisor == 1 ? n : static_cast<int>(__umulhi(static_cast<uint32_t>(n), inverse));
  }
  __device__ __forceinline__ int remainder(int n) const { return n - quotient(n) * divisor; }
};

// How a launch is cut; a matter of speed alone. Units are of kRowTiles tiles.
struct TilePlan {
  int group_units;      // of an item
  int num_units;        // of all segments
  int parallel_slices;  // worked on at the same time
  int item_slices;      // of an item; those of all items of a group are the product's
  int token_parts;      // of 8 * kGroups tokens
  int token_groups;     // of 8 tokens, that exist in a whole token tile
  int slot_bytes;       // of a tile in a step
  int num_steps;        // of the ring
  int num_items;
  // What would take divisions to find out.
  int round_steps, rounds;  // of an item: of its longest slice's chunks
  int item_parts;           // of a group's slices
  SmallDivisor by_parts, by_tiles, by_token_groups, by_units, by_token_parts;
  int16_t slice_chunk[kMaxSlices + 1];  // slice_first_chunk
  int token_tiles;                      // more than 1 in the kernels for many tokens only
  SmallDivisor by_token_tiles;
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

// The item that a CTA is at. kIsMany: of more than one token tile. Products of fewer are those of
// decode, which pay for every instruction before their first copy and have kernels of their own.
template <bool kIsMany>
struct TileItem {
  int index, group, first_slice;

  __device__ __forceinline__ void set(const TileArgs &args, int i) {
    index = i;
    group = args.plan.by_parts.quotient(i);
    first_slice = (i - group * args.plan.item_parts) * args.plan.item_slices;
  }
  __device__ __forceinline__ int first_token() const { return 0; }
};
template <>
struct TileItem<true> {
  int index, group, first_slice, token;

  __device__ __forceinline__ void set(const TileArgs &args, int i) {
    const TilePlan &plan = args.plan;
    index = i;
    const int place = plan.by_token_tiles.quotient(i);
    token = (i - place * plan.token_tiles) * plan.token_groups * kActGroup;
    group = plan.by_parts.quotient(place);
    first_slice = (place - group * plan.item_parts) * plan.item_slices;
  }
  __device__ __forceinline__ int first_token() const { return token; }
};

// ---- the copying warps: one copy of a step per lane ----

struct TileCopier {
  const uint8_t *from;  // chunk 0 of K, null: this lane has nothing to copy
  int bytes;            // of a chunk
  int missing_bytes;    // of the last chunk of K
  int first, end;       // chunks
  int to;               // in a step

  // Copy `copy` of a step: weights, then activations.
  template <int kRowTiles, bool kIsMany>
  __device__ __forceinline__ void set(const TileArgs &args, const TileItem<kIsMany> &item,
                                      int round, int copy) {
    const TilePlan &plan = args.plan;
    const MatmulArgs &matmul = args.matmul;
    const int tiles = plan.group_units * kRowTiles, weights = plan.parallel_slices * tiles;
    from = nullptr;
    bytes = missing_bytes = first = end = to = 0;
    int slice = 0;
    if (copy < weights) {
      slice = plan.by_tiles.quotient(copy);
      const int index = copy - slice * tiles,
                unit = item.group * plan.group_units + index / kRowTiles;
      TilePlace at;
      if (unit >= plan.num_units || !find_tile<kRowTiles>(matmul, unit, index % kRowTiles, &at))
        return;
      const MatmulSegment &segment = matmul.segments[at.segment];
      from = segment.tiles + at.tile * segment.tile_bytes;
      bytes = static_cast<int>(chunk_bytes(segment.type));
      missing_bytes =
          static_cast<int>(static_cast<int64_t>(matmul.num_chunks) * bytes - segment.tile_bytes);
      to = copy * plan.slot_bytes;
    } else if (copy < weights + plan.parallel_slices * plan.token_groups) {
      const int index = copy - weights;
      slice = plan.by_token_groups.quotient(index);
      const int group = index - slice * plan.token_groups;
      const int token = item.first_token() + group * kActGroup;
      if (kIsMany && token >= matmul.num_tokens) return;
      from = matmul.act.chunk(matmul.first_token + token, 0);
      bytes = kActChunkBytes;
      to = weights * plan.slot_bytes + index * kActChunkBytes;
    }
    const int in_item = round * plan.parallel_slices + slice;
    if (in_item >= plan.item_slices) return;
    first = plan.slice_chunk[item.first_slice + in_item];
    end = plan.slice_chunk[item.first_slice + in_item + 1];
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
    for (int at = lane * 16; at < bytes; at += kWarp * 16) copy_async_16(target + at, source + at);
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

// The ring, the same for all kernels.
__device__ __forceinline__ TileRing ring_of(const TileArgs &args, uint8_t *shared, int row_tiles) {
  TileRing ring;
  ring.full = reinterpret_cast<uint64_t *>(shared);
  ring.empty = ring.full + kTileMaxSteps;
  ring.base = shared + kTileBarrierBytes;
  ring.step_bytes = tile_step_bytes(args.plan, row_tiles);
  ring.num_steps = args.plan.num_steps;
  ring.step = 0;
  ring.parity = 0;
  return ring;
}

__device__ __forceinline__ void sync_copying_warps(int threads) {
  asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory");
}

// By the copying warps, each `copier` of kCopiers, which take turns at the copies of a step: one
// warp issues them one after the other. They make the barriers themselves, so as not to wait for
// anybody before their first copies; `sync` makes them known to the others.
template <int kRowTiles, int kCopiers, bool kIsMany, typename Sync>
__device__ __forceinline__ void copy_items(const TileArgs &args, TileRing ring, int copier_warp,
                                           int lane, int computing_warps, const Sync &sync) {
  const TilePlan &plan = args.plan;
  const int steps = plan.round_steps;
  const int weights = plan.parallel_slices * plan.group_units * kRowTiles;
  TileCopier copier;
  const int copy = lane * kCopiers + copier_warp;
  TileItem<kIsMany> item;
  item.set(args, static_cast<int>(blockIdx.x));
  copier.set<kRowTiles, kIsMany>(args, item, 0, copy);
  if (copier_warp == 0 && lane < ring.num_steps) {
    init_barrier(ring.full + lane, kCopiers * stage_arrivals());
    init_barrier(ring.empty + lane, computing_warps * kWarpArrivals);
    publish_barriers();
  }
  __syncwarp();
  if constexpr (kCopiers > 1) sync_copying_warps(kCopiers * kWarp);
  const int early = min(steps, ring.num_steps);
  for (int i = 0; i < early; ++i) {
    const int size = copier.size(args.matmul, i);
    expect_copies(ring.full + i, size, lane);
    issue_copies(ring.full + i, ring.base + i * ring.step_bytes + copier.to,
                 copier.from + static_cast<int64_t>(copier.first + i) * copier.bytes,
                 copy < weights ? size : 0, lane);
  }
  sync();
  wait_for_previous_kernel();
  bool is_first_lap = true;
  for (int round = 0, done = 0;;) {
    for (int i = done; i < steps; ++i) {
      const int size = copier.size(args.matmul, i);
      const bool is_early =
          i < early && is_first_lap && round == 0 && item.index == static_cast<int>(blockIdx.x);
      if (!is_early) {
        if (!is_first_lap) wait_for_phase(ring.empty + ring.step, ring.parity ^ 1);
        expect_copies(ring.full + ring.step, size, lane);
      }
      issue_copies(ring.full + ring.step, ring.base + ring.step * ring.step_bytes + copier.to,
                   copier.from + static_cast<int64_t>(copier.first + i) * copier.bytes,
                   is_early && copy < weights ? 0 : size, lane);
      finish_copies(ring.full + ring.step);
      ring.advance();
      if (ring.step == 0) is_first_lap = false;
    }
    if (++round == plan.rounds) {
      round = 0;
      if (item.index + static_cast<int>(gridDim.x) >= plan.num_items) return;
      item.set(args, item.index + static_cast<int>(gridDim.x));
    }
    copier.set<kRowTiles, kIsMany>(args, item, round, copy);
  }
}

// ---- the computing warps ----

__device__ __forceinline__ void sync_computing_warps(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

// The warps of one unit alone: the others may be at another item.
__device__ __forceinline__ void sync_unit(int unit, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(3 + unit), "r"(threads) : "memory");
}

// One slice: `chunks` of them from `first`; the rest of the round's steps pass by.
template <int kType, int kTiles, int kGroups, bool kIsWide>
__device__ __forceinline__ void tile_slice(const MatmulArgs &args, TileRing *ring, int first,
                                           int chunks, int steps, int tile_at, int slot_bytes,
                                           int acts_at, int lane,
                                           float (&acc)[kTiles][kGroups][4]) {
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    wait_for_phase(ring->full + ring->step, ring->parity);
    if (i < chunks) {
      const uint8_t *step = ring->base + ring->step * ring->step_bytes;
      const uint8_t *tiles[kTiles];
#pragma unroll
      for (int r = 0; r < kTiles; ++r) tiles[r] = step + tile_at + r * slot_bytes;
      const TileActs acts = {step + acts_at};
      if constexpr (kIsWide) {
        wgmma_chunk<kType, kGroups>(tiles[0], acts, lane, acc[0]);
      } else {
        tile_chunk<kType, kTiles, kGroups>(
            tiles, acts, min(kUnitsPerChunk, args.num_units - (first + i) * kUnitsPerChunk), lane,
            acc);
      }
    }
    __syncwarp();
    arrive_warp(ring->empty + ring->step, lane);
    ring->advance();
  }
}

// Adds up a slice's sums in its slot, or leaves them in the output of kPartials. `tile`: the first
// of the warp's tiles.
template <int kTiles, int kGroups>
__device__ __forceinline__ void store_slice(const MatmulArgs &args, int slice, bool is_first,
                                            const TilePlace &tile, int first_token, float *slot,
                                            int lane, const float (&acc)[kTiles][kGroups][4]) {
  if (args.epilogue == kPartials) {
    const int g = lane >> 2, t = lane & 3;
    const MatmulSegment &segment = args.segments[tile.segment];
    const int64_t stride = args.out_stride;
    const int row = tile.tile * kTileRows + g, token = first_token + 2 * t;
    const int rows_left = segment.num_rows - row, tokens_left = args.num_tokens - token;
    float *out = args.out + (static_cast<int64_t>(slice) * args.num_tokens + token) * stride +
                 segment.out_row + row;
    const bool is_whole = rows_left > kTiles * kTileRows - 8 && tokens_left > kGroups * 8 - 7;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float *to = out + (n * 8 + j) * stride;
        const bool has_token = is_whole || n * 8 + j < tokens_left;
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
          if (has_token && (is_whole || r * kTileRows < rows_left))
            to[r * kTileRows] = acc[r][n][j];
          if (has_token && (is_whole || r * kTileRows + 8 < rows_left))
            to[r * kTileRows + 8] = acc[r][n][j + 2];
        }
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float *to = slot + ((r * kGroups + n) * 4 + j) * kWarp + lane;
        *to = is_first ? acc[r][n][j] : __fadd_rn(*to, acc[r][n][j]);
      }
    }
  }
}

// Finishes what a warp has in its slot alone, or, of gate and up in two warps' slots, its half of
// the groups of tokens. `slot`: of this lane, of the gate where there is one; up_at: of up behind
// it, 0 where up is the warp's second tile.
template <int kTiles, int kGroups, bool kIsMany>
__device__ __forceinline__ void finish_alone(const MatmulArgs &args, const TilePlace &tile,
                                             int first_token, int lane, int in_pair,
                                             const float *slot, int up_at) {
  const int g = lane >> 2, t = lane & 3;
  const bool is_swiglu = args.epilogue == kSwiGlu;
  const MatmulSegment &segment = args.segments[is_swiglu ? 0 : tile.segment];
  const int first_row = tile.tile * kTileRows + g, token = first_token + 2 * t;
  const int rows_left = segment.num_rows - first_row, tokens_left = args.num_tokens - token;
  const int64_t stride = args.out_stride;
  const int column = (is_swiglu ? 0 : segment.out_row) + first_row;
  float *out = args.out + static_cast<int64_t>(args.first_token + token) * stride + column;
  if (is_swiglu) {
    constexpr int kStep = kTiles == 1 ? 2 : 1;
    const float *up = slot + (kTiles == 1 ? up_at : kGroups * 4 * kWarp);
#pragma unroll
    for (int i = 0; i < kGroups; i += kStep) {
      const int n = kTiles == 1 ? i + in_pair : i;
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = (n * 4 + j) * kWarp;
        y[j] = swiglu(slot[at], up[at]);
      }
      float *to = out + n * 8 * stride;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (n * 8 + (j & 1) < tokens_left && 8 * (j >> 1) < rows_left)
          to[(j & 1) * stride + 8 * (j >> 1)] = y[j];
      }
    }
    return;
  }
  const float *bias = args.bias == nullptr ? nullptr : args.bias + column;
  const bool adds = args.epilogue == kAddTo;
  // Many tokens: what outputs are added to is asked for at once, not one after the other.
  float before[kTiles][kGroups][4];
  if constexpr (kIsMany) {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = r * kTileRows + 8 * (j >> 1);
          if (adds && n * 8 + (j & 1) < tokens_left && row < rows_left)
            before[r][n][j] = out[(n * 8 + (j & 1)) * stride + row];
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = r * kTileRows + 8 * (j >> 1);
        if (n * 8 + (j & 1) >= tokens_left || row >= rows_left) continue;
        float y = slot[((r * kGroups + n) * 4 + j) * kWarp];
        float *to = out + (n * 8 + (j & 1)) * stride + row;
        if (bias != nullptr) y = __fadd_rn(y, bias[row]);
        *to = adds ? __fadd_rn(kIsMany ? before[r][n][j] : *to, y) : y;
      }
    }
  }
}

template <TileTypes kTypes, int kRowTiles, int kGroups, int kUnitWarps, bool kIsMany>
__device__ __forceinline__ void compute_items(const TileArgs &args, TileRing ring, float *slots,
                                              int warp, int lane) {
  const TilePlan &plan = args.plan;
  const MatmulArgs &matmul = args.matmul;
  constexpr int kTiles = kRowTiles / kUnitWarps;  // of a warp
  constexpr int kOutputs = kTiles * kGroups * 4;  // of a lane
  const int in_unit = warp % kUnitWarps;
  const int units_before = plan.by_token_parts.quotient(warp / kUnitWarps);
  const int part = warp / kUnitWarps - units_before * plan.token_parts;
  const int own_slice = plan.by_units.quotient(units_before);
  const int unit = units_before - own_slice * plan.group_units;
  const int part_token = part * kGroups * kActGroup;
  const int steps = plan.round_steps;
  const int places = plan.group_units * plan.token_parts * kUnitWarps;  // warps of a slice
  const int place = (unit * plan.token_parts + part) * kUnitWarps + in_unit;
  const int tiles = plan.group_units * kRowTiles;
  const bool is_parallel = plan.parallel_slices > 1;
  const int tile_at = (own_slice * tiles + unit * kRowTiles + in_unit * kTiles) * plan.slot_bytes;
  const int acts_at = plan.parallel_slices * tiles * plan.slot_bytes +
                      (own_slice * plan.token_groups + part * kGroups) * kActChunkBytes;

  int set = 0;
  for (int index = static_cast<int>(blockIdx.x); index < plan.num_items;
       index += static_cast<int>(gridDim.x)) {
    TileItem<kIsMany> item;
    item.set(args, index);
    const int first_token = item.first_token() + part_token;
    // The unit's first tile exists where the unit does; a later one may not, and is computed from
    // whatever lies there, and left alone.
    const int product_unit = item.group * plan.group_units + unit;
    const bool has_unit = product_unit < plan.num_units;
    TilePlace tile = {0, 0};
    if (has_unit) find_tile<kRowTiles>(matmul, product_unit, in_unit * kTiles, &tile);
    const int type = matmul.segments[tile.segment].type;
    float *item_slots = slots + set * plan.item_slices * places * kOutputs * kWarp;
    for (int round = 0; round < plan.rounds; ++round) {
      const int in_item = round * plan.parallel_slices + own_slice;
      if (!has_unit || in_item >= plan.item_slices) {
        for (int i = 0; i < steps; ++i) {
          wait_for_phase(ring.full + ring.step, ring.parity);
          arrive_warp(ring.empty + ring.step, lane);
          ring.advance();
        }
        continue;
      }
      const int slice = item.first_slice + in_item;
      const auto run = [&](auto constant) {
        constexpr int kType = decltype(constant)::value;
        if constexpr (contains(kTypes, kType)) {
          const int first = plan.slice_chunk[slice], end = plan.slice_chunk[slice + 1];
          float acc[kTiles][kGroups][4] = {};
          tile_slice<kType, kTiles, kGroups, kUnitWarps == 4>(matmul, &ring, first, end - first,
                                                              steps, tile_at, plan.slot_bytes,
                                                              acts_at, lane, acc);
          float *slot =
              item_slots + ((is_parallel ? in_item : 0) * places + place) * kOutputs * kWarp;
          store_slice<kTiles, kGroups>(matmul, slice, is_parallel || in_item == 0, tile,
                                       first_token, slot, lane, acc);
        }
      };
      switch (type) {
        case kWeightQ4_K:
          run(TypeConstant<kWeightQ4_K>());
          break;
        case kWeightQ6_K:
          run(TypeConstant<kWeightQ6_K>());
          break;
        case kWeightQ5_K:
          run(TypeConstant<kWeightQ5_K>());
          break;
        case kWeightQ8_0:
          run(TypeConstant<kWeightQ8_0>());
          break;
        case kWeightQ4_0:
          run(TypeConstant<kWeightQ4_0>());
          break;
        case kWeightQ4_1:
          run(TypeConstant<kWeightQ4_1>());
          break;
        case kWeightQ5_0:
          run(TypeConstant<kWeightQ5_0>());
          break;
        default:
          run(TypeConstant<kWeightQ5_1>());
          break;
      }
    }
    if (matmul.epilogue == kPartials) continue;
    // The sums of an output, by the warps that share its tile, a part of the outputs each. Gate and
    // up are the two tiles of a warp, or those of two warps.
    const bool is_swiglu = matmul.epilogue == kSwiGlu;
    const bool has_pairs = is_swiglu && kTiles == 1;
    const int pair_stride = kUnitWarps == 1 ? plan.token_parts : 1;  // in places
    const int in_pair = has_pairs ? (kUnitWarps == 1 ? unit : in_unit) & 1 : 0;
    constexpr bool kIsUnitAlone = kIsMany && kUnitWarps > 1;  // where it is not is_parallel
    if (is_parallel || has_pairs) {
      if (kIsUnitAlone && !is_parallel) {
        sync_unit(warp / kUnitWarps, kUnitWarps * kWarp);
      } else {
        sync_computing_warps(plan.parallel_slices * places * kWarp);
      }
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
    const int first_place = place - in_pair * pair_stride;
    if (kGroups >= 4 && !is_parallel) {
      if (has_unit) {
        finish_alone<kTiles, kGroups, kIsMany>(matmul, tile, first_token, lane, in_pair,
                                               item_slots + first_place * kOutputs * kWarp + lane,
                                               has_pairs ? pair_stride * kOutputs * kWarp : 0);
      }
    } else {
      const int workers = plan.parallel_slices * (has_pairs ? 2 : 1);
      const int count = !has_unit ? 0 : is_swiglu && !has_pairs ? kOutputs / 2 : kOutputs;
      for (int output = own_slice + plan.parallel_slices * in_pair; output < count;
           output += workers) {
        const int r = output / (kGroups * 4), n = output / 4 % kGroups, j = output & 3;
        const int token = first_token + n * 8 + 2 * t + (j & 1);
        const int row = (tile.tile + r) * kTileRows + g + 8 * (j >> 1);
        if (token >= matmul.num_tokens) continue;
        const float y = sum_of(first_place, output);
        if (is_swiglu) {
          const float up = has_pairs ? sum_of(first_place + pair_stride, output)
                                     : sum_of(place, output + kOutputs / 2);
          if (row >= matmul.segments[0].num_rows) continue;
          matmul.out[static_cast<int64_t>(matmul.first_token + token) * matmul.out_stride + row] =
              swiglu(y, up);
        } else {
          finish_output(matmul, matmul.segments[tile.segment], row, token, y);
        }
      }
    }
    if (has_pairs && !is_parallel) {
      if constexpr (kIsUnitAlone) {
        sync_unit(warp / kUnitWarps, kUnitWarps * kWarp);
      } else {
        sync_computing_warps(places * kWarp);
      }
    }
  }
}

// kCtas of it share an SM, so that the next product's first weights are on their way while this one
// finishes.
template <TileTypes kTypes, int kRowTiles, int kGroups, int kMaxWarps, int kCtas, bool kIsMany>
__global__ void __launch_bounds__((kMaxWarps + 1) * kWarp, kCtas)
    mma_tile_kernel(const __grid_constant__ TileArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 5, 0);
  const int computing = static_cast<int>(blockDim.x) / kWarp - 1;
  const TileRing ring = ring_of(args, shared, kRowTiles);
  const auto sync = [] {
    __syncthreads();
    let_next_kernel_start();
  };
  if (warp == computing) {
    copy_items<kRowTiles, 1, kIsMany>(args, ring, 0, lane, computing, sync);
    return;
  }
  sync();
  // Its outputs may be what the previous kernel still reads.
  wait_for_previous_kernel();
  compute_items<kTypes, kRowTiles, kGroups, 1, kIsMany>(
      args, ring, reinterpret_cast<float *>(ring.base + ring.num_steps * ring.step_bytes), warp,
      lane);
}

constexpr int kWideTiles = 4;
// Warp groups that compute, at most. A CTA's registers are those that it starts with, 96 or 128 for
// each thread, of which the copying group keeps 32: with 1 to 4 others that leaves them 112, with 1
// to 3 of twice the tokens 160.
XLLM_HOST_DEVICE constexpr int wide_max_groups(int token_groups) {
  return token_groups == 4 ? 4 : 3;
}

template <int kGroups, bool kIsMany>
__global__ void __launch_bounds__((wide_max_groups(kGroups) + 1) * 4 * kWarp, 1)
    wgmma_tile_kernel(const __grid_constant__ TileArgs args) {
#ifdef XLLM_HAS_WGMMA
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 5, 0);
  const int computing = static_cast<int>(blockDim.x) / kWarp - 4;
  const TileRing ring = ring_of(args, shared, kWideTiles);
  const auto sync = [] {
    __syncthreads();
    let_next_kernel_start();
  };
  if (warp >= computing) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    copy_items<kWideTiles, 4, kIsMany>(args, ring, warp - computing, lane, computing, sync);
  } else {
    if constexpr (kGroups == 4)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    else
      asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    sync();
    wait_for_previous_kernel();
    compute_items<TileTypes::kQ4KQ6K, kWideTiles, kGroups, 4, kIsMany>(
        args, ring, reinterpret_cast<float *>(ring.base + ring.num_steps * ring.step_bytes), warp,
        lane);
  }
#endif
}

}  // namespace cuda
}  // namespace xllm
