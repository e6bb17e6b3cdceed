// Keys and values of a warp on their way through shared memory: a ring of tiles of 16 positions.
//
// A tile is [16 keys][head_dim] f16, then the values likewise; 16-byte piece c of row r lies at c ^
// (r % 8), so that eight rows of a column of pieces are in different banks. Keys and values are
// groups of copies of their own: the values of a tile are still coming in while its keys are used.
#pragma once

#include "backend/cuda/attention_args.cuh"

namespace xllm {
namespace cuda {

constexpr int kMaxKeyStages = 2;

XLLM_HOST_DEVICE constexpr int key_stage_bytes(int head_dim) { return 2 * kKeyTile * head_dim * 2; }

template <int kHeadDim>
struct KeyRing {
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kRowsAtOnce = kWarp / kPieces;  // by one copy of the whole warp
  static constexpr int kTileBytes = kKeyTile * kRowBytes;

  uint8_t *base;  // of this warp's first stage
  int num_stages, lane;

  __device__ __forceinline__ uint8_t *keys(int stage) const {
    return base + stage * (2 * kTileBytes);
  }
  __device__ __forceinline__ uint8_t *values(int stage) const { return keys(stage) + kTileBytes; }

  // Asks for rows 0.. of `from` below num_rows (<= 0: none) and zeros for the rest; one group.
  __device__ __forceinline__ void fetch(uint8_t *to, const uint8_t *from, int num_rows) const {
    // Row `row + i` has its piece at piece ^ row ^ i % 8: i is a multiple of what row is below.
    const int row = lane / kPieces, piece = lane % kPieces;
    const int at = row * kRowBytes + ((piece ^ row) << 4);
    const uint8_t *mine = from + row * kRowBytes + piece * 16;
    if (num_rows >= kKeyTile) {
#pragma unroll
      for (int i = 0; i < kKeyTile; i += kRowsAtOnce)
        copy_async_16(to + (at ^ ((i & 7) << 4)) + i * kRowBytes, mine + i * kRowBytes);
      return;
    }
#pragma unroll
    for (int i = 0; i < kKeyTile; i += kRowsAtOnce) {
      const bool is_there = row + i < num_rows;
      copy_async_16_or_zero(to + (at ^ ((i & 7) << 4)) + i * kRowBytes,
                            is_there ? mine + i * kRowBytes : from, is_there);
    }
  }

  // Waits for the oldest group; what comes after it may still be on its way.
  __device__ __forceinline__ void wait_for_oldest() const {
    if (num_stages == 1) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<3>();
    }
    __syncwarp();
  }

  // Row `row` of a tile = the f16 row at `from` in shared memory.
  __device__ __forceinline__ void put_row(uint8_t *tile, int row, const __half *from) const {
    if (lane < kPieces) {
      *reinterpret_cast<uint4 *>(tile + row * kRowBytes + ((lane ^ (row & 7)) << 4)) =
          *reinterpret_cast<const uint4 *>(from + lane * 8);
    }
    __syncwarp();
  }

  // A operand of keys x channels 16 * step..
  __device__ __forceinline__ void key_operand(const uint8_t *tile, int step,
                                              uint32_t (&a)[4]) const {
    const int row = lane & 15, piece = 2 * step + (lane >> 4);
    load_matrices(a, tile + row * kRowBytes + ((piece ^ (row & 7)) << 4));
  }
  // A operand of channels 16 * step.. x keys.
  __device__ __forceinline__ void value_operand(const uint8_t *tile, int step,
                                                uint32_t (&a)[4]) const {
    const int row = (lane & 7) + (lane >> 4) * 8, piece = 2 * step + ((lane >> 3) & 1);
    load_matrices_transposed(a, tile + row * kRowBytes + ((piece ^ (row & 7)) << 4));
  }
};

}  // namespace cuda
}  // namespace xllm
