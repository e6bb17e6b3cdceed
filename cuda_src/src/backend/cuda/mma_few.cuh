// Products of 1 to 4 tokens on tensor cores: reads each weight once, bound by memory.
//
// A CTA, one per SM, takes groups of tiles blockIdx.x, blockIdx.x + gridDim.x, ...; a warp always
// the same slice of K of the same tile of a group. Half an SM stays free: the next kernel's CTA
// waits there with its first weights in shared memory. Each warp has a ring of chunks that runs on
// across groups, which its lanes fill by 16-byte copies of their own: nothing of it is shared
// between warps, and its state is a pointer and a count. Slices are added up by one warp, another
// one for each group, while the others are at the next group.
//   shared  barriers, ring [warps][slots][chunk], activations (stage_few.cuh), partials
//           [2][tiles][slices][kTokens][16]
#pragma once

#include "backend/cuda/few_chunk.cuh"
#include "backend/cuda/ring_copies.cuh"
#include "backend/cuda/stage_few.cuh"

namespace xllm {
namespace cuda {

constexpr int kFewMaxWarps = kStageWarps;
// Chunks of a warp's ring: what a kernel is compiled for.
constexpr int kFewSlots = 2, kFewManySlots = 4;

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
  int group_tiles;  // a warp for each slice of each; of gate and up in turn for kSwiGlu
  int slot_bytes;   // of a warp's ring
  int num_halves;   // of a slice, a warp each: 2 where half of the warps would have nothing to do
  int slice_first[kMaxSlices + 1];  // chunks
};

constexpr int kFewBarrierBytes = 128;
// Places for slices: those that are not there hold -0, which changes no sum.
XLLM_HOST_DEVICE int few_slice_places(int num_slices) { return num_slices <= 4 ? 4 : kMaxSlices; }
// With halves, the second leaves p of each of its chunks, up to kHalfChunks, behind the slices.
constexpr int kHalfChunks = 2;
XLLM_HOST_DEVICE int few_tile_places(int num_slices, int num_halves) {
  return few_slice_places(num_slices) * (num_halves == 2 ? 1 + kHalfChunks : 1);
}
// Of one of the two buffers.
XLLM_HOST_DEVICE int few_partial_floats(int group_tiles, int tile_places, int tokens) {
  return group_tiles * tile_places * tokens * kTileRows;
}
XLLM_HOST_DEVICE int few_shared_bytes(int jobs, int slots, int slot_bytes, int num_chunks,
                                      int group_tiles, int tile_places, int tokens) {
  return kFewBarrierBytes + jobs * slots * slot_bytes + few_acts_bytes(num_chunks, tokens) +
         2 * few_partial_floats(group_tiles, tile_places, tokens) * 4;
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

// The ring of one warp as one of its lanes sees it, and what the warp reads next.
template <TypeSet kSet, int kSlots>
struct FewRing {
  // 16 bytes of each lane to a piece.
  static constexpr int kPieces = kSet == TypeSet::kQ4KQ6K ? 7 : 9;
  uint8_t *base;  // of the ring
  int slot;       // the next one to be used
  // The cursor, at this lane's 16 bytes: chunks of the job still to come, 0: nothing more at all.
  const uint8_t *from;
  int left, bytes, missing_bytes;  // of a chunk; what the job's last one lacks at the ragged end
  int group;

  // Moves the cursor to this warp's job in its group, or to none.
  __device__ __forceinline__ void seek(const FewArgs &few, int index, int first, int end,
                                       int lane) {
    left = 0;
    if (group >= few.num_groups) return;
    const FewTile at = few_tile(few, group, index);
    if (at.tiles == nullptr) return;
    left = end - first;
    bytes = static_cast<int>(chunk_bytes(at.type));
    missing_bytes = static_cast<int>(max(int64_t{end} * bytes - at.tile_bytes, int64_t{0}));
    from = at.tiles + at.tile * at.tile_bytes + first * bytes + lane * 16;
  }

  // Asks for the chunk at the cursor, into slot `to`, which the warp is done with (it has called
  // __syncwarp since). A group of copies for each call, empty at the end.
  __device__ __forceinline__ void fetch(const FewArgs &few, int index, int first, int end, int to,
                                        int lane) {
    if (left > 0) {
      left -= 1;
      const int size = bytes - (left == 0 ? missing_bytes : 0) - lane * 16;
      uint8_t *at = base + to * few.slot_bytes + lane * 16;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (size > i * kWarp * 16) copy_async_16(at + i * kWarp * 16, from + i * kWarp * 16);
      }
      from += bytes;
      if (left == 0) {
        group += static_cast<int>(gridDim.x);
        seek(few, index, first, end, lane);
      }
    }
    commit_copies();
  }

  // The next chunk, once it is there.
  __device__ __forceinline__ const uint8_t *next(const FewArgs &few) const {
    wait_for_copies<kSlots - 1>();
    __syncwarp();
    return base + slot * few.slot_bytes;
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

// ((p0 + p1) + p2) + ... over the places for slices, `stride` floats apart.
__device__ __forceinline__ float sum_slices(const float *p, int stride, int places) {
  float v[kMaxSlices];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = p[i * stride];
  float y = __fadd_rn(__fadd_rn(__fadd_rn(v[0], v[1]), v[2]), v[3]);
  if (places == 4) return y;
#pragma unroll
  for (int i = 4; i < kMaxSlices; ++i) v[i] = p[i * stride];
#pragma unroll
  for (int i = 4; i < kMaxSlices; ++i) y = __fadd_rn(y, v[i]);
  return y;
}

// The same where slices are halved: the first half's sum goes on with the second's chunks. scales:
// of the token.
template <int kTokens>
__device__ __forceinline__ float sum_halves(const FewArgs &few, const float *p, int stride,
                                            int places, const float *scales, float factor) {
  float y = 0.0f;
#pragma unroll 2
  for (int s = 0; s < few.product.num_slices; ++s) {
    const int end = few.slice_first[s + 1], middle = (few.slice_first[s] + end + 1) >> 1;
    float acc = p[s * stride];
#pragma unroll
    for (int j = 0; j < kHalfChunks; ++j) {
      const bool exists = middle + j < end;
      const float dx =
          exists ? __fmul_rn(scales[(middle + j) * kTokens], factor) : 0.0f;  // times -0
      acc = __fmaf_rn(dx, p[(places + kHalfChunks * s + j) * stride], acc);
    }
    y = s == 0 ? acc : __fadd_rn(y, acc);
  }
  return y;
}

template <int kTokens, TypeSet kSet, int kSlots>
__global__ void __launch_bounds__(kFewMaxWarps *kWarp, 2)
    mma_few_kernel(const __grid_constant__ FewArgs few) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Lane = FewLane<kTokens>;
  const MatmulArgs &args = few.product;
  const int warp_lane = static_cast<int>(threadIdx.x) & 31;
  // From one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 5, 0);
  const int num_slice_jobs = few.group_tiles * args.num_slices;
  const int num_jobs = num_slice_jobs * few.num_halves;
  const bool has_job = warp < num_jobs, is_second = warp >= num_slice_jobs;

  int index = 0, slice = is_second ? warp - num_slice_jobs : warp;  // of its tile in a group
  for (; slice >= args.num_slices; slice -= args.num_slices) ++index;
  int first = few.slice_first[slice], end = few.slice_first[slice + 1];
  if (few.num_halves == 2) {
    const int middle = (first + end + 1) >> 1;
    (is_second ? first : end) = middle;
  }

  // The first weights, before the previous kernel is done. Every CTA of this grid is at work when
  // the next kernel's come in beside it, to do the same.
  uint64_t *barriers = reinterpret_cast<uint64_t *>(shared);
  uint64_t *ready = barriers, *free = barriers + 2;  // of the two buffers of partials
  uint8_t *rings = shared + kFewBarrierBytes;
  FewRing<kSet, kSlots> ring;
  ring.base = rings + warp * (kSlots * few.slot_bytes);
  ring.slot = 0;
  ring.group = static_cast<int>(blockIdx.x);
  if (has_job) {
    ring.seek(few, index, first, end, warp_lane);
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) ring.fetch(few, index, first, end, i, warp_lane);
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
      init_barrier(ready + i, num_jobs);
      init_barrier(free + i, num_parts);
    }
  }
  const FewActs acts =
      few_acts<kTokens>(rings + num_jobs * kSlots * few.slot_bytes, args.num_chunks);
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

