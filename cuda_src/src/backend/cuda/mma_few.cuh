// Products of 1 to 8 tokens on tensor cores: reads each weight once, bound by memory.
//
// A job is one slice of K of one tile; the jobs of a group of tiles are dealt to the warps of a
// CTA, and a CTA takes groups blockIdx.x, blockIdx.x + gridDim.x, ... Each warp has a ring of
// chunks in shared memory that runs on across jobs, filled by bulk copies; the first are asked for
// before the previous kernel has finished, activations, which it writes, after. Slices are added up
// by a warp per token while the other warps are at the next group.
//
// The N of an mma is 8 columns, and kTokens may be fewer. The columns left over hold other blocks
// of the same chunk, so that every lane holds dots of its own to scale and add. With 2 and 4 tokens
// the activations of a block stand in its columns and zeros in the others, and a few mmas go into
// the same registers; with 1 every column holds its block in every mma, and a lane keeps the dots
// of the mma whose block its columns hold.
//   tokens  column of block 2c + p, token m  a lane owns
//   1       2c + p                           chain t
//   2       2c + m                           chain t, tokens 0 and 1
//   4       4 (c % 2) + m                    chains t / 2 and 2 + t / 2, 2 tokens from 2 (t % 2)
//   8       m                                four chains, tokens 2t and 2t + 1
// of rows g and g + 8 (lane = 4g + t), which is what the four chains of the canonical order
// (matmul_args.cuh) are for.
//
// No int -> float conversion: accumulators start at the bits of 12582912.0f, so that after the mma
// they read as 12582912 + dot (|dot| < 2^22), and fma(x, d, -12582912 * d) is dot * d rounded once,
// because 12582912 * d is exact (act_quant.cuh).
//   shared  barriers, ring [warps][stages][stage_bytes], activation codes [blocks][kTokens][32],
//           scales [blocks][kTokens] {d, s}, partials [2][group tiles][slices][kTokens][16 or 20],
//           for 4 and 8 tokens factors [warps][1024 bytes]
#pragma once

#include "backend/cuda/finish_group.cuh"
#include "backend/cuda/ring_copies.cuh"
#include "backend/cuda/stage_acts.cuh"

namespace xllm {
namespace cuda {

constexpr int kFewMaxStages = 8;

// The types that a kernel is compiled for: with all of them in one, registers run out.
enum class TypeSet { kQ4KQ6K, kQ8_0, kAll };

XLLM_HOST_DEVICE constexpr bool contains(TypeSet set, int type) {
  return set == TypeSet::kAll    ? type < kNumTileTypes
         : set == TypeSet::kQ8_0 ? type == kWeightQ8_0
                                 : type == kWeightQ4_K || type == kWeightQ6_K;
}

// Floats between two tokens of a slice's sums: not 16, so that the lanes that write them hit
// different banks.
XLLM_HOST_DEVICE constexpr int few_token_stride(int tokens) { return tokens == 1 ? 16 : 20; }
XLLM_HOST_DEVICE int few_partials_bytes(int group_tiles, int num_slices, int tokens) {
  return 2 * group_tiles * num_slices * tokens * few_token_stride(tokens) * 4;
}
XLLM_HOST_DEVICE int few_barrier_bytes(int warps, int stages) {
  return (warps * stages * 8 + 4 * 8 + 127) / 128 * 128;
}
XLLM_HOST_DEVICE constexpr int few_factor_bytes(int tokens) { return tokens >= 4 ? 1024 : 0; }

template <int kTokens>
struct FewLayout {
  static constexpr int kMaxWarps = kTokens <= 2 ? 16 : 8;
  static constexpr int kLaneChains = kTokens <= 2 ? 1 : kTokens / 2;
  static constexpr int kLaneTokens = kTokens == 1 ? 1 : 2;
  static constexpr int kRoundUnits = kUnitsPerChunk / kLaneChains;  // of a set of accumulators
  static constexpr int kSets = kTokens == 1 ? 1 : 2;                // a round's, for each p

