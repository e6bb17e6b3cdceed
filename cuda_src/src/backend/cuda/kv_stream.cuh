// Keys and values of a warp on their way through shared memory.
//
// The keys of a split are taken in rounds of 256: 16 tiles of 16 keys. A warp needs of a round the
// keys of two tiles, whole, and then 64 channels of the values of some tiles, in two halves of the
// round. Those are its items, one after the other through 1, 2 or 4 slots of its own: what a slot
// held is replaced by the item kDepth further on. Nobody else reads a warp's slots, so no barrier
// of the CTA guards them.
//   keys    [16 keys][head_dim] f16, 16-byte piece c of row r at c ^ r % 8, so that eight rows of a
//           column of pieces are in different banks; rows of 80 and 96 channels have a piece more
//           instead
//   values  [kHalfParts][16 keys][64 channels] f16, likewise
#pragma once

#include "backend/cuda/attention_args.cuh"

namespace xllm {
namespace cuda {

constexpr int kAttentionWarps = 8;
constexpr int kRoundTiles = 2 * kAttentionWarps;
constexpr int kRoundKeys = kRoundTiles * kKeyTile;
constexpr int kHalfTiles = kRoundTiles / 2;
constexpr int kRoundItems = 4;

constexpr int kChannels = 64;  // of values, per warp

// Warps are groups of channels x parts of the tiles: part p takes tiles p, p + parts, ...
XLLM_HOST_DEVICE constexpr int channel_groups(int head_dim) {
  return head_dim <= 64 ? 1 : head_dim <= 128 ? 2 : 4;
}
XLLM_HOST_DEVICE constexpr int tile_parts(int head_dim) {
  return kAttentionWarps / channel_groups(head_dim);
}
// `groups`: of 8 query heads. At the end a warp's first slot holds its sums.
XLLM_HOST_DEVICE constexpr int slot_bytes(int head_dim, int groups) {
  const int keys = kKeyTile * (head_dim % 64 == 0 ? head_dim : head_dim + 8) * 2;
  const int values = kHalfTiles / tile_parts(head_dim) * kKeyTile * kChannels * 2;
  const int sums = groups * kChannels * 8 * 4;
  const int most = keys > values ? keys : values;
  return most > sums ? most : sums;
}

// note: where a warp is alone on its way every condition costs about as much as a product, so which
// item and which slot it is are known to the compiler.
template <int kHeadDim, int kGroups, int kDepth>
struct KvStream {
  static_assert(kRoundItems % kDepth == 0, "an item has the same slot in every round");
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr bool kIsSwizzled = kHeadDim % 64 == 0;
  static constexpr int kRowStride = kIsSwizzled ? kRowBytes : kRowBytes + 16;  // of keys in a slot
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kParts = tile_parts(kHeadDim);
  static constexpr int kHalfParts = kHalfTiles / kParts;  // tiles of values in an item
  static constexpr int kValueStride = kChannels * 2;      // of values in a slot
  static constexpr int kTileBytes = kKeyTile * kValueStride;
  static constexpr int kSlotBytes = slot_bytes(kHeadDim, kGroups);

  const AttentionArgs &args;
  int table_start;  // of the row
  uint8_t *slots;   // of this warp
  int kv_head, warp, lane;
  int end;                        // of the split
  int cached_end;                 // rows from here on are not in the cache
  const uint8_t *tile = nullptr;  // tile lane % 16 of the round asked for, its keys in the cache

  __device__ __forceinline__ explicit KvStream(const AttentionArgs &arguments) : args(arguments) {}

  __device__ __forceinline__ int part() const { return warp % kParts; }
  __device__ __forceinline__ int first_channel() const { return warp / kParts * kChannels; }
  // Of the round: tile i of item `half` of values.
  __device__ __forceinline__ int value_tile(int half, int i) const {
    return kHalfTiles * half + part() + kParts * i;
  }
  template <int kItem>
  __device__ __forceinline__ uint8_t *slot() const {
    return slots + kItem % kDepth * kSlotBytes;
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
          tile = args.kv.page(args.tables[table_start + (key >> args.kv.block_shift)], kv_head) +
                 row * kRowBytes;
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

  // What is past the end is zero: its weight is, and 0 * NaN is not.
  __device__ __forceinline__ void fetch_values(uint8_t *to, int round_key, int half) const {
    // Row 4k + r has its piece at piece ^ r ^ 4k % 8.
    const int r = lane / 8, piece = lane % 8;
    const int at = r * kValueStride + ((piece ^ r) << 4);
    const int64_t offset = args.kv.num_kv_heads * args.kv.page_bytes + r * kRowBytes +
                           first_channel() * 2 + piece * 16;
    const bool has_channel = kHeadDim % kChannels == 0 || first_channel() + piece * 8 < kHeadDim;
#pragma unroll
    for (int i = 0; i < kHalfParts; ++i, to += kTileBytes) {
      const int index = value_tile(half, i);
      const int num_rows = cached_end - round_key - kKeyTile * index;
      const uint8_t *from = tile_of(index) + offset;
      if (!has_channel) continue;
      if (num_rows >= kKeyTile) {
#pragma unroll
        for (int k = 0; k < kKeyTile; k += 4)
          copy_async_16(to + k * kValueStride + (at ^ (k & 4) << 4), from + k * kRowBytes);
      } else {
#pragma unroll 1
        for (int k = 0; k < kKeyTile; k += 4) {
          copy_async_16_or_zero(to + k * kValueStride + (at ^ (k & 4) << 4), from + k * kRowBytes,
                                k + r < num_rows);
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
  __device__ __forceinline__ void put_value(uint8_t *tile_values, int row,
                                            const __half *from) const {
    const int channel = first_channel() + 8 * lane;
    if (lane < 8 && channel < kHeadDim) {
      *reinterpret_cast<uint4 *>(tile_values + row * kValueStride + ((lane ^ (row & 7)) << 4)) =
          *reinterpret_cast<const uint4 *>(from + channel);
    }
    __syncwarp();
  }

  // A operand of keys x channels 16 * step..
  __device__ __forceinline__ void key_operand(const uint8_t *keys, int step,
                                              uint32_t (&a)[4]) const {
    const int at = key_offset(lane & 15, lane >> 4);
    load_matrices(a, keys + (kIsSwizzled ? at ^ step * 32 : at + step * 32));
  }
  // A operand of the warp's channels 16 * step.. x keys of a tile.
  __device__ __forceinline__ void value_operand(const uint8_t *tile_values, int step,
                                                uint32_t (&a)[4]) const {
    const int row = (lane & 7) + (lane >> 4) * 8, piece = (lane >> 3) & 1;
    const int at = row * kValueStride + ((piece ^ (row & 7)) << 4);
    load_matrices_transposed(a, tile_values + (at ^ step * 32));
  }

 private:
  __device__ __forceinline__ const uint8_t *tile_of(int index) const {
    return reinterpret_cast<const uint8_t *>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(tile), index));
  }
};

}  // namespace cuda
}  // namespace xllm