  // Where the first outputs go, and what the loop over groups needs besides activations.
  const Lane lane(warp_lane);
  const int places = few_slice_places(args.num_slices);
  const int slice_floats = kTokens * kTileRows;
  const int tile_floats = few_tile_places(args.num_slices, few.num_halves) * slice_floats;
  if (places != args.num_slices || few.num_halves == 2) {
    for (int i = static_cast<int>(threadIdx.x); i < 2 * few.group_tiles * tile_floats;
         i += kFewMaxWarps * kWarp) {
      partials[i] = -0.0f;
    }
  }
  float *out = nullptr;
  float bias = 0.0f;
  const auto find_output = [&](int group, int of) {
    const int row = (of & ((1 << part_shift) - 1)) * kWarp + warp_lane;
    const int at = is_pair ? row / kTileRows * 2 : row / kTileRows;
    out = nullptr;
    if (group >= few.num_groups || of >= num_parts || at >= few.group_tiles) return;
    const FewTile tile = few_tile(few, group, at);
    const int local = tile.tile * kTileRows + row % kTileRows;
    if (tile.tiles == nullptr || local >= tile.num_rows) return;
    const int column = (is_pair ? 0 : tile.out_row) + local;
    out = args.out + (args.first_token + (of >> part_shift)) * args.out_stride + column;
    if (args.bias != nullptr) bias = args.bias[column];
  };
  int group = static_cast<int>(blockIdx.x), part = warp, buffer = 0;
  uint32_t parity = 0;
  if (has_job) find_output(group, part);
  int type = -1;
  const auto find_type = [&] {
    const FewTile tile = few_tile(few, group, index);
    type = tile.tiles != nullptr ? tile.type : -1;
  };
  find_type();
  const FewRows rows(args, warp, warp_lane);
  const float num_cols = static_cast<float>(args.rows.num_cols);
  const float inverse_cols = has_norm ? __fdiv_rn(1.0f, num_cols) : 1.0f;

