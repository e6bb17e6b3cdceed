// Products of 1 to 4 tokens on tensor cores: reads each weight once, bound by memory.
//
// A CTA of up to 8 warps, one per SM, takes groups of tiles blockIdx.x, blockIdx.x + gridDim.x,
// ...; a warp always the same slice of K of the same tile of a group (of a tile of gate and one of
// up for kSwiGlu). Half an SM stays free: the next kernel's CTA waits there with its first weights
// in shared memory. Each warp has a ring of stages of two chunks that runs on across groups,
// filled by bulk copies. Slices are added up by one warp, another one for each group, while the
// others are at the next group.
//   shared  barriers, ring [warps][stages][2][chunk], activations (stage_few.cuh), partials
//           [2][tiles][slices][kTokens][16]
#pragma once

#include "backend/cuda/few_chunk.cuh"
#include "backend/cuda/ring_copies.cuh"
#include "backend/cuda/stage_few.cuh"

namespace xllm {
namespace cuda {

constexpr int kFewMaxWarps = 8;
constexpr int kFewMaxStages = 8;

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
  int width;  // tiles of a group, pairs of tiles for kSwiGlu: a warp for each slice of each
  int num_stages, chunk_bytes;      // of a warp's ring; of the largest type
  int slice_first[kMaxSlices + 1];  // chunks
};

XLLM_HOST_DEVICE int few_barrier_bytes(int warps, int stages) {
  return (warps * stages * 8 + 4 * 8 + 127) / 128 * 128;
}
// Of one of the two buffers.
XLLM_HOST_DEVICE int few_partial_floats(int group_tiles, int num_slices, int tokens) {
  return group_tiles * num_slices * tokens * kTileRows;
}
XLLM_HOST_DEVICE int few_shared_bytes(int warps, int stages, int chunk_bytes, int num_chunks,
                                      int group_tiles, int num_slices, int tokens) {
  return few_barrier_bytes(warps, stages) + warps * stages * 2 * chunk_bytes +
         few_acts_bytes(num_chunks, tokens) +
         2 * few_partial_floats(group_tiles, num_slices, tokens) * 4;
}

// Tile `index` of the tiles of all segments, one after the other, or of both segments of a pair.
// False past the last one.
__device__ __forceinline__ bool find_tile(const MatmulArgs &args, bool is_pair, int index,
                                          int *segment, int *tile) {
  int s = 0;
  if (!is_pair) {
    while (s + 1 < args.num_segments && index >= args.segments[s].num_tiles)
      index -= args.segments[s++].num_tiles;
  }
  *segment = s;
  *tile = index;
  return index < args.segments[s].num_tiles;
}

// A warp's work in a group: chunks [first, end) of one tile, or of two at once.
struct FewJob {
  bool is_pair;
  int index;  // of the tile or pair in a group
  int first, end;
};

// The ring of one warp and what it reads next.
struct FewRing {
  uint8_t *base;
  uint64_t *barriers;
  int stage, num_stages, stage_bytes, chunk_bytes;
  uint32_t parity;
  // The cursor: chunks of the job still to come, 0: nothing more at all.
  const uint8_t *from[2];
  int left;
  int bytes[2], missing_bytes[2];  // of a chunk; what the job's last one lacks, at the ragged end
  int group;

  // Moves the cursor to this warp's job in its group, or to none.
  __device__ __forceinline__ void seek(const FewArgs &few, const FewJob &job) {
    const MatmulArgs &args = few.product;
    left = 0;
    int s = 0, tile = group * few.width + job.index;
    if (group >= few.num_groups || !find_tile(args, job.is_pair, tile, &s, &tile)) return;
    left = job.end - job.first;
    point(args.segments[s], tile, job, 0);
    if (job.is_pair) point(args.segments[1], tile, job, 1);
  }

  __device__ __forceinline__ void point(const MatmulSegment &segment, int tile, const FewJob &job,
                                        int which) {
    const int size = static_cast<int>(xllm::cuda::chunk_bytes(segment.type));
    const int64_t whole = static_cast<int64_t>(job.end) * size;
    bytes[which] = size;
    missing_bytes[which] = static_cast<int>(max(whole - segment.tile_bytes, int64_t{0}));
    from[which] =
        segment.tiles + tile * segment.tile_bytes + static_cast<int64_t>(job.first) * size;
  }

