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
// Where the cache holds 8 or 4 bits, a slot has the codes of as many rows, then their scales, and
// what is to be multiplied is made of them in one of two places behind the slots.
#pragma once

#include "backend/cuda/attention_args.cuh"
#include "backend/cuda/kv_codes.cuh"

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
// Of a slot with codes and their scales, without sums.
XLLM_HOST_DEVICE constexpr int code_slot_bytes(int head_dim, int bits) {
  const int keys = kKeyTile * (head_dim * bits / 8 + head_dim / kKvGroupChannels * 2);
  const int values = kHalfTiles / tile_parts(head_dim) * kKeyTile *
                     (kChannels * bits / 8 + kChannels / kKvGroupChannels * 2);
  return keys > values ? keys : values;
}
// Of all that a warp has.
XLLM_HOST_DEVICE constexpr int stream_bytes(int head_dim, int groups, int depth, int bits) {
  return bits == 16 ? depth * slot_bytes(head_dim, groups)
                    : 2 * slot_bytes(head_dim, groups) + depth * code_slot_bytes(head_dim, bits);
}

// note: where a warp is alone on its way every condition costs about as much as a product, so which
// item and which slot it is are known to the compiler.
template <int kHeadDim, int kGroups, int kDepth, int kBits = 16>
struct KvStream {
  static_assert(kBits == 16 || kHeadDim % kChannels == 0, "scales come in pairs");
  static_assert(kRoundItems % kDepth == 0, "an item has the same slot in every round");
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr bool kIsSwizzled = kHeadDim % 64 == 0;
  static constexpr int kRowStride = kIsSwizzled ? kRowBytes : kRowBytes + 16;  // of keys in a slot
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kParts = tile_parts(kHeadDim);
  static constexpr int kHalfParts = kHalfTiles / kParts;  // tiles of values in an item
  static constexpr int kValueStride = kChannels * 2;      // of values in a slot
  static constexpr int kTileBytes = kKeyTile * kValueStride;
  static constexpr int kHalfSlotBytes = slot_bytes(kHeadDim, kGroups);
  static constexpr int kSlotBytes = kBits == 16 ? kHalfSlotBytes : code_slot_bytes(kHeadDim, kBits);
  static constexpr int kCacheRowBytes = kHeadDim * kBits / 8;
  static constexpr int kScaleRowBytes = kHeadDim / kKvGroupChannels * 2;

  const AttentionArgs &args;
  int table_start;  // of the row
  uint8_t *slots;   // of this warp; where there are codes, the two places come first
  int kv_head, warp, lane;
  int end;                        // of the split
  int cached_end;                 // rows from here on are not in the cache
  const uint8_t *tile = nullptr;  // tile lane % 16 of the round asked for, its keys in the cache
  int64_t scales = 0;             // from there to the tile's scales, where there are codes

  __device__ __forceinline__ explicit KvStream(const AttentionArgs &arguments) : args(arguments) {}

  __device__ __forceinline__ int part() const { return warp % kParts; }
  __device__ __forceinline__ int first_channel() const { return warp / kParts * kChannels; }
  // Of the round: tile i of item `half` of values.
  __device__ __forceinline__ int value_tile(int half, int i) const {
    return kHalfTiles * half + part() + kParts * i;
  }
  template <int kItem>
  __device__ __forceinline__ uint8_t *slot() const {
    return slots + (kBits == 16 ? 0 : 2 * kHalfSlotBytes) + kItem % kDepth * kSlotBytes;
  }
  // Item kItem of keys or values, which has been waited for, as f16; of codes, it is there until
  // the next but one is asked for.
  template <int kItem>
  __device__ __forceinline__ uint8_t *keys() const {
    if constexpr (kBits == 16) {
      return slot<kItem>();
    } else {
      expand_keys(slot<kItem>(), place<kItem>());
      return place<kItem>();
    }
  }
  template <int kItem>
  __device__ __forceinline__ uint8_t *values() const {
    if constexpr (kBits == 16) {
      return slot<kItem>();
    } else {
      expand_values(slot<kItem>(), place<kItem>());
      return place<kItem>();
    }
  }

  // Where item kItem of keys or values lies as f16.
  template <int kItem>
  __device__ __forceinline__ uint8_t *place() const {
    return kBits == 16 ? slot<kItem>() : slots + kItem % 2 * kHalfSlotBytes;
  }