  // The chain that lane t adds to in round i.
  static __device__ __forceinline__ int chain(int i, int t) {
    return kTokens <= 2 ? t : kTokens == 4 ? 2 * i + (t >> 1) : i;
  }
  static __device__ __forceinline__ int first_token(int t) {
    return kTokens <= 2 ? 0 : kTokens == 4 ? 2 * (t & 1) : 2 * t;
  }
  // Whether column g of the mma of block 2u + p holds that block.
  static __device__ __forceinline__ bool has_block(int u, int p, int g) {
    return kTokens == 1   ? g == 2 * u + p
           : kTokens == 2 ? (g >> 1) == u
           : kTokens == 4 ? (g >> 2) == (u & 1)
                          : true;
  }
  // Where this lane's 8 bytes of codes lie that it ever puts into a column in round i, from the
  // chunk's first block.
  static __device__ __forceinline__ int codes_offset(int i, int p, int g, int t) {
    const int entry = kTokens == 1   ? g
                      : kTokens == 2 ? (2 * (g >> 1) + p) * 2 + (g & 1)
                      : kTokens == 4 ? (2 * (2 * i + (g >> 2)) + p) * 4 + (g & 3)
                                     : (2 * i + p) * 8 + g;
    return entry * kActBlock + t * 8;
  }
};

// The factors of a lane's chain for the other lanes of its row, in 1024 bytes of the warp: float4
// (step, chain, row g) at a place that hits different banks.
__device__ __forceinline__ int factor_place(int step, int chain, int g) {
  return (step * 4 + chain) * 8 + (g ^ (2 * chain));
}

template <int kType>
__device__ __forceinline__ void share_factors(const typename WeightTile<kType>::Factors &f, int g,
                                              int t, float4 *to) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const auto &dw = f.dw[step];
    to[factor_place(step, t, g)] =
        WeightTile<kType>::kHalfBlocks
            ? make_float4(dw[0][0], dw[0][WeightTile<kType>::kNumScales - 1], dw[1][0],
                          dw[1][WeightTile<kType>::kNumScales - 1])
            : make_float4(dw[0][0], dw[1][0], f.shift[step][0], f.shift[step][1]);
  }
}

template <int kType>
__device__ __forceinline__ void take_factors(const float4 *from, int step, int chain, int g,
                                             typename WeightTile<kType>::Factors *f) {
  const float4 v = from[factor_place(step, chain, g)];
  if (WeightTile<kType>::kHalfBlocks) {
    f->dw[step][0][0] = v.x;
    f->dw[step][0][WeightTile<kType>::kNumScales - 1] = v.y;
    f->dw[step][1][0] = v.z;
    f->dw[step][1][WeightTile<kType>::kNumScales - 1] = v.w;
  } else {
    f->dw[step][0][0] = v.x;
    f->dw[step][1][0] = v.y;
    f->shift[step][0] = v.z;
    f->shift[step][1] = v.w;
  }
}

// c += the dots of the block of step p: of all of it, or of its halves.
template <int kType>
__device__ __forceinline__ void add_block_dots(int p, const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1,
                                               int (&c)[WeightTile<kType>::kNumScales][4]) {
  using Tile = WeightTile<kType>;
  if (Tile::kHalfBlocks) {
    mma_s8_k16(c[0], a[0], a[1], b0);
    mma_s8_k16(c[Tile::kNumScales - 1], a[2], a[3], b1);
  } else if (Tile::kHighInPlace && p == 1) {
    mma_u8_k32(c[0], a, b0, b1);
  } else {
    mma_s8_k32(c[0], a, b0, b1);
  }
}

template <int kType>
__device__ __forceinline__ void block_dots(int p, const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                           int (&c)[WeightTile<kType>::kNumScales][4]) {
#pragma unroll
  for (int h = 0; h < WeightTile<kType>::kNumScales; ++h)
    c[h][0] = c[h][1] = c[h][2] = c[h][3] = kMagicBits;
  add_block_dots<kType>(p, a, b0, b1, c);
}