  // Asks for what the cursor stands at, into stage `to`, which the warp is done with.
  __device__ __forceinline__ void fetch(const FewArgs &few, const FewJob &job, int to, int lane) {
    if (left <= 0) return;
    uint8_t *at = base + to * stage_bytes;
    const int count = job.is_pair ? 1 : min(2, left);
    left -= count;
    const int size = count * bytes[0] - (left == 0 ? missing_bytes[0] : 0);
    const int other = bytes[1] - (left == 0 ? missing_bytes[1] : 0);  // 0 but for a pair
    expect_chunks(barriers + to, size + other, lane);
    copy_chunk(at, from[0], size, barriers + to, lane);
    from[0] += size;
    if (job.is_pair) {
      copy_chunk(at + chunk_bytes, from[1], other, barriers + to, lane);
      from[1] += other;
    }
    chunks_asked(barriers + to);
    if (left == 0) {
      group += static_cast<int>(gridDim.x);
      seek(few, job);
    }
  }
};

// What the steps of a job read besides weights.
template <int kTokens>
struct FewInput {
  uint32_t codes, zeros;  // shared addresses
  const uint8_t *sums;    // of the lane's token
  const float *scales;    // of the lane's token
  float factor;           // 1 / rms of the token's row, or 1
  int num_units;          // of K

  __device__ __forceinline__ uint32_t codes_of(int chunk) const {
    return codes + chunk * few_codes_bytes(kTokens);
  }
  __device__ __forceinline__ const uint8_t *sums_of(int chunk) const {
    return sums + chunk * few_sums_bytes(kTokens);
  }
  __device__ __forceinline__ float scale_of(int chunk) const {
    return __fmul_rn(scales[chunk * kTokens], factor);
  }
  __device__ __forceinline__ int units_of(int chunk) const {
    return min(kUnitsPerChunk, num_units - chunk * kUnitsPerChunk);
  }
};

// One step of a job: the two chunks of a stage, the second of them of the next columns or of the
// other tile. acc[tile][row of the lane].
template <int kType, int kTokens>
__device__ __forceinline__ void few_step(const uint8_t *stage, int second_at, bool is_pair,
                                         bool has_second, int chunk, int lane,
                                         const FewInput<kTokens> &in,
                                         float (&acc)[2][FewLane<kTokens>::kRows]) {
  constexpr int kRows = FewLane<kTokens>::kRows;
  float p[2][kRows];
  if (has_second) {  // one's loads and mmas while the other is scaled
    const int other = is_pair ? chunk : chunk + 1;
    few_chunk<kType, kTokens>(stage, in.units_of(chunk), lane, in.codes_of(chunk), in.zeros,
                              in.sums_of(chunk), p[0]);
    few_chunk<kType, kTokens>(stage + second_at, in.units_of(other), lane, in.codes_of(other),
                              in.zeros, in.sums_of(other), p[1]);
    const float dx[2] = {in.scale_of(chunk), in.scale_of(other)};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      acc[0][r] = __fmaf_rn(dx[0], p[0][r], acc[0][r]);
      const float sum = __fmaf_rn(dx[1], p[1][r], is_pair ? acc[1][r] : acc[0][r]);
      if (is_pair) {
        acc[1][r] = sum;
      } else {
        acc[0][r] = sum;
      }
    }
  } else {
    few_chunk<kType, kTokens>(stage, in.units_of(chunk), lane, in.codes_of(chunk), in.zeros,
                              in.sums_of(chunk), p[0]);
    const float dx = in.scale_of(chunk);
#pragma unroll
    for (int r = 0; r < kRows; ++r) acc[0][r] = __fmaf_rn(dx, p[0][r], acc[0][r]);
  }
}

// The same for a type known at run time only, the same in the whole warp.
template <TypeSet kSet, int kTokens, int kType = 0, typename... Arguments>
__device__ __forceinline__ void few_step_of(int type, Arguments &&...arguments) {
  if constexpr (kType < kNumTileTypes) {
    if constexpr (contains(kSet, kType)) {
      if (type == kType) return few_step<kType, kTokens>(arguments...);
    }
    few_step_of<kSet, kTokens, kType + 1>(type, arguments...);
  }
}