  wait_for_previous_kernel();
  float residual = 0.0f;
  const auto load_residual = [&] {
    if (args.epilogue == kAddTo && out != nullptr) residual = *out;
  };
  load_residual();
  if (args.rows.x == nullptr) {
    copy_acts<kTokens>(args, acts);
  } else {
    stage_rows<kTokens>(args, rows, warp, warp_lane, weight, acts);
  }
  __syncthreads();
  if (!has_job) return;

  const uint8_t *sums = acts.sums + lane.token * few_sums_bytes(1);
  const float *scales = acts.scales + lane.token;
  const float factor =
      has_norm ? few_row_inverse(acts.squares + lane.token * few_square_floats(args.num_chunks),
                                 args, num_cols, inverse_cols)
               : 1.0f;
#pragma unroll 1
  for (int iteration = 0; group < few.num_groups; ++iteration) {
    float *partial = partials + buffer * (few.group_tiles * tile_floats);
    if (type >= 0) {
      float acc[Lane::kRows] = {};
      float *to = partial + index * tile_floats + lane.token * kTileRows + 8 * lane.row + lane.g;
      to += (is_second ? places + kHalfChunks * slice : slice) * slice_floats;
      if (iteration >= 2) wait_for_phase(free + buffer, parity ^ 1);
#pragma unroll 1
      for (int chunk = first; chunk < end; ++chunk) {
        const uint8_t *weights = ring.next(few);
        float p[Lane::kRows];
        few_chunk_of<kSet, kTokens>(type, weights,
                                    min(kUnitsPerChunk, args.num_units - chunk * kUnitsPerChunk),
                                    warp_lane, lane, acts.codes + chunk * few_codes_bytes(kTokens),
                                    sums + chunk * few_sums_bytes(kTokens), p);
        if (is_second) {
#pragma unroll
          for (int r = 0; r < Lane::kRows; ++r) {
            if (lane.part < 2) to[8 * r] = p[r];
          }
          to += slice_floats;
        } else {
          const float dx = __fmul_rn(scales[chunk * kTokens], factor);
#pragma unroll
          for (int r = 0; r < Lane::kRows; ++r) acc[r] = __fmaf_rn(dx, p[r], acc[r]);
        }
        __syncwarp();
        ring.fetch(few, index, first, end, ring.slot, warp_lane);
        ring.slot = ring.slot + 1 < kSlots ? ring.slot + 1 : 0;
      }
      if (!is_second && lane.part < 2) {
#pragma unroll
        for (int r = 0; r < Lane::kRows; ++r) to[8 * r] = acc[r];
      }
    }
    __syncwarp();
    if (warp_lane == 0) arrive(ready + buffer);
#pragma unroll 1
    for (int of = part; of < num_parts; of += num_jobs) {
      if (of == part) {
        wait_for_phase(ready + buffer, parity);
      } else {
        find_output(group, of);
        load_residual();
      }
      const float token_factor = __shfl_sync(0xffffffffu, factor, of >> part_shift);
      if (out != nullptr) {
        const int row = (of & ((1 << part_shift) - 1)) * kWarp + warp_lane;
        const float *p = partial + (is_pair ? 2 : 1) * (row / kTileRows) * tile_floats +
                         (of >> part_shift) * kTileRows + row % kTileRows;
        const auto sum = [&](const float *of_tile) {
          return few.num_halves == 2
                     ? sum_halves<kTokens>(few, of_tile, slice_floats, places,
                                           acts.scales + (of >> part_shift), token_factor)
                     : sum_slices(of_tile, slice_floats, places);
        };
        float y = sum(p);
        if (is_pair) {
          y = swiglu(y, sum(p + tile_floats));
        } else {
          if (args.bias != nullptr) y = __fadd_rn(y, bias);
          if (args.epilogue == kAddTo) y = __fadd_rn(residual, y);
        }
        *out = y;
      }
      __syncwarp();
      if (warp_lane == 0) arrive(free + buffer);
    }
    group += static_cast<int>(gridDim.x);
    if (group >= few.num_groups) break;
    part -= num_parts;
    while (part < 0) part += num_jobs;
    buffer ^= 1;
    parity ^= buffer == 0 ? 1 : 0;
    find_output(group, part);
    load_residual();
    find_type();
  }
}

}  // namespace cuda
}  // namespace xllm
