// Products of 1 to 4 tokens on tensor cores: reads each weight once, bound by memory.
//
// A CTA, one per SM, takes groups of tiles blockIdx.x, blockIdx.x + gridDim.x, ...; a warp always
// the same slice of K of the same tile of a group. Each warp has a ring of chunks that runs on
// across groups, filled by bulk copies; the first are asked for before the previous kernel has
// finished. Slices are added up by one warp, another one for each group, while the others are at
// the next group.
//   shared  barriers, ring [warps][slots][chunk], activations (stage_few.cuh), partials
//           [2][tiles][slices][kTokens][16]
#pragma once

#include "backend/cuda/few_chunk.cuh"
#include "backend/cuda/ring_copies.cuh"
#include "backend/cuda/stage_few.cuh"

namespace xllm {
namespace cuda {

constexpr int kFewMaxWarps = 16;
constexpr int kFewMaxSlots = 8;

// The types that a kernel is compiled for: with all of them in one, registers run out.
enum class TypeSet { kQ4KQ6K, kQ8_0, kAll };

XLLM_HOST_DEVICE constexpr bool contains(TypeSet set, int type) {
  return set == TypeSet::kAll    ? type < kNumTileTypes
         : set == TypeSet::kQ8_0 ? type == kWeightQ8_0
                                 : type == kWeightQ4_K || type == kWeightQ6_K;
}

struct FewArgs {
  MatmulArgs product;
  int num_groups;
  int group_tiles;            // a warp for each slice of each; of gate and up in turn for kSwiGlu
  int num_slots, slot_bytes;  // of a warp's ring
  int slice_first[kMaxSlices + 1];  // chunks
};

XLLM_HOST_DEVICE int few_barrier_bytes(int warps, int slots) {
  return (warps * slots * 8 + 4 * 8 + 127) / 128 * 128;
}
// Of one of the two buffers.
XLLM_HOST_DEVICE int few_partial_floats(int group_tiles, int num_slices, int tokens) {
  return group_tiles * num_slices * tokens * kTileRows;
}
XLLM_HOST_DEVICE int few_shared_bytes(int jobs, int slots, int slot_bytes, int num_chunks,
                                      int group_tiles, int num_slices, int tokens) {
  return few_barrier_bytes(jobs, slots) + jobs * slots * slot_bytes +
         few_acts_bytes(num_chunks, tokens) +
         2 * few_partial_floats(group_tiles, num_slices, tokens) * 4;
}

// One tile of the work, or none (tiles null). From constant indices, so that all of it stays in
// registers that the warp has in common.
struct FewTile {
  const uint8_t *tiles;
  int64_t tile_bytes;
  int type, tile, num_rows, out_row;
};

__device__ __forceinline__ FewTile tile_of_segment(const MatmulSegment &s, int tile) {
  return {
      tile < s.num_tiles ? s.tiles : nullptr, s.tile_bytes, s.type, tile, s.num_rows, s.out_row};
}

__device__ __forceinline__ FewTile few_tile(const FewArgs &few, int group, int index) {
  const MatmulArgs &args = few.product;
  const int at = group * few.group_tiles + index;
  if (args.epilogue == kSwiGlu)
    return tile_of_segment((index & 1) == 0 ? args.segments[0] : args.segments[1], at >> 1);
  const int n0 = args.segments[0].num_tiles, n1 = n0 + args.segments[1].num_tiles;
  if (args.num_segments == 1 || at < n0) return tile_of_segment(args.segments[0], at);
  if (args.num_segments == 2 || at < n1) return tile_of_segment(args.segments[1], at - n0);
  return tile_of_segment(args.segments[2], at - n1);
}

// The ring of one warp and what it reads next.
struct FewRing {
  uint8_t *base;
  uint64_t *barriers;
  int slot;  // the next one to be used
  uint32_t parity;
  // The cursor: chunks of the job still to come, 0: nothing more at all.
  const uint8_t *from;
  int left, bytes, missing_bytes;  // of a chunk; what the job's last one lacks at the ragged end
  int group;

  // Moves the cursor to this warp's job in its group, or to none.
  __device__ __forceinline__ void seek(const FewArgs &few, int index, int first, int end) {
    left = 0;
    if (group >= few.num_groups) return;
    const FewTile at = few_tile(few, group, index);
    if (at.tiles == nullptr) return;
    left = end - first;
    bytes = static_cast<int>(chunk_bytes(at.type));
    missing_bytes = static_cast<int>(max(int64_t{end} * bytes - at.tile_bytes, int64_t{0}));
    from = at.tiles + at.tile * at.tile_bytes + int64_t{first} * bytes;
  }

