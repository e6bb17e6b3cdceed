// Products of one token: reads each weight once, bound by memory.
//
// A warp works on all slices of K of a tile at once. The N of an mma is 8 tokens; here its columns
// are the 8 slices: the activations of slice s stand in column s and zeros in the others, so that
// after the tile's chunk i of every slice has gone by, column s holds the dots of slice s. Then
// every lane scales and adds dots of its own (rows g, g + 8 of slices 2t, 2t + 1), where with one
// slice at a time four lanes would do the same work: a third of the instructions.
//
// A tile belongs to one warp, so there must be many of them. Weights stream through a ring of
// chunks per warp that runs across tiles; they are asked for before the previous kernel has
// finished, activations, which it writes, after.
//   shared  ring [warps][stages][stage_bytes], activation codes [blocks][32], scales [blocks] {d,
//   s},
//           256 zeros, partials [2][group tiles][8 slices][16 rows] f32
#pragma once

#include "backend/cuda/finish_group.cuh"
#include "backend/cuda/mma_chunk.cuh"
#include "backend/cuda/ring_copies.cuh"
#include "backend/cuda/stage_acts.cuh"

namespace xllm {
namespace cuda {

constexpr int kOneMaxWarps = 4;
constexpr int kOneZeroBytes = 256;

XLLM_HOST_DEVICE int mma_one_partials_bytes(int tiles) {
  return 2 * tiles * kMaxSlices * kTileRows * 4;
}

// What a warp reads next: chunk i of each slice, for every i, tile after tile.
struct OneCursor {
  const uint8_t *tile;  // this lane's first 16 bytes of the tile
  int64_t tile_bytes;
  int bytes;         // of a chunk
  int group, index;  // index of the tile in its group; group >= num_groups: nothing more
  int i, chunk;      // chunk = slice * chunks_per_slice + i

  __device__ __forceinline__ void seek(const MatmulArgs &args, int lane) {
    if (group >= args.num_groups) return;
    int s, t;
    find_tile(args, group, index, &s, &t);
    const MatmulSegment &segment = args.segments[s];
    bytes = static_cast<int>(chunk_bytes(segment.type));
    tile_bytes = segment.tile_bytes;
    tile = segment.tiles + t * segment.tile_bytes + lane * 16;
  }
};

__device__ __forceinline__ void fetch_one(const MatmulArgs &args, OneCursor *at, int num_chunks,
                                          uint8_t *stage, int lane) {
  if (at->group < args.num_groups) {
    const int64_t offset = static_cast<int64_t>(at->chunk) * at->bytes;
    const int size =
        at->chunk + 1 == num_chunks ? static_cast<int>(at->tile_bytes - offset) : at->bytes;
    copy_chunk(stage, at->tile + offset, size, lane);
    at->chunk += args.chunks_per_slice;
    if (at->chunk >= num_chunks) {
      if (++at->i == args.chunks_per_slice) {
        at->i = 0;
        at->group += static_cast<int>(gridDim.x);
        at->seek(args, lane);
      }
      at->chunk = at->i;
    }
  }
  commit_copies();
}

// The dots of chunk i of all slices: of block b (and half h of it, where the type scales halves) in
// dots[b][h], and what scales those of slice 2t + j in raw[j].
template <int kType>
struct SliceDots {
  using Tile = WeightTile<kType>;
  static constexpr int kRaws = Tile::kKQuant ? 1 : kUnitsPerChunk;
  int dots[8][Tile::kNumScales][4];
  typename Tile::RawScales raw[2][kRaws];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int b = 0; b < 8; ++b) {
#pragma unroll
      for (int h = 0; h < Tile::kNumScales; ++h) {
#pragma unroll
        for (int k = 0; k < 4; ++k) dots[b][h][k] = kMagicBits;
      }
    }
  }