// One chunk of a tile; num_units of it exist (4 but at the ragged end, where what lies behind them
// is read and left alone). codes and scales: of the chunk's first block.
template <int kType, int kTokens>
__device__ __forceinline__ void few_chunk(
    const uint8_t *chunk, int num_units, int lane, const uint8_t *codes, const uint8_t *scales,
    float4 *shared_factors,
    float (&acc)[FewLayout<kTokens>::kLaneChains][2][FewLayout<kTokens>::kLaneTokens]) {
  using Tile = WeightTile<kType>;
  using Layout = FewLayout<kTokens>;
  constexpr int kHalves = Tile::kNumScales;
  const int g = lane >> 2, t = lane & 3;
  typename Tile::Factors factors;
  if (kTokens <= 2) {
    Tile::load_factors(chunk, t, g, &factors);
  } else {
    typename Tile::Factors mine;
    Tile::load_factors(chunk, t, g, &mine);
    share_factors<kType>(mine, g, t, shared_factors);
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < Layout::kLaneChains; ++i) {
    uint2 b[Layout::kSets];
#pragma unroll
    for (int p = 0; p < Layout::kSets; ++p)
      b[p] = *reinterpret_cast<const uint2 *>(codes + Layout::codes_offset(i, p, g, t));
    int c[Layout::kSets][kHalves][4];
#pragma unroll
    for (int p = 0; p < Layout::kSets; ++p) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
        c[p][h][0] = c[p][h][1] = c[p][h][2] = c[p][h][3] = kMagicBits;
    }
#pragma unroll
    for (int uu = 0; uu < Layout::kRoundUnits; ++uu) {
      const int u = i * Layout::kRoundUnits + uu;
      uint32_t a[2][4];
      Tile::load_codes(chunk, u, lane, a);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (kTokens == 1) {
          // Every column holds its block: a lane keeps what column 2u + p is to it. The mmas do not
          // wait for one another.
          int dots[kHalves][4];
          block_dots<kType>(p, a[p], b[0].x, b[0].y, dots);
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              if (u == 0 || t == u) c[0][h][2 * r + p] = dots[h][2 * r + p];
            }
          }
          continue;
        }
        const int set = p & (Layout::kSets - 1);
        const bool has = Layout::has_block(u, p, g);
        const uint32_t b0 = has ? b[set].x : 0u, b1 = has ? b[set].y : 0u;
        add_block_dots<kType>(p, a[p], b0, b1, c[set]);
      }
    }
    const int chain = Layout::chain(i, t);
    if (!Tile::kKQuant && chain >= num_units) continue;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (kTokens > 2) take_factors<kType>(shared_factors, p, chain, g, &factors);
      float d[Layout::kLaneTokens], s[Layout::kLaneTokens];
      const uint8_t *at = scales + ((2 * chain + p) * kTokens + Layout::first_token(t)) * 8;
      if (kTokens == 1) {
        const float2 v = *reinterpret_cast<const float2 *>(at);
        d[0] = v.x;
        s[0] = v.y;
      } else {
        const float4 v = *reinterpret_cast<const float4 *>(at);
        d[0] = v.x;
        s[0] = v.y;
        d[Layout::kLaneTokens - 1] = v.z;
        s[Layout::kLaneTokens - 1] = v.w;
      }
#pragma unroll
      for (int m = 0; m < Layout::kLaneTokens; ++m) {
        const float base = __fmul_rn(-kMagic, d[m]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
            const int x =
                kTokens == 1 ? c[0][h][2 * r + p] : c[p & (Layout::kSets - 1)][h][2 * r + m];
            acc[i][r][m] = __fmaf_rn(factors.dw[p][r][h], __fmaf_rn(__int_as_float(x), d[m], base),
                                     acc[i][r][m]);
          }
          if (Tile::kHasMin) acc[i][r][m] = __fmaf_rn(factors.shift[p][r], s[m], acc[i][r][m]);
        }
      }
    }
  }
}

// What a warp reads next: the chunks of a job, then those of its next job.
struct JobCursor {
  const uint8_t *from;
  int left;                  // chunks of this job still to come; 0: nothing more at all
  int bytes, missing_bytes;  // of a chunk; less in the job's last one, at the ragged end
  int group, job;
};