  // Asks for the chunk at the cursor, into slot `to`, which the warp is done with.
  __device__ __forceinline__ void fetch(const FewArgs &few, int index, int first, int end, int to,
                                        int lane) {
    if (left <= 0) return;
    left -= 1;
    const int size = bytes - (left == 0 ? missing_bytes : 0);
    copy_chunk(base + to * few.slot_bytes, from, size, barriers + to, lane);
    from += size;
    if (left == 0) {
      group += static_cast<int>(gridDim.x);
      seek(few, index, first, end);
    }
  }
};

// p of a chunk of a type known at run time only, the same in the whole warp.
template <TypeSet kSet, int kTokens, int kType = 0, typename... Arguments>
__device__ __forceinline__ void few_chunk_of(int type, Arguments &&...arguments) {
  if constexpr (kType < kNumTileTypes) {
    if constexpr (contains(kSet, kType)) {
      if (type == kType) return few_chunk<kType, kTokens>(arguments...);
    }
    few_chunk_of<kSet, kTokens, kType + 1>(type, arguments...);
  }
}

// ((p0 + p1) + p2) + ... of the slices that there are, `stride` floats apart.
__device__ __forceinline__ float sum_slices(const float *p, int stride, int num_slices) {
  float v[kMaxSlices];
#pragma unroll
  for (int i = 0; i < kMaxSlices; ++i) v[i] = i < num_slices ? p[i * stride] : 0.0f;
  float y = v[0];
#pragma unroll
  for (int i = 1; i < kMaxSlices; ++i) y = i < num_slices ? __fadd_rn(y, v[i]) : y;
  return y;
}

template <int kTokens, TypeSet kSet>
__global__ void __launch_bounds__(kFewMaxWarps *kWarp, 2)
    mma_few_kernel(const __grid_constant__ FewArgs few) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Lane = FewLane<kTokens>;
  const MatmulArgs &args = few.product;
  const int warp_lane = static_cast<int>(threadIdx.x) & 31;
  // From one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 5, 0);
  const int num_warps = static_cast<int>(blockDim.x) >> 5;
  const int num_jobs = few.group_tiles * args.num_slices;
  const bool has_job = warp < num_jobs;

  int index = 0, slice = warp;  // of this warp's tile in a group
  for (; slice >= args.num_slices; slice -= args.num_slices) ++index;
  const int first = few.slice_first[slice], end = few.slice_first[slice + 1];

  // The first weights, before the previous kernel is done.
  uint64_t *barriers = reinterpret_cast<uint64_t *>(shared);
  uint64_t *ready = barriers, *free = barriers + 2;  // of the two buffers of partials
  uint8_t *rings = shared + few_barrier_bytes(num_jobs, few.num_slots);
  FewRing ring;
  ring.base = rings + warp * few.num_slots * few.slot_bytes;
  ring.barriers = barriers + 4 + warp * few.num_slots;
  ring.slot = 0;
  ring.parity = 0;
  ring.group = static_cast<int>(blockIdx.x);
  if (has_job) {
    ring.seek(few, index, first, end);
    if (warp_lane < few.num_slots) {
      init_barrier(ring.barriers + warp_lane, stage_arrivals());
      publish_barriers();
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < few.num_slots; ++i) ring.fetch(few, index, first, end, i, warp_lane);
  }
  let_next_kernel_start();

