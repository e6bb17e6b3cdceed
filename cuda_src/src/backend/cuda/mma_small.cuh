// Products of 1 to 8 tokens: reads each weight once, bound by memory.
//
// A CTA has one warp per slice of K (so 8 for most K), or two sets of them; its warps walk the same
// tiles, each over its own slice, through a ring of chunks in shared memory that runs across tiles,
// so that the next tile's bytes are on their way while this one is reduced. Weights are asked for
// before the previous kernel has finished; activations, which it writes, after. The grid is what
// fits at once, and a CTA takes groups blockIdx.x, blockIdx.x + gridDim.x, ...
//   shared  ring [warps][stages][stage_bytes], activation codes [blocks][token_pad][32], scales
//           [blocks][token_pad] {d, s}, partials [2][group tiles][warps][16][token_pad] f32
#pragma once

#include "backend/cuda/finish_group.cuh"
#include "backend/cuda/mma_chunk.cuh"
#include "backend/cuda/ring_copies.cuh"
#include "backend/cuda/stage_acts.cuh"

namespace xllm {
namespace cuda {

// Shared memory that a launch needs besides the ring and the activations.
XLLM_HOST_DEVICE int mma_small_partials_bytes(int group_tiles, int num_slices, int token_pad) {
  return 2 * group_tiles * num_slices * kTileRows * token_pad * 4;
}

// What a warp reads next: the chunks of its slice of a tile, then those of the next tile.
struct ChunkCursor {
  const uint8_t *from;  // this lane's first 16 bytes of the chunk
  int left;             // chunks of this tile's slice still to come, 0: nothing more at all
  int bytes;            // of a chunk
  int last_bytes;       // of the slice's last one, shorter at the ragged end of K
  int group, index, first_index;