  // Adds a slice's chunk; codes: where this lane reads the activations of the mma's column.
  __device__ __forceinline__ void add(const uint8_t *chunk, int units, int lane,
                                      const uint8_t *codes) {
#pragma unroll
    for (int u = 0; u < kUnitsPerChunk; ++u) {
      if (!Tile::kKQuant && u >= units) break;
      uint32_t a[2][4];
      Tile::load_codes(chunk, u, lane, a);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint2 b = *reinterpret_cast<const uint2 *>(codes + (2 * u + step) * kActBlock);
        if (Tile::kHalfBlocks) {
          mma_s8_k16(dots[2 * u + step][0], a[step][0], a[step][1], b.x);
          mma_s8_k16(dots[2 * u + step][Tile::kNumScales - 1], a[step][2], a[step][3], b.y);
        } else {
          mma_s8_k32(dots[2 * u + step][0], a[step], b.x, b.y);
        }
      }
    }
  }

  __device__ __forceinline__ void load_raw(const uint8_t *chunk, int units, int g, int j) {
#pragma unroll
    for (int u = 0; u < kRaws; ++u) {
      if (u == 0 || u < units) Tile::load_raw(chunk + u * Tile::kUnitBytes, g, &raw[j][u]);
    }
  }

  template <int kBlock>
  __device__ __forceinline__ void accumulate_block(const typename Tile::Scales &scales, int j,
                                                   const uint8_t *ds, float (&acc)[2]) const {
    const float2 one = *reinterpret_cast<const float2 *>(ds + kBlock * 8);
    const float base = __fmul_rn(-kMagic, one.x);
    float dw[2][Tile::kNumScales], shift[2] = {0, 0};
    Tile::template step_scales<Tile::kKQuant ? kBlock : (kBlock & 1)>(scales, dw, shift);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int h = 0; h < Tile::kNumScales; ++h) {
        const float x = __int_as_float(dots[kBlock][h][j + 2 * r]);
        acc[r] = __fmaf_rn(dw[r][h], __fmaf_rn(x, one.x, base), acc[r]);
      }
      if (Tile::kHasMin) acc[r] = __fmaf_rn(shift[r], one.y, acc[r]);
    }
  }

  // acc[r] += the chunk's blocks of slice 2t + j, ascending, rows g + 8r; ds: its {d, s}.
  __device__ __forceinline__ void accumulate(int j, int units, const uint8_t *ds,
                                             float (&acc)[2]) const {
    typename Tile::Scales s;
    Tile::unpack(raw[j][0], &s);
    accumulate_block<0>(s, j, ds, acc);
    accumulate_block<1>(s, j, ds, acc);
    if (!Tile::kKQuant) {
      if (units < 2) return;
      Tile::unpack(raw[j][1 % kRaws], &s);
    }
    accumulate_block<2>(s, j, ds, acc);
    accumulate_block<3>(s, j, ds, acc);
    if (!Tile::kKQuant) {
      if (units < 3) return;
      Tile::unpack(raw[j][2 % kRaws], &s);
    }
    accumulate_block<4>(s, j, ds, acc);
    accumulate_block<5>(s, j, ds, acc);
    if (!Tile::kKQuant) {
      if (units < 4) return;
      Tile::unpack(raw[j][3 % kRaws], &s);
    }
    accumulate_block<6>(s, j, ds, acc);
    accumulate_block<7>(s, j, ds, acc);
  }
};

// The ring of one warp.
struct OneRing {
  uint8_t *base;
  int stage, num_stages, stage_bytes;
  OneCursor ahead;
};

// All slices of one tile, into acc[j][r] of rows g + 8r of slice 2t + j.
template <int kType>
__device__ __forceinline__ void one_tile(const MatmulArgs &args, OneRing *ring, int num_chunks,
                                         int lane, const uint8_t *codes, const uint8_t *scales,
                                         const uint8_t *zeros, float (&acc)[2][2]) {
  const int g = lane >> 2, t = lane & 3;
  const int stride = args.chunks_per_slice;
#pragma unroll 1
  for (int i = 0; i < stride; ++i) {
    SliceDots<kType> dots;
    dots.clear();
    int chunk = i;
#pragma unroll 1
    for (int pair = 0; chunk < num_chunks; ++pair) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (chunk >= num_chunks) break;
        wait_for_oldest_stage(ring->num_stages);
        __syncwarp();
        // The stage that this frees up was read one chunk ago, by this warp alone.
        const int free_stage = ring->stage == 0 ? ring->num_stages - 1 : ring->stage - 1;
        fetch_one(args, &ring->ahead, num_chunks, ring->base + free_stage * ring->stage_bytes,
                  lane);
        const uint8_t *now = ring->base + ring->stage * ring->stage_bytes;
        const int units = min(kUnitsPerChunk, args.num_units - chunk * kUnitsPerChunk);
        const uint8_t *b = g == 2 * pair + j ? codes + chunk * (8 * kActBlock) : zeros;
        dots.add(now, units, lane, b + t * 8);
        if (t == pair) dots.load_raw(now, units, g, j);
        if (++ring->stage == ring->num_stages) ring->stage = 0;
        chunk += stride;
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int mine = (2 * t + j) * stride + i;
      if (2 * t + j < args.num_slices && mine < num_chunks) {
        const int units = min(kUnitsPerChunk, args.num_units - mine * kUnitsPerChunk);
        dots.accumulate(j, units, scales + mine * 64, acc[j]);
      }
    }
  }
}