  // Outputs of a group are finished by warps, 32 rows of a token each (kSwiGlu: 16 pairs).
  const bool is_pair = args.epilogue == kSwiGlu;
  const int part_tiles = is_pair ? 4 : 2;
  const int part_shift = few.group_tiles <= part_tiles       ? 0
                         : few.group_tiles <= 2 * part_tiles ? 1
                                                             : 2;
  const int num_parts = args.num_tokens << part_shift;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      init_barrier(ready + i, num_jobs * kWarpArrivals);
      init_barrier(free + i, num_parts * kWarpArrivals);
    }
  }
  const FewActs acts =
      few_acts<kTokens>(rings + num_jobs * few.num_slots * few.slot_bytes, args.num_chunks);
  float *partials =
      reinterpret_cast<float *>(acts.codes + few_acts_bytes(args.num_chunks, kTokens));
  // What else no kernel writes.
  const bool has_norm = args.rows.x != nullptr && args.rows.norm_weight != nullptr;
  float weight[kActLaneCols] = {};
  if (has_norm) {
    if ((warp + 1) * kActCols <= args.rows.num_cols)
      load_whole(args.rows.norm_weight + warp * kActCols + warp_lane * kActLaneCols, weight);
    for (int i = args.num_chunks + static_cast<int>(threadIdx.x);
         i < few_square_floats(args.num_chunks); i += static_cast<int>(blockDim.x)) {
#pragma unroll
      for (int m = 0; m < kTokens; ++m)
        acts.squares[m * few_square_floats(args.num_chunks) + i] = 0.0f;
    }
  }

  wait_for_previous_kernel();
  if (args.rows.x == nullptr) {
    copy_acts<kTokens>(args, acts);
  } else {
    stage_rows<kTokens>(args, warp, num_warps, warp_lane, weight, acts);
  }
  __syncthreads();
  if (!has_job) return;

  const Lane lane(warp_lane);
  const uint8_t *sums = acts.sums + lane.token * few_sums_bytes(1);
  const float *scales = acts.scales + lane.token;
  const float factor =
      has_norm
          ? few_row_inverse(acts.squares + lane.token * few_square_floats(args.num_chunks), args)
          : 1.0f;
  const int slice_floats = kTokens * kTileRows, tile_floats = args.num_slices * slice_floats;
  int part = warp, buffer = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int group = static_cast<int>(blockIdx.x), iteration = 0; group < few.num_groups;
       group += static_cast<int>(gridDim.x), ++iteration) {
    float *partial = partials + buffer * (few.group_tiles * tile_floats);
    // What an output is added to, asked for before the product so that it is there after it.
    float *out = nullptr;
    float residual = 0.0f, bias = 0.0f;
    const auto find_output = [&](int of) {
      const int row = (of & ((1 << part_shift) - 1)) * kWarp + warp_lane;
      const int at = is_pair ? row / kTileRows * 2 : row / kTileRows;
      out = nullptr;
      if (at >= few.group_tiles) return;
      const FewTile tile = few_tile(few, group, at);
      const int local = tile.tile * kTileRows + row % kTileRows;
      if (tile.tiles == nullptr || local >= tile.num_rows) return;
      const int column = (is_pair ? 0 : tile.out_row) + local;
      out = args.out + (args.first_token + (of >> part_shift)) * args.out_stride + column;
      if (args.epilogue == kAddTo) residual = *out;
      if (args.bias != nullptr) bias = args.bias[column];
    };
    if (part < num_parts) find_output(part);

    const FewTile tile = few_tile(few, group, index);
    if (tile.tiles != nullptr) {
      float acc[Lane::kRows] = {};
#pragma unroll 1
      for (int chunk = first; chunk < end; ++chunk) {
        wait_for_phase(ring.barriers + ring.slot, ring.parity);
        float p[Lane::kRows];
        few_chunk_of<kSet, kTokens>(tile.type, ring.base + ring.slot * few.slot_bytes,
                                    min(kUnitsPerChunk, args.num_units - chunk * kUnitsPerChunk),
                                    warp_lane, lane, acts.codes + chunk * few_codes_bytes(kTokens),
                                    sums + chunk * few_sums_bytes(kTokens), p);
        const float dx = __fmul_rn(scales[chunk * kTokens], factor);
#pragma unroll
        for (int r = 0; r < Lane::kRows; ++r) acc[r] = __fmaf_rn(dx, p[r], acc[r]);
        __syncwarp();
        ring.fetch(few, index, first, end, ring.slot, warp_lane);
        if (++ring.slot == few.num_slots) {
          ring.slot = 0;
          ring.parity ^= 1;
        }
      }
      if (iteration >= 2) wait_for_phase(free + buffer, parity ^ 1);
      if (lane.part < 2) {
        float *to = partial + index * tile_floats + slice * slice_floats + lane.token * kTileRows +
                    8 * lane.row + lane.g;
#pragma unroll
        for (int r = 0; r < Lane::kRows; ++r) to[8 * r] = acc[r];
      }
    }
    __syncwarp();
    arrive_warp(ready + buffer, warp_lane);
#pragma unroll 1
    for (int of = part; of < num_parts; of += num_jobs) {
      if (of == part) {
        wait_for_phase(ready + buffer, parity);
      } else {
        find_output(of);
      }
      if (out != nullptr) {
        const int row = (of & ((1 << part_shift) - 1)) * kWarp + warp_lane;
        const float *p = partial + (is_pair ? 2 : 1) * (row / kTileRows) * tile_floats +
                         (of >> part_shift) * kTileRows + row % kTileRows;
        float y = sum_slices(p, slice_floats, args.num_slices);
        if (is_pair) {
          y = swiglu(y, sum_slices(p + tile_floats, slice_floats, args.num_slices));
        } else {
          if (args.bias != nullptr) y = __fadd_rn(y, bias);
          if (args.epilogue == kAddTo) y = __fadd_rn(residual, y);
        }
        *out = y;
      }
      __syncwarp();
      arrive_warp(free + buffer, warp_lane);
    }
    part -= num_parts;
    while (part < 0) part += num_jobs;
    buffer ^= 1;
    parity ^= buffer == 0 ? 1 : 0;
  }
}

}  // namespace cuda
}  // namespace xllm