  __device__ __forceinline__ void seek(const MatmulArgs &args, int first_chunk, int end_chunk,
                                       int lane) {
    left = 0;
    if (group >= args.num_groups) return;
    int s, tile;
    find_tile(args, group, index, &s, &tile);
    const MatmulSegment &segment = args.segments[s];
    bytes = static_cast<int>(chunk_bytes(segment.type));
    left = end_chunk - first_chunk;
    last_bytes =
        static_cast<int>(min(static_cast<int64_t>(bytes),
                             segment.tile_bytes - static_cast<int64_t>(end_chunk - 1) * bytes));
    from = segment.tiles + tile * segment.tile_bytes + static_cast<int64_t>(first_chunk) * bytes +
           lane * 16;
  }
};

// Asks for the chunk at the cursor and moves on; lanes share the 16-byte pieces. Commits a group of
// copies even past the end, so that groups can be counted.
__device__ __forceinline__ void fetch_chunk(const MatmulArgs &args, ChunkCursor *at,
                                            int first_chunk, int end_chunk, uint8_t *stage,
                                            int lane) {
  if (at->left > 0) {
    const int size = at->left == 1 ? at->last_bytes : at->bytes;
    copy_chunk(stage, at->from, size, lane);
    at->from += at->bytes;
    if (--at->left == 0) {
      at->index += args.tiles_at_once;
      if (at->index >= group_tiles(args.epilogue)) {
        at->index = at->first_index;
        at->group += static_cast<int>(gridDim.x);
      }
      at->seek(args, first_chunk, end_chunk, lane);
    }
  }
  commit_copies();
}

// The ring of one warp.
struct ChunkRing {
  uint8_t *base;
  int stage, num_stages, stage_bytes;
  ChunkCursor ahead;
};

// One slice of one tile: `acts` point at the slice's first block.
template <int kType, bool kOne>
__device__ __forceinline__ void mma_slice(const MatmulArgs &args, ChunkRing *ring, int first_chunk,
                                          int end_chunk, int lane, LaneActs acts,
                                          float (&acc)[kNumChains][1][4]) {
#pragma unroll 1
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
    wait_for_oldest_stage(ring->num_stages);
    __syncwarp();
    // The stage that this iteration frees up was read one iteration ago, by this warp alone.
    const int free_stage = ring->stage == 0 ? ring->num_stages - 1 : ring->stage - 1;
    fetch_chunk(args, &ring->ahead, first_chunk, end_chunk,
                ring->base + free_stage * ring->stage_bytes, lane);
    const int units = min(kUnitsPerChunk, args.num_units - chunk * kUnitsPerChunk);
    mma_chunk<kType, 1, kOne>(ring->base + ring->stage * ring->stage_bytes, units, lane, acts, acc);
    acts.codes += 8 * acts.codes_block;
    acts.scales += 8 * acts.scales_block;
    if (++ring->stage == ring->num_stages) ring->stage = 0;
  }
}

template <bool kOne>
__device__ __forceinline__ void mma_slice_of(int type, const MatmulArgs &args, ChunkRing *ring,
                                             int first_chunk, int end_chunk, int lane,
                                             const LaneActs &acts, float (&acc)[kNumChains][1][4]) {
  switch (type) {
    case kWeightQ4_K:
      return mma_slice<kWeightQ4_K, kOne>(args, ring, first_chunk, end_chunk, lane, acts, acc);
    case kWeightQ6_K:
      return mma_slice<kWeightQ6_K, kOne>(args, ring, first_chunk, end_chunk, lane, acts, acc);
    case kWeightQ8_0:
      return mma_slice<kWeightQ8_0, kOne>(args, ring, first_chunk, end_chunk, lane, acts, acc);
    case kWeightQ5_K:
      return mma_slice<kWeightQ5_K, kOne>(args, ring, first_chunk, end_chunk, lane, acts, acc);
    case kWeightQ4_0:
      return mma_slice<kWeightQ4_0, kOne>(args, ring, first_chunk, end_chunk, lane, acts, acc);
    case kWeightQ4_1:
      return mma_slice<kWeightQ4_1, kOne>(args, ring, first_chunk, end_chunk, lane, acts, acc);
    case kWeightQ5_0:
      return mma_slice<kWeightQ5_0, kOne>(args, ring, first_chunk, end_chunk, lane, acts, acc);
    default:
      return mma_slice<kWeightQ5_1, kOne>(args, ring, first_chunk, end_chunk, lane, acts, acc);
  }
}

// kOne: one token. kSets: 2 where two tiles are worked on at once, by num_slices warps each.
template <bool kOne, int kSets>
__global__ void __launch_bounds__(kSets * kMaxSlices * kWarp, kSets == 2 ? 1
                                                              : kOne     ? 3
                                                                         : 2)
    mma_small_kernel(const __grid_constant__ MatmulArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int num_chunks = (args.num_units + kUnitsPerChunk - 1) / kUnitsPerChunk;
  const int num_blocks = args.num_units * 2;
  const int pad = kOne ? 1 : args.token_pad;
  const int tiles = group_tiles(args.epilogue);

  const int slice = kSets == 1 ? warp : warp % args.num_slices;
  const int first_index = kSets == 1 ? 0 : warp / args.num_slices;

  uint8_t *codes = shared + kSets * args.num_slices * args.num_stages * args.stage_bytes;
  uint8_t *scales = codes + num_blocks * pad * 32;
  float *partials = reinterpret_cast<float *>(scales + num_blocks * pad * 8);

  // The first weights, before the previous kernel is done. Every CTA of this grid is at work when
  // the next kernel's first ones come in beside it, to do the same.
  const int first_chunk = slice_first_chunk(slice, args.num_slices, num_chunks);
  const int end_chunk = slice_first_chunk(slice + 1, args.num_slices, num_chunks);
  ChunkRing ring;
  ring.base = shared + warp * args.num_stages * args.stage_bytes;
  ring.stage = 0;
  ring.num_stages = args.num_stages;
  ring.stage_bytes = args.stage_bytes;
  ring.ahead.group = static_cast<int>(blockIdx.x);
  ring.ahead.index = ring.ahead.first_index = first_index;
  ring.ahead.seek(args, first_chunk, end_chunk, lane);
  for (int i = 0; i < args.num_stages - 1; ++i) {
    fetch_chunk(args, &ring.ahead, first_chunk, end_chunk, ring.base + i * args.stage_bytes, lane);
  }
  let_next_kernel_start();
  wait_for_previous_kernel();
  stage_acts(args, num_blocks, pad, codes, scales);

  const int g = lane >> 2, t = lane & 3;
  LaneActs acts;
  acts.codes_group = acts.scales_group = 0;
  acts.codes_block = pad * 32;
  acts.scales_block = pad * 8;
  acts.codes = codes + first_chunk * 8 * acts.codes_block + (g & (pad - 1)) * 32 + t * 8;
  acts.scales = scales + first_chunk * 8 * acts.scales_block + ((2 * t) & (pad - 1)) * 8;

  int buffer = 0;
  for (int group = static_cast<int>(blockIdx.x); group < args.num_groups;
       group += static_cast<int>(gridDim.x)) {
    float *sums = partials + buffer * tiles * args.num_slices * kTileRows * pad;
    const GroupOutputs before = outputs_before(args, pad, group);
    for (int index = first_index; index < tiles; index += kSets) {
      int s, tile;
      find_tile(args, group, index, &s, &tile);
      float acc[kNumChains][1][4] = {};
      mma_slice_of<kOne>(args.segments[s].type, args, &ring, first_chunk, end_chunk, lane, acts,
                         acc);
      float sum[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum[i] = sum_chains(acc[0][0][i], acc[1][0][i], acc[2][0][i], acc[3][0][i]);
      float *to = sums + (index * args.num_slices + slice) * kTileRows * pad;
      if (2 * t < pad) {
        to[g * pad + 2 * t] = sum[0];
        to[(g + 8) * pad + 2 * t] = sum[2];
      }
      if (!kOne && 2 * t + 1 < pad) {
        to[g * pad + 2 * t + 1] = sum[1];
        to[(g + 8) * pad + 2 * t + 1] = sum[3];
      }
    }
    // Add the slices up in order. The two buffers make one barrier per group enough.
    __syncthreads();
    finish_group(args, sums, pad, group, before);
    buffer ^= 1;
  }
  wait_for_copies<0>();
}

}  // namespace cuda
}  // namespace xllm
