// Attention of consecutive rows of one sequence as prompt_attention.cuh has it, 64 columns to a
// CTA, for heads of 64 and 128 in an f16 cache on sm_90a. Each row gets the bytes that
// attention.cuh gives it.
//
// The columns (rows x query heads of a kv head) are the rows of the products here. Of a round's 16
// tiles of keys warp group i has tiles i, i + 4, i + 8 and i + 12, scores and values alike, which
// are whole parts of attention.cuh's sums of values: so weights go from the scores' registers into
// the next product, a warp group's keys and values are its own, and a round has one barrier of the
// CTA, behind the largest scores. Products are wgmma's, which have the bits of mma.sync's (in tests
// on the host: mma_f16_k16's). Rows of several splits are added up by a kernel of its own: a CTA
// would be alone with its tile's.
//   shared  of each warp group three slots, for keys and values of a round in turn, and at the end
//           of a split for its sums; queries; WideState
#pragma once

#include "backend/cuda/attention.cuh"
#include "backend/cuda/prompt_tile.cuh"
#include "backend/cuda/wgmma_f16.cuh"

namespace xllm {
namespace cuda {

constexpr int kWarpGroups = 4;
constexpr int kWarpGroupThreads = 4 * kWarp;
constexpr int kWideThreads = kWarpGroups * kWarpGroupThreads;
constexpr int kGroupTiles = kRoundTiles / kWarpGroups;  // of a round, of a warp group
constexpr int kGroupKeys = kGroupTiles * kKeyTile;
constexpr int kBoxBytes = kGroupKeys * 128;    // 64 rows of 64 channels, as wgmma wants them
constexpr int kWideSlotBytes = 2 * kBoxBytes;  // 64 rows, or the sums of half of the channels
constexpr int kWideSlots = 3;
static_assert(kWideColumns == kGroupKeys, "queries lie as keys do");

// What a CTA has beside slots and queries, which take kWideBoxes bytes.
struct WideState {
  float largest[2][kWideColumns][kWarpGroups];  // scores of a round
  float total[2 * kWarpGroups][kWideColumns];   // sums of weights of a split, of each part
  float ones[2][kWideThreads][2];               // the same so far, of a thread's columns
  int32_t blocks[2][kWarpGroups][kGroupTiles];  // of the round after this, and the one after that
  int32_t ends[kWideColumns];                   // where the keys of a column's row end
  int32_t heads[kWideColumns];                  // (row of the launch) * heads + head, or -1
};
constexpr int kWideBoxes = kWarpGroups * kWideSlots * kWideSlotBytes + kWideSlotBytes;

XLLM_HOST_DEVICE constexpr int wide_shared_bytes() {
  return kWideBoxes + static_cast<int>(sizeof(WideState));
}

// threadIdx.x, asked for again each time: what depends on it is made anew where it is needed, and
// no register carries it through the products, which need them all. (Memory would: with a whole SM
// as shared memory, what does not fit into registers lies in L2.)
__device__ __forceinline__ int thread_index() {
#ifdef __CUDA_ARCH__
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
#else
  return static_cast<int>(threadIdx.x);
#endif
}
// Of the warp's 16 columns the first that this thread has; the other is 8 further on.
__device__ __forceinline__ int first_column_of(int thread) {
  return (thread >> 5 & 3) * 16 + (thread >> 2 & 7);
}

// Of a box: 16-byte piece `piece` of row `row`.
__device__ __forceinline__ int box_offset(int row, int piece) {
  return (piece >> 3) * kBoxBytes + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

// Where a thread's copies go: an address in shared memory that the compiler does not take apart, so
// that what is added to it goes into instructions.
#ifdef __CUDA_ARCH__
using SharedPlace = uint32_t;
__device__ __forceinline__ SharedPlace shared_place(void *p) {
  auto place = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("" : "+r"(place));
  return place;
}
#else
using SharedPlace = uint8_t *;
inline SharedPlace shared_place(void *p) { return static_cast<uint8_t *>(p); }
#endif
// As copy_async_16 and copy_async_16_or_zero.
__device__ __forceinline__ void copy_to_place(SharedPlace to, const void *from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
#elif !defined(__CUDA_ARCH__)
  copy_async_16(to, from);
#endif
}
__device__ __forceinline__ void copy_to_place_or_zero(SharedPlace to, const void *from,
                                                      bool has_source) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(has_source ? 16 : 0)
               : "memory");
#elif !defined(__CUDA_ARCH__)
  copy_async_16_or_zero(to, from, has_source);
#endif
}

// Scores of a warp group's tiles 2 * half and 2 * half + 1: even and odd steps of 16 channels by
// themselves, as attention.cuh has them. [tile][8 keys]: columns g, g, g + 8, g + 8 of the warp's
// 16 by keys 2t, 2t + 1.
template <int kHeadDim>
__device__ __forceinline__ void score_tiles(const uint8_t *queries, const uint8_t *keys, int half,
                                            float (&even)[4][4], float (&odd)[4][4]) {
  constexpr int kSteps = kHeadDim / 16;
#ifdef XLLM_HAS_WGMMA
  const uint64_t a = rows_descriptor(queries, 0);
  const uint64_t b = rows_descriptor(keys, 0) + half * (32 * 128 >> 4);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = (step / 4 * kBoxBytes + step % 4 * 32) >> 4;
    wgmma_rows(step % 2 == 0 ? even : odd, a + at, b + at, step >= 2);
  }
  wgmma_commit();
  wgmma_wait<0>();
#else
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int column = static_cast<int>(threadIdx.x >> 5) % 4 * 16 + (lane & 15);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) even[i][j] = odd[i][j] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[4];
    load_matrices(a, queries + box_offset(column, 2 * step + (lane >> 4)));
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t b[4];
      const int row = kKeyTile * (2 * half + tile) + (lane & 7) + (lane >> 4) * 8;
      load_matrices(b, keys + box_offset(row, 2 * step + (lane >> 3 & 1)));
      auto &to = step % 2 == 0 ? even : odd;
      mma_f16_k16(to[2 * tile], a, b[0], b[1]);
      mma_f16_k16(to[2 * tile + 1], a, b[2], b[3]);
    }
  }