// The slices and jobs of a launch, for one warp.
struct FewPlan {
  int num_chunks, slice_shift, num_jobs, num_warps, warp;

  __device__ __forceinline__ int first_chunk(int slice) const {
    return slice * num_chunks >> slice_shift;
  }
  __device__ __forceinline__ int tile_of(int job) const { return job >> slice_shift; }
  __device__ __forceinline__ int slice_of(int job) const { return job & ((1 << slice_shift) - 1); }

  // Moves to the first job at or after (group, job) that has a tile.
  __device__ __forceinline__ void seek(const MatmulArgs &args, JobCursor *at) const {
    at->left = 0;
    while (at->group < args.num_groups) {
      int s, tile;
      if (at->job < num_jobs && find_tile(args, at->group, tile_of(at->job), &s, &tile)) {
        const MatmulSegment &segment = args.segments[s];
        const int slice = slice_of(at->job);
        const int first = first_chunk(slice), end = first_chunk(slice + 1);
        at->bytes = static_cast<int>(chunk_bytes(segment.type));
        const int64_t whole = static_cast<int64_t>(end) * at->bytes;
        at->missing_bytes = static_cast<int>(max(whole - segment.tile_bytes, int64_t{0}));
        at->left = end - first;
        at->from =
            segment.tiles + tile * segment.tile_bytes + static_cast<int64_t>(first) * at->bytes;
        return;
      }
      at->job += num_warps;
      if (at->job >= num_jobs) {
        at->job = warp;
        at->group += static_cast<int>(gridDim.x);
      }
    }
  }
};

// The ring of one warp.
struct ChunkRing {
  uint8_t *base;
  uint64_t *barriers;
  int stage, num_stages, stage_bytes, stage_chunks;
  uint32_t parity;
  JobCursor ahead;

  // Asks for the chunk at the cursor, into stage `to`, which the warp is done with.
  __device__ __forceinline__ void fetch(const MatmulArgs &args, const FewPlan &plan, int to,
                                        int lane) {
    if (ahead.left <= 0) return;
    const int count = min(stage_chunks, ahead.left);
    int size = count * ahead.bytes;
    ahead.left -= count;
    if (ahead.left == 0) size -= ahead.missing_bytes;
    copy_chunk(base + to * stage_bytes, ahead.from, size, barriers + to, lane);
    ahead.from += size;
    if (ahead.left == 0) {
      ahead.job += plan.num_warps;
      if (ahead.job >= plan.num_jobs) {
        ahead.job = plan.warp;
        ahead.group += static_cast<int>(gridDim.x);
      }
      plan.seek(args, &ahead);
    }
  }
};

// One job: chunks [first, end) of a tile; codes and scales of the whole K.
template <int kType, int kTokens>
__device__ __forceinline__ void few_slice(
    const MatmulArgs &args, const FewPlan &plan, ChunkRing *ring, int first, int end, int lane,
    const uint8_t *codes, const uint8_t *scales, float4 *shared_factors,
    float (&acc)[FewLayout<kTokens>::kLaneChains][2][FewLayout<kTokens>::kLaneTokens]) {
  codes += first * (8 * kTokens * kActBlock);
  scales += first * (8 * kTokens * 8);
  for (int chunk = first; chunk < end;) {
    wait_for_phase(ring->barriers + ring->stage, ring->parity);
    const uint8_t *from = ring->base + ring->stage * ring->stage_bytes;
    const int stop = min(chunk + ring->stage_chunks, end);
    const auto units = [&](int at) {
      return min(kUnitsPerChunk, args.num_units - at * kUnitsPerChunk);
    };
    constexpr int kCodes = 8 * kTokens * kActBlock, kScales = 8 * kTokens * 8;
    if (kTokens <= 2) {  // two at once: one's loads and mmas while the other is scaled
#pragma unroll 1
      for (; chunk + 1 < stop; chunk += 2) {
        few_chunk<kType, kTokens>(from, kUnitsPerChunk, lane, codes, scales, shared_factors, acc);
        few_chunk<kType, kTokens>(from + chunk_bytes(kType), units(chunk + 1), lane, codes + kCodes,
                                  scales + kScales, shared_factors, acc);
        from += 2 * chunk_bytes(kType);
        codes += 2 * kCodes;
        scales += 2 * kScales;
      }
    }
#pragma unroll 1
    for (; chunk < stop; ++chunk) {
      few_chunk<kType, kTokens>(from, units(chunk), lane, codes, scales, shared_factors, acc);
      from += chunk_bytes(kType);
      codes += kCodes;
      scales += kScales;
      if (kTokens > 2) __syncwarp();  // the factors have been read
    }
    if (kTokens <= 2) __syncwarp();
    ring->fetch(args, plan, ring->stage, lane);
    if (++ring->stage == ring->num_stages) {
      ring->stage = 0;
      ring->parity ^= 1;
    }
  }
}