  // Finds the tiles of the round that begins at round_key, before its end.
  __device__ __forceinline__ void seek(int round_key) {
    const int key = round_key + kKeyTile * (lane % kRoundTiles);
    tile = args.kv.base;
    if (key < end) {
      const int row = key & (args.kv.block_size - 1);
      tile = args.kv.page(args.tables[table_start + (key >> args.kv.block_shift)], kv_head) +
             row * kCacheRowBytes;
      scales = args.kv.scales_offset - row * (kCacheRowBytes - kScaleRowBytes);
    }
  }
  // Asks for item kItem of the round that was sought.
  template <int kItem>
  __device__ __forceinline__ void ask(int round_key) {
    if (kItem < 2) {
      fetch_keys(slot<kItem>(), round_key, kAttentionWarps * kItem + warp);
    } else {
      fetch_values(slot<kItem>(), round_key, kItem - 2);
    }
  }
  // Asks for item kItem, counted on into the next round, of the round that begins at round_key; one
  // group of copies, empty where there is nothing.
  template <int kItem>
  __device__ __forceinline__ void fetch(int round_key) {
    constexpr int kOf = kItem % kRoundItems;
    if (kItem >= kRoundItems) round_key += kRoundKeys;
    if (round_key < end) {
      if (kOf == 0) seek(round_key);
      ask<kOf>(round_key);
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
    if constexpr (kBits != 16) {
      fetch_key_codes(to, from, scales_of(index), num_rows);
    } else if constexpr (kIsSwizzled) {
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
    if constexpr (kBits != 16) {
      fetch_value_codes(to, round_key, half);
    } else {
      fetch_half_values(to, round_key, half);
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
  __device__ __forceinline__ void fetch_half_values(uint8_t *to, int round_key, int half) const {
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

  // ---- codes ----

  // Keys: codes [16][kCacheRowBytes], scales [16][kScaleRowBytes]. Past the end: whatever is there.
  __device__ __forceinline__ void fetch_key_codes(uint8_t *to, const uint8_t *from,
                                                  int64_t to_scales, int num_rows) const {
    const int rows = min(num_rows, kKeyTile);
    for (int i = lane; i < rows * (kCacheRowBytes / 16); i += kWarp)
      copy_async_16(to + 16 * i, from + 16 * i);
    for (int i = lane; i < rows * (kScaleRowBytes / 4); i += kWarp)
      copy_async_4_or_zero(to + kKeyTile * kCacheRowBytes + 4 * i, from + to_scales + 4 * i, true);
  }
  // Values, of each tile: codes [16][64 channels], scales [16][2]; past the end scales of zero.
  static constexpr int kValueRowBytes = kChannels * kBits / 8;
  static constexpr int kCodeTileBytes = kKeyTile * (kValueRowBytes + 4);
  __device__ __forceinline__ void fetch_value_codes(uint8_t *to, int round_key, int half) const {
    constexpr int kPiecesOfRow = kValueRowBytes / 16;
    const int64_t values = args.kv.num_kv_heads * args.kv.page_bytes;
#pragma unroll
    for (int i = 0; i < kHalfParts; ++i, to += kCodeTileBytes) {
      const int index = value_tile(half, i);
      const int num_rows = cached_end - round_key - kKeyTile * index;
      const uint8_t *from = tile_of(index) + values;
      const uint8_t *scale = from + scales_of(index) + first_channel() / kKvGroupChannels * 2;
#pragma unroll
      for (int k = 0; k < kKeyTile * kPiecesOfRow; k += kWarp) {
        const int r = (k + lane) / kPiecesOfRow, piece = lane % kPiecesOfRow;
        if (r < min(num_rows, kKeyTile))
          copy_async_16(to + 16 * (k + lane),
                        from + r * kCacheRowBytes + first_channel() * kBits / 8 + 16 * piece);
      }
      if (lane < kKeyTile)
        copy_async_4_or_zero(to + kKeyTile * kValueRowBytes + 4 * lane,
                             scale + lane * kScaleRowBytes, lane < num_rows);
    }
  }

  __device__ __forceinline__ static __half scale_at(const uint8_t *scales, int index) {
    return reinterpret_cast<const __half *>(scales)[index];
  }
  __device__ __forceinline__ void expand_keys(const uint8_t *codes, uint8_t *to) const {
    const uint8_t *scales_at = codes + kKeyTile * kCacheRowBytes;
#pragma unroll
    for (int i = 0; i < kKeyTile * kPieces; i += kWarp) {
      const int r = (i + lane) / kPieces, piece = (i + lane) % kPieces;
      *reinterpret_cast<uint4 *>(to + key_offset(r, piece)) = expand_codes<kBits>(
          codes + r * kCacheRowBytes + piece * kBits, scale_at(scales_at, (i + lane) / 4));
    }
    __syncwarp();
  }
  __device__ __forceinline__ void expand_values(const uint8_t *codes, uint8_t *to) const {
#pragma unroll
    for (int tile_index = 0; tile_index < kHalfParts; ++tile_index) {
      const uint8_t *scales_at = codes + kKeyTile * kValueRowBytes;
#pragma unroll
      for (int i = 0; i < kKeyTile * 8; i += kWarp) {
        const int r = (i + lane) / 8, piece = lane % 8;
        *reinterpret_cast<uint4 *>(to + r * kValueStride + ((piece ^ (r & 7)) << 4)) =
            expand_codes<kBits>(codes + r * kValueRowBytes + piece * kBits,
                                scale_at(scales_at, (i + lane) / 4));
      }
      codes += kCodeTileBytes;
      to += kTileBytes;
    }
    __syncwarp();
  }

  __device__ __forceinline__ int64_t scales_of(int index) const {
    return __shfl_sync(0xffffffffu, scales, index);
  }
  __device__ __forceinline__ const uint8_t *tile_of(int index) const {
    return reinterpret_cast<const uint8_t *>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(tile), index));
  }
};

}  // namespace cuda
}  // namespace xllm
