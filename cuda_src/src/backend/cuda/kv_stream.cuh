// Keys and values of a warp on their way through shared memory.
//
// The keys of a split are taken in rounds of 256: 16 tiles of 16 keys. A warp needs of a round the
// keys of two tiles, whole, and then its own channels of all values, in two halves of 8 tiles.
// Those are its items, one after the other through 1, 2 or 4 slots of its own: what a slot held is
// replaced by the item kDepth further on. Nobody else reads a warp's slots, so no barrier of the
// CTA guards them.
//   keys    [16 keys][head_dim] f16, 16-byte piece c of row r at c ^ r % 8, so that eight rows of a
//           column of pieces are in different banks; rows of 80 and 96 channels have a piece more
//           instead
//   values  [8 tiles][16 keys][16 channels] f16, kSlices times; the two pieces of keys with k & 4
//           change places for the same reason
#pragma once

#include "backend/cuda/attention_args.cuh"

namespace xllm {
namespace cuda {

constexpr int kAttentionWarps = 8;
constexpr int kRoundTiles = 2 * kAttentionWarps;
constexpr int kRoundKeys = kRoundTiles * kKeyTile;
constexpr int kHalfTiles = kRoundTiles / 2;
constexpr int kRoundItems = 4;

// Of 16 channels, per warp.
XLLM_HOST_DEVICE constexpr int value_slices(int head_dim) {
  return (head_dim / 16 + kAttentionWarps - 1) / kAttentionWarps;
}
XLLM_HOST_DEVICE constexpr int slot_bytes(int head_dim) {
  const int keys = kKeyTile * (head_dim % 64 == 0 ? head_dim : head_dim + 8) * 2;
  const int values = kHalfTiles * kKeyTile * 32 * value_slices(head_dim);
  return keys > values ? keys : values;
}

// note: where a warp is alone on its way every condition costs about as much as a product, so which
// item and which slot it is are known to the compiler.
template <int kHeadDim, int kDepth>
struct KvStream {
  static_assert(kRoundItems % kDepth == 0, "an item has the same slot in every round");
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr bool kIsSwizzled = kHeadDim % 64 == 0;
  static constexpr int kRowStride = kIsSwizzled ? kRowBytes : kRowBytes + 16;  // of keys in a slot
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kSlices = value_slices(kHeadDim);
  static constexpr int kSliceTiles = kHeadDim / 16;
  static constexpr int kTileBytes = kKeyTile * 32;  // of values in a slot
  static constexpr int kSliceBytes = kHalfTiles * kTileBytes;

  const AttentionArgs &args;
  const int32_t *table;
  uint8_t *slots;  // of this warp
  int kv_head, warp, lane;
  int end;                        // of the split
  int cached_end;                 // rows from here on are not in the cache
  const uint8_t *tile = nullptr;  // tile lane % 16 of the round asked for, its keys in the cache

  __device__ __forceinline__ explicit KvStream(const AttentionArgs &arguments) : args(arguments) {}

  __device__ __forceinline__ int slice(int i) const { return warp + kAttentionWarps * i; }
  template <int kItem>
  __device__ __forceinline__ uint8_t *slot() const {
    return slots + kItem % kDepth * slot_bytes(kHeadDim);
  }

  // Asks for item kItem, counted on into the next round, of the round that begins at round_key; one
  // group of copies, empty where there is nothing.
  template <int kItem>
  __device__ __forceinline__ void fetch(int round_key) {
    constexpr int kOf = kItem % kRoundItems;
    if (kItem >= kRoundItems) round_key += kRoundKeys;
    if (round_key < end) {
      if (kOf == 0) {
        const int key = round_key + kKeyTile * (lane % kRoundTiles);
        tile = args.kv.base;
        if (key < end) {
          const int row = key & (args.kv.block_size - 1);
          tile = args.kv.page(table[key >> args.kv.block_shift], kv_head) + row * kRowBytes;
        }
      }
      if (kOf < 2) {
        fetch_keys(slot<kOf>(), round_key, kAttentionWarps * kOf + warp);
      } else {
        fetch_values(slot<kOf>(), round_key, kOf - 2);
      }
    }
    commit_copies();
  }

  // Waits for the oldest item that was asked for.
  __device__ __forceinline__ void wait() const {
    wait_for_copies<kDepth - 1>();
    __syncwarp();
  }

  // Of a piece of a row of keys in a slot.
  static __device__ __forceinline__ int key_offset(int row, int piece) {
    return row * kRowStride + (kIsSwizzled ? piece ^ (row & 7) : piece) * 16;
  }