#endif
}

// out = the weights of a tile times its values, or out += where is_more; 8 channels in each of out.
// Not done before wgmma_wait.
template <int kEighths>
__device__ __forceinline__ void add_tile(float (&out)[kEighths][4], const uint32_t (&weights)[4],
                                         const uint8_t *values, int tile, bool is_more) {
#ifdef XLLM_HAS_WGMMA
  const uint64_t b =
      rows_descriptor(values, kBoxBytes) + static_cast<unsigned>(tile * (kKeyTile * 128 >> 4));
  wgmma_fence();
  wgmma_columns(out, weights, b, is_more);
  wgmma_commit();
#else
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int i = 0; i < kEighths; i += 2) {
    uint32_t b[4];
    load_matrices_transposed(b,
                             values + box_offset(kKeyTile * tile + (lane & 15), i + (lane >> 4)));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!is_more) out[i + j][0] = out[i + j][1] = out[i + j][2] = out[i + j][3] = 0.0f;
      mma_f16_k16(out[i + j], weights, b[2 * j], b[2 * j + 1]);
    }
  }
#endif
}

// exp2_f32 of what is then rounded to f16, where 2^-125 is zero too: an instruction less.
__device__ __forceinline__ float weight_of(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, 0fC2FA0000;" : "=f"(y) : "f"(x));  // -125
  return exp2_in_range(y);
#else
  return exp2_f32(x);
#endif
}

