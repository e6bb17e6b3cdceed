// Products of 1 to 8 tokens: reads each weight once, bound by memory.
//
// A CTA has one warp per slice of K (so 8 for most K); its warps walk the same tiles, each over its
// own slice, through a ring of chunks in shared memory that runs across tiles, so that the next
// tile's bytes are on their way while this one is reduced. Weights are asked for before the
// previous kernel has finished; activations, which it writes, after. The grid is what fits at once,
// and a CTA takes groups blockIdx.x, blockIdx.x + gridDim.x, ...
//   shared  ring [warps][stages][stage_bytes], activation codes [blocks][token_pad][32], scales
//   [blocks][token_pad] {d, s},
//           partials [2][group tiles][warps][16][token_pad] f32
#pragma once

#include "backend/cuda/mma_chunk.cuh"

namespace xllm {
namespace cuda {

// Shared memory that a launch needs besides the ring.
XLLM_HOST_DEVICE int mma_small_acts_bytes(int num_units, int token_pad) {
  return num_units * 2 * token_pad * (32 + 8);
}
XLLM_HOST_DEVICE int mma_small_partials_bytes(int group_tiles, int num_slices, int token_pad) {
  return 2 * group_tiles * num_slices * kTileRows * token_pad * 4;
}

// A warp's walk over (group, tile, chunk): all chunks of its slice of a tile, then the next tile.
struct ChunkCursor {
  int group, index, chunk;
};

__device__ __forceinline__ void advance(ChunkCursor *at, int first_chunk, int end_chunk,
                                        int group_tiles, int group_stride) {
  if (++at->chunk < end_chunk) return;
  at->chunk = first_chunk;
  if (++at->index < group_tiles) return;
  at->index = 0;
  at->group += group_stride;
}

// Asks for the chunk at the cursor; returns without a word past the end. Lanes share the 16-byte
// pieces.
__device__ __forceinline__ void fetch_chunk(const MatmulArgs &args, const ChunkCursor &at,
                                            uint8_t *stage, int lane) {
  if (at.group >= args.num_groups) return;
  int s, tile;
  find_tile(args, at.group, at.index, &s, &tile);
  const MatmulSegment &segment = args.segments[s];
  const int bytes = static_cast<int>(chunk_bytes(segment.type));
  const int64_t offset = static_cast<int64_t>(at.chunk) * bytes;
  const int64_t left = segment.tile_bytes - offset;
  const int size = left < bytes ? static_cast<int>(left) : bytes;
  const uint8_t *from = segment.tiles + tile * segment.tile_bytes + offset;
  for (int i = lane * 16; i < size; i += kWarp * 16) copy_async_16(stage + i, from + i);
}

// Waits for the oldest of the num_stages - 1 groups on their way.
__device__ __forceinline__ void wait_for_oldest_stage(int num_stages) {
  switch (num_stages) {
    case 8:
      return wait_for_copies<6>();
    case 7:
      return wait_for_copies<5>();
    case 6:
      return wait_for_copies<4>();
    case 5:
      return wait_for_copies<3>();
    case 4:
      return wait_for_copies<2>();
    case 3:
      return wait_for_copies<1>();
    default:
      return wait_for_copies<0>();
  }
}

// kOne: one token.
template <bool kOne>
__global__ void __launch_bounds__(kMaxSlices *kWarp, 2)
    mma_small_kernel(const __grid_constant__ MatmulArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int num_threads = static_cast<int>(blockDim.x);
  const int num_chunks = (args.num_units + kUnitsPerChunk - 1) / kUnitsPerChunk;
  const int num_blocks = args.num_units * 2;
  const int pad = kOne ? 1 : args.token_pad;
  const int num_stages = args.num_stages;
  const int group_tiles = args.epilogue == kSwiGlu ? 4 : 1;

  uint8_t *ring = shared + warp * num_stages * args.stage_bytes;
  uint8_t *codes = shared + args.num_slices * num_stages * args.stage_bytes;
  uint8_t *scales = codes + num_blocks * pad * 32;
  float *partials = reinterpret_cast<float *>(scales + num_blocks * pad * 8);

  // The first weights, before the previous kernel is done.
  const int first_chunk = warp * args.chunks_per_slice;
  const int end_chunk = min(first_chunk + args.chunks_per_slice, num_chunks);
  const int group_stride = static_cast<int>(gridDim.x);
  ChunkCursor ahead = {static_cast<int>(blockIdx.x), 0, first_chunk};
  for (int i = 0; i < num_stages - 1; ++i) {
    fetch_chunk(args, ahead, ring + i * args.stage_bytes, lane);
    commit_copies();
    advance(&ahead, first_chunk, end_chunk, group_tiles, group_stride);
  }

  wait_for_previous_kernel();

  // Activations of all of K: token_pad rows of each block, without the rest of its group of 8.
  {
    const int64_t base =
        static_cast<int64_t>(args.first_token / kActGroup) * args.act.num_blocks * kActGroup;
    const uint8_t *from_codes =
        reinterpret_cast<const uint8_t *>(args.act.codes) + base * kActBlock;
    const uint8_t *from_scales = reinterpret_cast<const uint8_t *>(args.act.scales + base);
    const int code_pieces = pad * 2;  // of 16 bytes, per block
    for (int i = static_cast<int>(threadIdx.x); i < num_blocks * code_pieces; i += num_threads) {
      const int block = i / code_pieces, piece = i % code_pieces;
      *reinterpret_cast<uint4 *>(codes + i * 16) = *reinterpret_cast<const uint4 *>(
          from_codes + block * (kActGroup * kActBlock) + piece * 16);
    }
    for (int i = static_cast<int>(threadIdx.x); i < num_blocks * pad; i += num_threads) {
      const int block = i / pad, token = i % pad;
      *reinterpret_cast<float2 *>(scales + i * 8) =
          *reinterpret_cast<const float2 *>(from_scales + (block * kActGroup + token) * 8);
    }
  }
  __syncthreads();

  const int g = lane >> 2, t = lane & 3;
  LaneActs acts;
  acts.codes_group = acts.scales_group = 0;
  acts.codes_block = pad * 32;
  acts.scales_block = pad * 8;

  ChunkCursor at = {static_cast<int>(blockIdx.x), 0, first_chunk};
  int stage = 0, buffer = 0;
  bool is_triggered = false;
  float acc[1][4] = {{0, 0, 0, 0}};
  while (at.group < args.num_groups) {
    int s, tile;
    find_tile(args, at.group, at.index, &s, &tile);
    // The stage that this iteration frees up was read one iteration ago, by this warp alone.
    wait_for_oldest_stage(num_stages);
    __syncwarp();
    {
      const int free_stage = stage == 0 ? num_stages - 1 : stage - 1;
      fetch_chunk(args, ahead, ring + free_stage * args.stage_bytes, lane);
      commit_copies();
      advance(&ahead, first_chunk, end_chunk, group_tiles, group_stride);
      if (!is_triggered && ahead.group >= args.num_groups) {
        let_next_kernel_start();
        is_triggered = true;
      }
    }
    acts.codes = codes + at.chunk * 8 * acts.codes_block + (g & (pad - 1)) * 32 + t * 8;
    acts.scales = scales + at.chunk * 8 * acts.scales_block + ((2 * t) & (pad - 1)) * 8;
    const int units = min(kUnitsPerChunk, args.num_units - at.chunk * kUnitsPerChunk);
    mma_chunk_of<1, kOne>(args.segments[s].type, ring + stage * args.stage_bytes, units, lane, acts,
                          acc);
    if (++stage == num_stages) stage = 0;

    const ChunkCursor done = at;
    advance(&at, first_chunk, end_chunk, group_tiles, group_stride);
    if (done.chunk + 1 < end_chunk) continue;

    // The slice of this tile is done.
    {
      float *to = partials +
                  ((buffer * group_tiles + done.index) * args.num_slices + warp) * kTileRows * pad;
      if (2 * t < pad) {
        to[g * pad + 2 * t] = acc[0][0];
        to[(g + 8) * pad + 2 * t] = acc[0][2];
      }
      if (!kOne && 2 * t + 1 < pad) {
        to[g * pad + 2 * t + 1] = acc[0][1];
        to[(g + 8) * pad + 2 * t + 1] = acc[0][3];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[0][i] = 0;
    }
    if (done.index + 1 < group_tiles) continue;

    // The group is done: add the slices up in order. The two buffers make one barrier per group
    // enough.
    __syncthreads();
    finish_group(args, partials + buffer * group_tiles * args.num_slices * kTileRows * pad, pad, s,
                 tile, done.group);
    buffer ^= 1;
  }
  wait_for_copies<0>();
}

}  // namespace cuda
}  // namespace xllm