  __device__ __forceinline__ void fetch_keys(uint8_t *to, int round_key, int index) const {
    const int num_rows = cached_end - round_key - kKeyTile * index;
    const uint8_t *from = tile_of(index);
    if constexpr (kIsSwizzled) {
      constexpr int kRowsAtOnce = kWarp / kPieces;
      // Row r + k has its piece at piece ^ r ^ k % 8: k is a multiple of what r is below.
      const int r = lane / kPieces, piece = lane % kPieces;
      const int at = key_offset(r, piece);
      from += r * kRowBytes + piece * 16;
      if (num_rows >= kKeyTile) {
#pragma unroll
        for (int k = 0; k < kKeyTile; k += kRowsAtOnce)
          copy_async_16(to + k * kRowStride + (at ^ (k & 7) << 4), from + k * kRowBytes);
      } else {
#pragma unroll 1
        for (int k = 0; k + r < num_rows; k += kRowsAtOnce)
          copy_async_16(to + k * kRowStride + (at ^ (k & 7) << 4), from + k * kRowBytes);
      }
    } else {
#pragma unroll 1
      for (int k = lane; k < min(num_rows, kKeyTile) * kPieces; k += kWarp) {
        const int r = k / kPieces, piece = k % kPieces;
        copy_async_16(to + key_offset(r, piece), from + r * kRowBytes + piece * 16);
      }
    }
  }

  // By lane l of tile l / 4 of the half: keys 2k + l / 2 % 2, piece l % 2. What is past the end is
  // zero: its weight is, and 0 * NaN is not.
  __device__ __forceinline__ void fetch_values(uint8_t *to, int round_key, int half) const {
    const int first = (lane >> 1) & 1, piece = lane & 1;
    const int num_rows = cached_end - round_key - kKeyTile * kHalfTiles * half;
    const int rows_here = num_rows - kKeyTile * (lane / 4) - first;
    const uint8_t *from = tile_of(kHalfTiles * half + lane / 4) +
                          args.kv.num_kv_heads * args.kv.page_bytes + first * kRowBytes +
                          slice(0) * 32 + piece * 16;
    to += lane / 4 * kTileBytes + first * 32;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      if (slice(s) >= kSliceTiles) return;
      uint8_t *at[2] = {to + s * kSliceBytes + piece * 16, to + s * kSliceBytes + (piece ^ 1) * 16};
      const uint8_t *slice_from = from + s * kAttentionWarps * 32;
      if (num_rows >= kKeyTile * kHalfTiles) {
#pragma unroll
        for (int k = 0; k < kKeyTile; k += 2)
          copy_async_16(at[(k >> 2) & 1] + k * 32, slice_from + k * kRowBytes);
      } else {
#pragma unroll 1
        for (int k = 0; k < kKeyTile; k += 2) {
          copy_async_16_or_zero(((k & 4) != 0 ? at[1] : at[0]) + k * 32, slice_from + k * kRowBytes,
                                k < rows_here);
        }
      }
    }
  }

  // Row `row` of a tile of keys = the f16 row at `from` in shared memory; and of values.
  __device__ __forceinline__ void put_key(uint8_t *keys, int row, const __half *from) const {
    for (int piece = lane; piece < kPieces; piece += kWarp) {
      *reinterpret_cast<uint4 *>(keys + key_offset(row, piece)) =
          *reinterpret_cast<const uint4 *>(from + piece * 8);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void put_value(uint8_t *values, int row, const __half *from) const {
    const int s = lane >> 1, piece = lane & 1;
    if (s < kSlices && slice(s) < kSliceTiles) {
      *reinterpret_cast<uint4 *>(values + s * kSliceBytes + row * 32 +
                                 (piece ^ ((row >> 2) & 1)) * 16) =
          *reinterpret_cast<const uint4 *>(from + slice(s) * 16 + piece * 8);
    }
    __syncwarp();
  }

  // A operand of keys x channels 16 * step..
  __device__ __forceinline__ void key_operand(const uint8_t *keys, int step,
                                              uint32_t (&a)[4]) const {
    const int at = key_offset(lane & 15, lane >> 4);
    load_matrices(a, keys + (kIsSwizzled ? at ^ step * 32 : at + step * 32));
  }
  // A operand of the channels of slice s x keys of tile `index` of the half.
  __device__ __forceinline__ void value_operand(const uint8_t *values, int s, int index,
                                                uint32_t (&a)[4]) const {
    const int row = (lane & 7) + (lane >> 4) * 8, piece = (lane >> 3) & 1;
    load_matrices_transposed(a, values + s * kSliceBytes + index * kTileBytes + row * 32 +
                                    (piece ^ ((row >> 2) & 1)) * 16);
  }

 private:
  __device__ __forceinline__ const uint8_t *tile_of(int index) const {
    return reinterpret_cast<const uint8_t *>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(tile), index));
  }
};

}  // namespace cuda
}  // namespace xllm