// The parts of a split together, from the warp groups' registers to global memory. keys_at,
// values_at: slots of each warp group, where there is room for half of its sums each, once the
// warp group has come here. Syncs the CTA; the slots may be overwritten behind its next barrier.
template <int kHeadDim, int kGroupParts, int kEighths>
__device__ __forceinline__ void finish_split(const AttentionArgs &args,
                                             const float (&out)[kGroupParts][kEighths][4],
                                             const float (&m)[2], int keys_at, int values_at,
                                             int split, int shift, WideState *state) {
  constexpr int kParts = kGroupParts * kWarpGroups;
  extern __shared__ __align__(1024) uint8_t wide_shared[];
  const int thread = thread_index(), group = thread / kWarpGroupThreads, t = thread & 3;
  const int first_column = first_column_of(thread);
  if (t == 0) {
#pragma unroll
    for (int p = 0; p < kGroupParts; ++p) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        state->total[group + kWarpGroups * p][first_column + 8 * i] = state->ones[p][thread][i];
    }
  }
  constexpr int kFromGroup = kWideSlots * kWideSlotBytes;  // to the next one's slots
  uint8_t *const place =
      wide_shared + thread % kWarpGroupThreads * static_cast<int>(sizeof(float4));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    auto *const mine =
        reinterpret_cast<float4 *>(place + group * kFromGroup + (half == 0 ? values_at : keys_at));
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float *of = kGroupParts == 1 ? out[0][8 * half + n] : out[half % kGroupParts][n];
      mine[n * kWarpGroupThreads] = make_float4(of[0], of[1], of[2], of[3]);
    }
  }
  __syncthreads();
  // A warp group adds up a quarter of either half.
  float y[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int p = 0; p < kWarpGroups; ++p) {
      const auto *theirs = reinterpret_cast<const float4 *>(place + p * kFromGroup +
                                                            (half == 0 ? values_at : keys_at));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float4 v = theirs[(2 * group + n) * kWarpGroupThreads];
        const bool is_begin = p == 0 && (kGroupParts == 1 || half == 0);
        y[n][0] = is_begin ? v.x : __fadd_rn(y[n][0], v.x);
        y[n][1] = is_begin ? v.y : __fadd_rn(y[n][1], v.y);
        y[n][2] = is_begin ? v.z : __fadd_rn(y[n][2], v.z);
        y[n][3] = is_begin ? v.w : __fadd_rn(y[n][3], v.w);
      }
    }
    if (kGroupParts == 2 && half == 0) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = first_column + 8 * i, head = state->heads[column];
      const int context = state->ends[column];
      if (head < 0 || split << shift >= context) continue;
      float sum = state->total[0][column];
#pragma unroll
      for (int p = 1; p < kParts; ++p) sum = __fadd_rn(sum, state->total[p][column]);
      const int64_t entry = static_cast<int64_t>(head) * args.max_splits + split;
      float *to = args.partial_out + entry * kHeadDim, factor = 1.0f;
      if (context <= 1 << shift) {
        to = args.out + (static_cast<int64_t>(args.first_row) * args.num_heads + head) * kHeadDim;
        factor = inverse_of(sum);
      } else if (group == 0 && t == 0 && half == 1) {
        args.partial_stats[entry] = make_float2(m[i], sum);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int channel = 8 * ((kGroupParts == 1 ? 8 * half : 0) + 2 * group + n) + 2 * t;
        *reinterpret_cast<float2 *>(to + channel) =
            make_float2(__fmul_rn(y[n][2 * i], factor), __fmul_rn(y[n][2 * i + 1], factor));
      }
    }
  }
}