template <TypeSet kSet, int kTokens, int kType = 0, typename... Arguments>
__device__ __forceinline__ void few_slice_of(int type, Arguments &&...arguments) {
  if constexpr (kType < kNumTileTypes) {
    if constexpr (contains(kSet, kType)) {
      if (type == kType) return few_slice<kType, kTokens>(arguments...);
    }
    few_slice_of<kSet, kTokens, kType + 1>(type, arguments...);
  }
}

// The sum of a job's slice, from the chains of its lanes, to [token][row].
template <int kTokens>
__device__ __forceinline__ void store_slice(
    const float (&acc)[FewLayout<kTokens>::kLaneChains][2][FewLayout<kTokens>::kLaneTokens],
    int lane, float *to) {
  using Layout = FewLayout<kTokens>;
  constexpr uint32_t kAll = 0xffffffffu;
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int m = 0; m < Layout::kLaneTokens; ++m) {
      float p;
      if (kTokens <= 2) {  // a + b is b + a: both lanes of a pair get the same bits
        p = acc[0][r][m];
        p = __fadd_rn(p, __shfl_xor_sync(kAll, p, 1));
        p = __fadd_rn(p, __shfl_xor_sync(kAll, p, 2));
      } else if (kTokens == 4) {
        float pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float a = acc[i % Layout::kLaneChains][r][m];
          pair[i] = __fadd_rn(a, __shfl_xor_sync(kAll, a, 2));
        }
        p = __fadd_rn(pair[0], pair[1]);
      } else {
        p = sum_chains(acc[0][r][m], acc[1 % Layout::kLaneChains][r][m],
                       acc[2 % Layout::kLaneChains][r][m], acc[3 % Layout::kLaneChains][r][m]);
      }
      const int token = Layout::first_token(t) + m;
      const bool writes = kTokens <= 2 ? t == 0 : kTokens == 4 ? t < 2 : true;
      if (writes) to[token * few_token_stride(kTokens) + g + 8 * r] = p;
    }
  }
}