// All steps of the warp's job; types of the tile, or of both.
template <TypeSet kSet, int kTokens>
__device__ __forceinline__ void few_slice(const FewArgs &few, const FewJob &job,
                                          const int (&types)[2], int lane,
                                          const FewInput<kTokens> &in, FewRing *ring,
                                          float (&acc)[2][FewLane<kTokens>::kRows]) {
  const bool is_mixed = job.is_pair && types[0] != types[1];
  const int step = job.is_pair ? 1 : 2;
#pragma unroll 1
  for (int chunk = job.first; chunk < job.end; chunk += step) {
    wait_for_phase(ring->barriers + ring->stage, ring->parity);
    const uint8_t *at = ring->base + ring->stage * ring->stage_bytes;
    const int chunk_size =
        job.is_pair ? ring->chunk_bytes : static_cast<int>(chunk_bytes(types[0]));
    const bool has_second = job.is_pair ? !is_mixed : chunk + 1 < job.end;
#pragma unroll 1
    for (int tile = 0;; ++tile) {
      few_step_of<kSet, kTokens>(tile == 0 ? types[0] : types[1], at, chunk_size, job.is_pair,
                                 has_second, chunk, lane, in, acc);
      if (!is_mixed) break;
#pragma unroll
      for (int r = 0; r < FewLane<kTokens>::kRows; ++r) {
        const float other = acc[1][r];
        acc[1][r] = acc[0][r];
        acc[0][r] = other;
      }
      at += chunk_size;
      if (tile == 1) break;
    }
    __syncwarp();
    ring->fetch(few, job, ring->stage, lane);
    if (++ring->stage == ring->num_stages) {
      ring->stage = 0;
      ring->parity ^= 1;
    }
  }
}

// What one lane of a warp that finishes 32 outputs of a group writes: asked for before the product
// where no kernel writes it.
struct FewOutput {
  int column;  // of the output; < 0: there is none
  float bias;
};

__device__ __forceinline__ FewOutput few_output(const FewArgs &few, int group, int row) {
  const MatmulArgs &args = few.product;
  FewOutput output = {-1, 0.0f};
  int s, tile;
  if (group >= few.num_groups || row >= few.width * kTileRows ||
      !find_tile(args, args.epilogue == kSwiGlu, group * few.width + row / kTileRows, &s, &tile)) {
    return output;
  }
  const int local = tile * kTileRows + row % kTileRows;
  if (local >= args.segments[s].num_rows) return output;
  output.column = args.segments[s].out_row + local;
  if (args.bias != nullptr) output.bias = args.bias[output.column];
  return output;
}

// ((p0 + p1) + p2) + ... of the slices that there are, from partials stride apart.
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
  const MatmulArgs &args = few.product;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  // From one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 5, 0);
  const int num_warps = static_cast<int>(blockDim.x) >> 5;

  FewJob job;
  job.is_pair = args.epilogue == kSwiGlu;
  job.index = 0;
  int slice = warp;
  for (; slice >= args.num_slices; slice -= args.num_slices) ++job.index;
  job.first = few.slice_first[slice];
  job.end = few.slice_first[slice + 1];

  // The first weights, before the previous kernel is done. Every CTA of this grid is at work when
  // the next kernel's come in beside it, to do the same.
  uint64_t *barriers = reinterpret_cast<uint64_t *>(shared);
  uint64_t *ready = barriers, *free = barriers + 2;  // of the two buffers of partials
  FewRing ring;
  ring.chunk_bytes = few.chunk_bytes;
  ring.stage_bytes = 2 * few.chunk_bytes;
  ring.num_stages = few.num_stages;
  uint8_t *rings = shared + few_barrier_bytes(num_warps, few.num_stages);
  ring.base = rings + warp * few.num_stages * ring.stage_bytes;
  ring.barriers = barriers + 4 + warp * few.num_stages;
  ring.stage = 0;
  ring.parity = 0;
  ring.bytes[1] = ring.missing_bytes[1] = 0;
  ring.group = static_cast<int>(blockIdx.x);
  ring.seek(few, job);
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < few.num_stages; ++i) init_barrier(ring.barriers + i, stage_arrivals());
    publish_barriers();
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < few.num_stages; ++i) ring.fetch(few, job, i, lane);
  let_next_kernel_start();

  // Outputs of a group are finished by warps, 32 rows of a token each.
  const int part_shift = few.width <= 2 ? 0 : few.width <= 4 ? 1 : 2;
  const int num_parts = args.num_tokens << part_shift;
  const auto first_row = [&](int of) { return (of & ((1 << part_shift) - 1)) * kWarp; };
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      init_barrier(ready + i, num_warps);
      init_barrier(free + i, num_parts);
    }
  }
  const FewActs acts =
      few_acts<kTokens>(rings + num_warps * few.num_stages * ring.stage_bytes, args.num_chunks);
  float *partials = reinterpret_cast<float *>(reinterpret_cast<uint8_t *>(acts.codes) +
                                              few_acts_bytes(args.num_chunks, kTokens));
  for (int i = static_cast<int>(threadIdx.x); i < few_codes_bytes(kTokens) / 16;
       i += static_cast<int>(blockDim.x)) {
    reinterpret_cast<uint4 *>(acts.codes + args.num_chunks * few_codes_bytes(kTokens))[i] =
        make_uint4(0, 0, 0, 0);
  }
  // What else no kernel writes.
  const bool has_norm = args.rows.x != nullptr && args.rows.norm_weight != nullptr;
  FewNorm norm;
  if (has_norm) {
    load_norm(args, warp, num_warps, lane, &norm);
    for (int i = args.num_chunks + static_cast<int>(threadIdx.x);
         i < few_square_floats(args.num_chunks); i += static_cast<int>(blockDim.x)) {
#pragma unroll
      for (int m = 0; m < kTokens; ++m)
        acts.squares[m * few_square_floats(args.num_chunks) + i] = 0.0f;
    }
  }
  int part = warp, group = static_cast<int>(blockIdx.x);
  FewOutput output = few_output(few, group, first_row(part) + lane);

  wait_for_previous_kernel();
  if (args.rows.x == nullptr) {
    copy_acts<kTokens>(args, acts);
  } else if (has_norm) {
    stage_rows<kTokens, true>(args, warp, num_warps, lane, &norm, acts);
  } else {
    stage_rows<kTokens, false>(args, warp, num_warps, lane, &norm, acts);
  }
  __syncthreads();

  FewInput<kTokens> in;
  using Lane = FewLane<kTokens>;
  const int t = lane & 3, token = Lane::token(t);
  in.codes = after_barrier(shared_address(acts.codes));
  in.zeros = in.codes + args.num_chunks * few_codes_bytes(kTokens);
  in.sums = acts.sums + token * few_sums_bytes(1);
  in.scales = acts.scales + token;
  in.factor = has_norm
                  ? few_row_inverse(acts.squares + token * few_square_floats(args.num_chunks), args)
                  : 1.0f;
  in.num_units = args.num_units;

  const int group_tiles = job.is_pair ? 2 * few.width : few.width;
  const int buffer_floats = few_partial_floats(group_tiles, args.num_slices, kTokens);
  const int slice_floats = kTokens * kTileRows, tile_floats = args.num_slices * slice_floats;