// Grid: x tiles args.first_tile + x, y kv heads, z args.splits_per_cta splits: CTAs that share keys
// run together. Keys and values of the rows are in the cache.
template <int kHeadDim>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_attention_kernel(const __grid_constant__ AttentionArgs args) {
#if !defined(__CUDA_ARCH__) || defined(XLLM_HAS_WGMMA)
  constexpr int kRowBytes = kHeadDim * 2;
  constexpr int kPieces = kRowBytes / 16;
  constexpr int kRowsAtOnce = kWarpGroupThreads / kPieces;
  constexpr int kGroupParts = tile_parts(kHeadDim) / kWarpGroups;  // parts of a warp group
  constexpr int kEighths = kHeadDim / 8;                           // of channels
  static_assert(kGroupParts * kEighths == 16, "64 sums a thread");
  extern __shared__ __align__(1024) uint8_t wide_shared[];
  let_next_kernel_start();

  // The batch was there before the step's first kernel.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpGroupThreads, 0);
  const PromptTile tile = unpack_tile(args.tiles[args.first_tile + static_cast<int>(blockIdx.x)]);
  const int position = args.positions[tile.first_row];
  // Of the last row, the longest; all rows have its shift.
  const int contexts = position + tile.num_rows;
  const int shift = split_shift(contexts);
  const int begin = static_cast<int>(blockIdx.z) * args.splits_per_cta << shift;
  const int end = min(begin + (args.splits_per_cta << shift), contexts);
  if (begin >= end) {
    wait_for_previous_kernel();
    return;
  }

  uint8_t *const slots = wide_shared + group * (kWideSlots * kWideSlotBytes);
  uint8_t *const queries = wide_shared + kWarpGroups * kWideSlots * kWideSlotBytes;
  auto *const state = reinterpret_cast<WideState *>(wide_shared + kWideBoxes);
  const auto parity = [](int round) { return round / kRoundKeys & 1; };
  // Of the warp group's tile i in a round: its block's entry in the table; past the end any.
  const auto table_of = [&](int round, int i) {
    const int key = round + kKeyTile * (group + kWarpGroups * i);
    return args.tables + args.row_tables[tile.first_row] +
           (min(key, end - 1) >> args.kv.block_shift);
  };
  // Asks for keys, then values of a round, or for one of them: two groups of copies. With the keys
  // come the blocks of the round after it. What is past the end is zero.
  const auto ask = [&](int round, uint8_t *keys, uint8_t *values) {
    if (round < end) {
      const int thread = thread_index() % kWarpGroupThreads;
      const int row = thread / kPieces, piece = thread % kPieces;
      // note: offsets of copies reach from -2048 to 2047, so `from` is in the middle of a tile.
      constexpr int kMiddle = kKeyTile / 2 * kRowBytes / 2;
      const uint8_t *from[kGroupTiles];
#pragma unroll
      for (int i = 0; i < kGroupTiles; ++i) {
        const auto block = static_cast<uint32_t>(state->blocks[parity(round)][group][i]);
        const int in_block =
            (round + kKeyTile * (group + kWarpGroups * i)) & (args.kv.block_size - 1);
        from[i] = args.kv.page(0, static_cast<int>(blockIdx.y)) + block * args.kv.block_bytes +
                  (in_block * kRowBytes + row * kRowBytes + piece * 16 + kMiddle);
      }
      const bool is_whole = round + kRoundKeys <= end;
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
        uint8_t *const slot = kind == 0 ? keys : values;
        const SharedPlace to = shared_place(slot + box_offset(row, piece));
        if (slot == nullptr) {
          // not asked for
        } else if (is_whole) {
#pragma unroll
          for (int k = 0; k < kGroupKeys; k += kRowsAtOnce)
            copy_to_place(to + k * 128, from[k / kKeyTile] + (k % kKeyTile * kRowBytes - kMiddle));
        } else {
#pragma unroll
          for (int k = 0; k < kGroupKeys; k += kRowsAtOnce) {
            const int key =
                round + kKeyTile * (group + kWarpGroups * (k / kKeyTile)) + k % kKeyTile + row;
            copy_to_place_or_zero(
                to + k * 128, from[k / kKeyTile] + (k % kKeyTile * kRowBytes - kMiddle), key < end);
          }
        }
        if (kind == 0) {
          if (keys != nullptr && thread < kGroupTiles) {
            const int next = round + kRoundKeys;
            copy_async_4_or_zero(&state->blocks[parity(next)][group][thread],
                                 table_of(next, thread), true);
          }
          commit_copies();
        }
#pragma unroll
        for (int i = 0; i < kGroupTiles; ++i) from[i] += args.kv.num_kv_heads * args.kv.page_bytes;
      }
    } else {
      commit_copies();
    }
    commit_copies();
  };
  const auto sync_group = [&] { sync_some(1 + group, kWarpGroupThreads); };

  const int num_columns = tile.num_rows * args.group_size;
  const int first_head = static_cast<int>(blockIdx.y) * args.group_size;
  if (threadIdx.x % kWarpGroupThreads < kGroupTiles) {
    const int i = static_cast<int>(threadIdx.x) % kWarpGroupThreads;
    state->blocks[parity(begin)][group][i] = *table_of(begin, i);
  }
  if (threadIdx.x < kWideColumns) {
    const int column = static_cast<int>(threadIdx.x), row = column / args.group_size;
    state->ends[column] = position + 1 + min(row, tile.num_rows - 1);
    state->heads[column] = column < num_columns
                               ? (tile.first_row - args.first_row + row) * args.num_heads +
                                     first_head + column - row * args.group_size
                               : -1;
  }
  wait_for_previous_kernel();
  __syncthreads();
  ask(begin, slots, slots + kWideSlotBytes);
  for (int i = static_cast<int>(threadIdx.x); i < num_columns * kPieces; i += kWideThreads) {
    const int column = i / kPieces, piece = i % kPieces;
    const int64_t head =
        static_cast<int64_t>(args.first_row) * args.num_heads + state->heads[column];
    *reinterpret_cast<uint4 *>(queries + box_offset(column, piece)) =
        *reinterpret_cast<const uint4 *>(args.q + head * kHeadDim + piece * 8);
  }
  publish_to_wgmma();
  __syncthreads();

  // note: rows of `queries` without a head hold anything; they are columns of their own, unused.
  float m[2], out[kGroupParts][kEighths][4];
  int slot = 0;  // of the round's keys