template <int kTokens, TypeSet kSet>
__global__ void __launch_bounds__(FewLayout<kTokens>::kMaxWarps *kWarp,
                                  16 / FewLayout<kTokens>::kMaxWarps)
    mma_few_kernel(const __grid_constant__ MatmulArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  FewPlan plan;
  // From one lane, so that the compiler knows it to be the same in all.
  plan.warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 5, 0);
  plan.num_warps = static_cast<int>(blockDim.x) >> 5;
  plan.num_chunks = (args.num_units + kUnitsPerChunk - 1) / kUnitsPerChunk;
  plan.slice_shift = 31 - __clz(args.num_slices);
  plan.num_jobs = group_tiles(args) << plan.slice_shift;
  const int num_blocks = args.num_units * 2;

  uint64_t *barriers = reinterpret_cast<uint64_t *>(shared);
  uint64_t *ready = barriers, *free = barriers + 2;  // of the two buffers of partials
  uint8_t *rings = shared + few_barrier_bytes(plan.num_warps, args.num_stages);
  uint8_t *codes = rings + plan.num_warps * args.num_stages * args.stage_bytes;
  uint8_t *scales = codes + num_blocks * kTokens * kActBlock;
  float4 *shared_factors = reinterpret_cast<float4 *>(scales + num_blocks * kTokens * 8 +
                                                      plan.warp * few_factor_bytes(kTokens));
  float *partials = reinterpret_cast<float *>(scales + num_blocks * kTokens * 8 +
                                              plan.num_warps * few_factor_bytes(kTokens));

  // The first weights, before the previous kernel is done. Every CTA of this grid is at work when
  // the next kernel's first ones come in beside it, to do the same.
  ChunkRing ring;
  ring.base = rings + plan.warp * args.num_stages * args.stage_bytes;
  ring.barriers = barriers + 4 + plan.warp * args.num_stages;
  ring.stage = 0;
  ring.num_stages = args.num_stages;
  ring.stage_bytes = args.stage_bytes;
  ring.stage_chunks = args.stage_chunks;
  ring.parity = 0;
  ring.ahead.group = static_cast<int>(blockIdx.x);
  ring.ahead.job = plan.warp;
  plan.seek(args, &ring.ahead);
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < args.num_stages; ++i) init_barrier(ring.barriers + i, stage_arrivals());
    publish_barriers();
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < args.num_stages; ++i) ring.fetch(args, plan, i, lane);
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      init_barrier(ready + i, plan.num_warps);
      init_barrier(free + i, args.num_tokens);
    }
  }
  // What the first group needs that no kernel writes, too.
  int iteration = 0, token = plan.warp, group = static_cast<int>(blockIdx.x);
  GroupOutputs before = output_place(args, group);
  let_next_kernel_start();
  wait_for_previous_kernel();
  stage_acts<kTokens>(args, num_blocks, codes, scales);  // a barrier of the whole CTA, too

  const int slice_floats = kTokens * few_token_stride(kTokens);
  for (; group < args.num_groups; group += static_cast<int>(gridDim.x), ++iteration) {
    const int buffer = iteration & 1;
    const uint32_t parity = static_cast<uint32_t>(iteration >> 1) & 1;
    float *sums = partials + buffer * (plan.num_jobs * slice_floats);
    if (token < args.num_tokens) load_residual(args, token, &before);
    if (iteration >= 2) wait_for_phase(free + buffer, parity ^ 1);
    for (int job = plan.warp; job < plan.num_jobs; job += plan.num_warps) {
      int s, tile;
      if (!find_tile(args, group, plan.tile_of(job), &s, &tile)) continue;
      float acc[FewLayout<kTokens>::kLaneChains][2][FewLayout<kTokens>::kLaneTokens] = {};
      const int slice = plan.slice_of(job);
      few_slice_of<kSet, kTokens>(args.segments[s].type, args, plan, &ring, plan.first_chunk(slice),
                                  plan.first_chunk(slice + 1), lane, codes, scales, shared_factors,
                                  acc);
      store_slice<kTokens>(acc, lane, sums + job * slice_floats);
    }
    __syncwarp();
    if (lane == 0) arrive(ready + buffer);
    // A warp per token finishes the group; another one next time.
    for (int of = token; of < args.num_tokens; of += plan.num_warps) {
      if (of == token) {
        wait_for_phase(ready + buffer, parity);
      } else {
        load_residual(args, of, &before);
      }
      finish_token(args, group, of, before, [&](int index, int row) {
        const float *p = sums + (index << plan.slice_shift) * slice_floats +
                         of * few_token_stride(kTokens) + row;
        float v[kMaxSlices];
#pragma unroll
        for (int i = 0; i < kMaxSlices; ++i)
          v[i] = i < args.num_slices ? p[i * slice_floats] : 0.0f;
        return sum_slices(v, args.num_slices);
      });
      __syncwarp();
      if (lane == 0) arrive(free + buffer);
    }
    token -= kTokens;
    while (token < 0) token += plan.num_warps;
    if (group + static_cast<int>(gridDim.x) < args.num_groups)
      before = output_place(args, group + static_cast<int>(gridDim.x));
  }
}

}  // namespace cuda
}  // namespace xllm