// The types that a kernel is compiled for: with all of them in one, registers run out.
enum class TypeSet { kQ4KQ6K, kQ8_0 };

XLLM_HOST_DEVICE constexpr bool contains(TypeSet set, int type) {
  return set == TypeSet::kQ8_0 ? type == kWeightQ8_0 : type == kWeightQ4_K || type == kWeightQ6_K;
}

template <TypeSet kSet, int kType = 0, typename... Arguments>
__device__ __forceinline__ void one_tile_of(int type, Arguments &&...arguments) {
  if constexpr (kType < kNumTileTypes) {
    if constexpr (contains(kSet, kType)) {
      if (type == kType) return one_tile<kType>(arguments...);
    }
    one_tile_of<kSet, kType + 1>(type, arguments...);
  }
}

// One warp for each tile of a group. args.token_pad is 1.
template <TypeSet kSet>
__global__ void __launch_bounds__(kOneMaxWarps *kWarp, 3)
    mma_one_kernel(const __grid_constant__ MatmulArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int num_chunks = (args.num_units + kUnitsPerChunk - 1) / kUnitsPerChunk;
  const int num_blocks = args.num_units * 2;
  const int tiles = group_tiles(args.epilogue);
  const int num_warps = tiles;

  uint8_t *codes = shared + num_warps * args.num_stages * args.stage_bytes;
  uint8_t *scales = codes + num_blocks * 32;
  uint8_t *zeros = scales + num_blocks * 8;
  float *partials = reinterpret_cast<float *>(zeros + kOneZeroBytes);

  const int index = warp;  // of this warp's tile in its group
  OneRing ring;
  ring.base = shared + warp * args.num_stages * args.stage_bytes;
  ring.stage = 0;
  ring.num_stages = args.num_stages;
  ring.stage_bytes = args.stage_bytes;
  ring.ahead.group = static_cast<int>(blockIdx.x);
  ring.ahead.index = index;
  ring.ahead.i = ring.ahead.chunk = 0;
  ring.ahead.seek(args, lane);
  for (int i = 0; i < args.num_stages - 1; ++i)
    fetch_one(args, &ring.ahead, num_chunks, ring.base + i * args.stage_bytes, lane);
  for (int i = static_cast<int>(threadIdx.x); i < kOneZeroBytes / 4; i += num_warps * kWarp)
    reinterpret_cast<uint32_t *>(zeros)[i] = 0;
  // Every CTA of this grid is at work when the next kernel's first ones come in beside it.
  let_next_kernel_start();
  wait_for_previous_kernel();
  stage_acts(args, num_blocks, 1, codes, scales);

  const int g = lane >> 2, t = lane & 3;
  int buffer = 0;
  for (int group = static_cast<int>(blockIdx.x); group < args.num_groups;
       group += static_cast<int>(gridDim.x)) {
    constexpr int kTileFloats = kMaxSlices * kTileRows;
    float *sums = partials + buffer * tiles * kTileFloats;
    const GroupOutputs before = outputs_before(args, 1, group);
    int s, tile;
    find_tile(args, group, index, &s, &tile);
    float acc[2][2] = {{0, 0}, {0, 0}};
    one_tile_of<kSet>(args.segments[s].type, args, &ring, num_chunks, lane, codes, scales, zeros,
                      acc);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        sums[index * kTileFloats + (2 * t + j) * kTileRows + g + 8 * r] = acc[j][r];
    }
    // The two buffers make one barrier per group enough.
    __syncthreads();
    finish_group(args, group, before, [&](int at, int row, int /*token*/) {
      float v[kMaxSlices];
#pragma unroll
      for (int i = 0; i < kMaxSlices; ++i) v[i] = sums[at * kTileFloats + i * kTileRows + row];
      return sum_slices(v, args.num_slices);
    });
    buffer ^= 1;
  }
  wait_for_copies<0>();
}

}  // namespace cuda
}  // namespace xllm