#pragma unroll 1
  for (int round = begin; round < end; round += kRoundKeys) {
    uint8_t *const keys = slots + slot * kWideSlotBytes;
    uint8_t *const values = slots + (slot == 2 ? 0 : slot + 1) * kWideSlotBytes;
    const bool is_first = (round & ((1 << shift) - 1)) == 0;  // of its split
    wait_for_copies<1>();
    publish_to_wgmma();
    if (is_first && round != begin) {  // the split before has left its sums where values go
      __syncthreads();
      ask(round, nullptr, values);
    } else {
      sync_group();
    }
    float x[kGroupTiles][2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even[4][4], odd[4][4];
      score_tiles<kHeadDim>(queries, keys, half, even, odd);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[2 * half + n / 2][n % 2][j] = __fmul_rn(__fadd_rn(even[n][j], odd[n][j]), args.scale);
        }
      }
    }
    if (round + kRoundKeys > position + 1) {  // else all rows attend to all keys
      const int thread = thread_index();
      const int first = round + kKeyTile * group + 2 * (thread & 3);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int past = state->ends[first_column_of(thread) + 8 * i] - first;
#pragma unroll
        for (int k = 0; k < kGroupTiles; ++k) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              if (kKeyTile * kWarpGroups * k + 8 * n + j >= past)
                x[k][n][2 * i + j] = negative_infinity();
            }
          }
        }
      }
    }
    const int thread = thread_index();
    float (*const largest)[kWarpGroups] = state->largest[parity(round)] + first_column_of(thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = negative_infinity();
#pragma unroll
      for (int k = 0; k < kGroupTiles; ++k) {
#pragma unroll
        for (int n = 0; n < 2; ++n) most = fmaxf(most, fmaxf(x[k][n][2 * i], x[k][n][2 * i + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      if ((thread & 3) == 0) largest[8 * i][group] = most;
    }
    // Behind the barrier the round's values are there, and nobody needs its keys and the values of
    // the round before.
    wait_for_copies<0>();
    publish_to_wgmma();
    __syncthreads();
    const int next = round + kRoundKeys;
    const bool is_last = next >= end || (next & ((1 << shift) - 1)) == 0;  // of its split
    ask(next, slots + (slot == 0 ? 2 : slot - 1) * kWideSlotBytes, is_last ? nullptr : keys);
    float base[2], ones[kGroupParts][4];
#pragma unroll
    for (int p = 0; p < kGroupParts; ++p) {
      const float2 kept = *reinterpret_cast<const float2 *>(state->ones[p][thread]);
      ones[p][0] = is_first ? 0.0f : kept.x;
      ones[p][2] = is_first ? 0.0f : kept.y;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 v = *reinterpret_cast<const float4 *>(largest[8 * i]);
      const float before = is_first ? negative_infinity() : m[i];
      m[i] = fmaxf(before, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
      base[i] = m[i] == negative_infinity() ? 0.0f : m[i];
      if (is_first) continue;
      const float shrink = exp2_f32(__fsub_rn(before, base[i]));
      if (shrink == 1.0f) continue;  // would change nothing
#pragma unroll
      for (int p = 0; p < kGroupParts; ++p) {
        ones[p][2 * i] = __fmul_rn(ones[p][2 * i], shrink);
#pragma unroll
        for (int n = 0; n < kEighths; ++n) {
          out[p][n][2 * i] = __fmul_rn(out[p][n][2 * i], shrink);
          out[p][n][2 * i + 1] = __fmul_rn(out[p][n][2 * i + 1], shrink);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kGroupParts; ++p) {
      ones[p][1] = ones[p][0];
      ones[p][3] = ones[p][2];
    }
#pragma unroll
    for (int k = 0; k < kGroupTiles; ++k) {
      uint32_t weights[4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          weights[2 * n + i] = half_pair(weight_of(__fsub_rn(x[k][n][2 * i], base[i])),
                                         weight_of(__fsub_rn(x[k][n][2 * i + 1], base[i])));
        }
      }
      mma_f16_k16(ones[k % kGroupParts], weights, 0x3c003c00u, 0x3c003c00u);
      add_tile(out[k % kGroupParts], weights, values, k, k >= kGroupParts || !is_first);
    }
#pragma unroll
    for (int p = 0; p < kGroupParts; ++p) {
      *reinterpret_cast<float2 *>(state->ones[p][thread]) = make_float2(ones[p][0], ones[p][2]);
    }
    wgmma_wait<0>();
    if (is_last) {
      sync_group();
      finish_split<kHeadDim>(args, out, m, static_cast<int>(keys - slots),
                             static_cast<int>(values - slots), round >> shift, shift, state);
    }
    slot = slot == 0 ? 2 : slot - 1;
  }
#endif
}

constexpr int kMergeThreads = 128;

// Adds up the splits of rows that have several, as merge_splits does. Grid: x rows of the launch,
// y kv heads. Shared: weights [group_size][kMaxSplits].
__global__ void __launch_bounds__(kMergeThreads)
    merge_rows_kernel(const __grid_constant__ AttentionArgs args) {
  extern __shared__ __align__(16) float merge_weights[];
  let_next_kernel_start();
  const int local_row = static_cast<int>(blockIdx.x);
  const int count = num_splits(args.positions[args.first_row + local_row] + 1);
  wait_for_previous_kernel();
  if (count == 1) return;
  const int64_t first = static_cast<int64_t>(local_row) * args.num_heads +
                        static_cast<int>(blockIdx.y) * args.group_size;
  for (int head = static_cast<int>(threadIdx.x) >> 5; head < args.group_size;
       head += kMergeThreads / kWarp) {
    weigh_splits(args, (first + head) * args.max_splits, count, merge_weights + head * kMaxSplits);
  }
  __syncthreads();
  const int quads = args.head_dim / 4;
  float *out =
      args.out + (static_cast<int64_t>(args.first_row) * args.num_heads + first) * args.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < args.group_size * quads; i += kMergeThreads) {
    const int head = i / quads, channel = i % quads * 4;
    const float *from =
        args.partial_out + (first + head) * args.max_splits * args.head_dim + channel;
    const float *weight = merge_weights + head * kMaxSplits;
    float acc[4] = {};
#pragma unroll 16
    for (int s = 0; s < count; ++s) {
      const float4 v = __ldcg(reinterpret_cast<const float4 *>(from + s * args.head_dim));
      acc[0] = __fmaf_rn(weight[s], v.x, acc[0]);
      acc[1] = __fmaf_rn(weight[s], v.y, acc[1]);
      acc[2] = __fmaf_rn(weight[s], v.z, acc[2]);
      acc[3] = __fmaf_rn(weight[s], v.w, acc[3]);
    }
    *reinterpret_cast<float4 *>(out + head * args.head_dim + channel) =
        make_float4(acc[0], acc[1], acc[2], acc[3]);
  }
}

}  // namespace cuda
}  // namespace xllm