#pragma unroll 1
  for (int iteration = 0; group < few.num_groups; ++iteration) {
    const int buffer = iteration & 1;
    const uint32_t parity = static_cast<uint32_t>(iteration >> 1) & 1;
    float *sums = partials + buffer * buffer_floats;
    const auto residual_at = [&](int of, const FewOutput &to) {
      return args.out + (args.first_token + (of >> part_shift)) * args.out_stride + to.column;
    };
    float residual = 0.0f;
    if (part < num_parts && output.column >= 0 && args.epilogue == kAddTo)
      residual = *residual_at(part, output);
    int s, tile;
    if (find_tile(args, job.is_pair, group * few.width + job.index, &s, &tile)) {
      const int types[2] = {args.segments[s].type, args.segments[job.is_pair ? 1 : s].type};
      float acc[2][Lane::kRows] = {};
      few_slice<kSet, kTokens>(few, job, types, lane, in, &ring, acc);
      if (iteration >= 2) wait_for_phase(free + buffer, parity ^ 1);
      if (Lane::part(t) < 2) {
        float *to = sums + (job.is_pair ? 2 : 1) * job.index * tile_floats + slice * slice_floats +
                    token * kTileRows + 8 * Lane::row(t) + (lane >> 2);
#pragma unroll
        for (int r = 0; r < Lane::kRows; ++r) {
          to[8 * r] = acc[0][r];
          if (job.is_pair) to[tile_floats + 8 * r] = acc[1][r];
        }
      }
    }
    __syncwarp();
    if (lane == 0) arrive(ready + buffer);
    for (int of = part; of < num_parts; of += num_warps) {
      if (of == part) {
        wait_for_phase(ready + buffer, parity);
      } else {
        output = few_output(few, group, first_row(of) + lane);
        if (output.column >= 0 && args.epilogue == kAddTo) residual = *residual_at(of, output);
      }
      if (output.column >= 0) {
        const int row = first_row(of) + lane;
        const float *p = sums + (job.is_pair ? 2 : 1) * (row / kTileRows) * tile_floats +
                         (of >> part_shift) * kTileRows + row % kTileRows;
        float y = sum_slices(p, slice_floats, args.num_slices);
        if (job.is_pair) {
          y = swiglu(y, sum_slices(p + tile_floats, slice_floats, args.num_slices));
        } else {
          if (args.bias != nullptr) y = __fadd_rn(y, output.bias);
          if (args.epilogue == kAddTo) y = __fadd_rn(residual, y);
        }
        *residual_at(of, output) = y;
      }
      __syncwarp();
      if (lane == 0) arrive(free + buffer);
    }
    part -= num_parts;
    while (part < 0) part += num_warps;
    group += static_cast<int>(gridDim.x);
    output = few_output(few, group, first_row(part) + lane);
  }
}

}  // namespace cuda
}  // namespace xllm
