// The arithmetic of tile_chunk.cuh for four tiles and 32 or 64 tokens at once, by a warp group
// (sm_90a): int8 wgmma runs at twice the rate of mma.sync, and takes the activations from shared
// memory by itself. A warp holds the codes of its own tile in registers, as there; the outputs lie
// as there, too. q4_k, q5_k and q6_k.
//
// q6_k has a scale per 16 columns, and wgmma takes 32. For 32 tokens the same 16 of hi stand for
// both halves, by a descriptor that says so, which makes 8 c of 4 c, and for lo the codes of the
// other half are zeros. For 64 the scales are multiplied into the codes, which takes as many wgmma
// and half the instructions.
#pragma once

#include "backend/cuda/tile_chunk.cuh"
#include "backend/cuda/wgmma.cuh"

namespace xllm {
namespace cuda {

// Where an operand of activations lies: matrices of 8 tokens by 16 columns (act_format.cuh), those
// of 16 columns further on `half_bytes` further on, those of the next tokens kActChunkBytes.
__device__ __forceinline__ uint64_t acts_descriptor(uint32_t address, int half_bytes) {
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) |
         static_cast<uint64_t>(half_bytes >> 4) << 16 |
         static_cast<uint64_t>(kActChunkBytes >> 4) << 32;
}

// d = a * b, or d += a * b where is_more; a s8 or u8, b s8. Not done before wgmma_wait.
template <bool kIsUnsigned>
__device__ __forceinline__ void wgmma_32(int (&d)[4][4], const uint32_t (&a)[4], uint64_t b,
                                         bool is_more) {
#ifdef XLLM_HAS_WGMMA
#define XLLM_WGMMA_32(TYPE)                                                                       \
  asm volatile(                                                                                   \
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %21, 0;\n\t"                                          \
      "wgmma.mma_async.sync.aligned.m64n32k32.s32." TYPE                                          \
      ".s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "              \
      "{%16, %17, %18, %19}, %20, p;\n\t}"                                                        \
      : "+r"(d[0][0]), "+r"(d[0][1]), "+r"(d[0][2]), "+r"(d[0][3]), "+r"(d[1][0]), "+r"(d[1][1]), \
        "+r"(d[1][2]), "+r"(d[1][3]), "+r"(d[2][0]), "+r"(d[2][1]), "+r"(d[2][2]), "+r"(d[2][3]), \
        "+r"(d[3][0]), "+r"(d[3][1]), "+r"(d[3][2]), "+r"(d[3][3])                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_more ? 1 : 0))
  if constexpr (kIsUnsigned)
    XLLM_WGMMA_32("u8");
  else
    XLLM_WGMMA_32("s8");
#undef XLLM_WGMMA_32
#endif
}

// The same for 64 tokens.
template <bool kIsUnsigned>
__device__ __forceinline__ void wgmma_64(int (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                         bool is_more) {
#ifdef XLLM_HAS_WGMMA
#define XLLM_WGMMA_64(TYPE)                                                                        \
  asm volatile(                                                                                    \
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"                                           \
      "wgmma.mma_async.sync.aligned.m64n64k32.s32." TYPE                                           \
      ".s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, "   \
      "%36, p;\n\t}"                                                                               \
      : "+r"(d[0][0]), "+r"(d[0][1]), "+r"(d[0][2]), "+r"(d[0][3]), "+r"(d[1][0]), "+r"(d[1][1]),  \
        "+r"(d[1][2]), "+r"(d[1][3]), "+r"(d[2][0]), "+r"(d[2][1]), "+r"(d[2][2]), "+r"(d[2][3]),  \
        "+r"(d[3][0]), "+r"(d[3][1]), "+r"(d[3][2]), "+r"(d[3][3]), "+r"(d[4][0]), "+r"(d[4][1]),  \
        "+r"(d[4][2]), "+r"(d[4][3]), "+r"(d[5][0]), "+r"(d[5][1]), "+r"(d[5][2]), "+r"(d[5][3]),  \
        "+r"(d[6][0]), "+r"(d[6][1]), "+r"(d[6][2]), "+r"(d[6][3]), "+r"(d[7][0]), "+r"(d[7][1]),  \
        "+r"(d[7][2]), "+r"(d[7][3])                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_more ? 1 : 0))
  if constexpr (kIsUnsigned)
    XLLM_WGMMA_64("u8");
  else
    XLLM_WGMMA_64("s8");
#undef XLLM_WGMMA_64
#endif
}

// ---- q6_k: the scales times the codes first ----
//
// w = -(scale * code) is in -4096..4095: 32 wh + wl, wh s8, wl 0..31. Over the chunk then
//   -I = 256 sum(wh hi) + 32 sum(wh lo) + sum(8 wl hi) + sum(wl lo)
// without a multiplication per half block and output.

// Planes of four codes, which stand in bits 2-7 of the bytes of `word` as code ^ 32 (what is below
// them does not matter): two at a time in 16 bits, as 8 w + 32768.
__device__ __forceinline__ void fold_scale(uint32_t word, int scale, uint32_t *wh, uint32_t *wl8,
                                           uint32_t *wl) {
  constexpr uint32_t kCodes = 0x00fc00fcu, kBoth = 0x00010001u;
  const uint32_t flipped = word ^ 0x80808080u;
  const uint32_t factor = static_cast<uint32_t>(-2 * scale);  // of 4 (code + 32)
  const uint32_t plus = static_cast<uint32_t>(scale) * (256u * kBoth) + 32768u * kBoth;
  const uint32_t even = (flipped & kCodes) * factor + plus;
  const uint32_t odd = (flipped >> 8 & kCodes) * factor + plus;
  *wh = __byte_perm(even, odd, 0x7351) ^ 0x80808080u;
  *wl8 = __byte_perm(even, odd, 0x6240);
  *wl = *wl8 >> 3;
}

// A chunk of q6_k and 64 tokens.
__device__ __forceinline__ void folded_chunk(const uint8_t *tile, const TileActs &acts, int lane,
                                             float (&acc)[8][4]) {
  constexpr int kType = kWeightQ6_K, kGroups = 8;
  using Codes = TileCodes<kType>;
  constexpr int kBlockBytes = kActTokenBytes * kActGroup, kPlaneBytes = kBlockBytes / 4;
  const int g = lane >> 2;
  const uint64_t blocks =
      acts_descriptor(static_cast<uint32_t>(__cvta_generic_to_shared(acts.base)), 2 * kPlaneBytes);
  int high[kGroups][4], middle[kGroups][4], low[kGroups][4];
  uint32_t wh[4], wl8[4], wl[4];
#pragma unroll
  for (int u = 0; u < kUnitsPerChunk; ++u) {
    uint32_t words[2][4], scales[2];
    Codes::words_of_codes(Codes::load_raw(tile, u, lane), words);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      scales[r] =
          *reinterpret_cast<const uint32_t *>(tile + row_fields_offset(kType, g, r) + 4 * u);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int block = 2 * u + step;
      if (block > 0) wgmma_wait<0>();  // reads the planes of the block before
#pragma unroll
      for (int i = 0; i < 4; ++i)
        fold_scale(words[step][i], signed_byte(scales[i & 1], 2 * step + (i >> 1)), &wh[i], &wl8[i],
                   &wl[i]);
      const uint64_t b = blocks + block * (kBlockBytes >> 4), b_low = b + (kPlaneBytes >> 4);
      wgmma_fence();
      wgmma_64<false>(high, wh, b, block > 0);
      wgmma_64<true>(low, wl8, b, block > 0);
      wgmma_64<false>(middle, wh, b_low, block > 0);
      wgmma_64<true>(low, wl, b_low, true);
      wgmma_commit();
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) low[n][j] = -32 * (8 * high[n][j] + middle[n][j]) - low[n][j];
  }
  finish_half_scaled<kGroups>(tile, acts, lane, low, acc);
}

// A step is 32 tokens of a block (of a half block for q6_k). While one step's dots are scaled the
// next is being multiplied, into the other of two sets of registers.
template <int kType, int kGroups>
__device__ __forceinline__ void scaled_wgmma_chunk(const uint8_t *tile, const TileActs &acts,
                                                   int lane, float (&acc)[kGroups][4]) {
  using Codes = TileCodes<kType>;
  constexpr bool kIsHalf = kType == kWeightQ6_K;
  constexpr int kParts = kGroups / 4;                      // of the tokens
  constexpr int kPieces = (kIsHalf ? 2 : 1) * kActBlocks;  // of the columns
  constexpr int kBlockBytes = kActTokenBytes * kActGroup, kPlaneBytes = kBlockBytes / 4;
  static_assert(kGroups == 4 || kGroups == 8, "32 or 64 tokens");
  const int g = lane >> 2;
  const uint64_t blocks =
      acts_descriptor(static_cast<uint32_t>(__cvta_generic_to_shared(acts.base)), 2 * kPlaneBytes);
  int total[kGroups][4], dot[2][4][4];
  uint32_t scales[2][2];
  if constexpr (!kIsHalf) load_block_scales<kType>(tile, g, scales);
  typename Codes::Raw raw = Codes::load_raw(tile, 0, lane);
  uint32_t hi[2][4], lo[2][4];              // of a unit
  uint32_t hi_piece[2][4], lo_piece[2][4];  // of a piece; the one before may still be read

  const auto start = [&](int piece, int part) {
    const int block = kIsHalf ? piece / 2 : piece, h = kIsHalf ? piece & 1 : 0;
    const int set = piece & 1;
    if (part == 0) {
      if (block % 2 == 0 && h == 0) {
        Codes::operands(raw, hi, lo);
        if (block + 2 < kActBlocks) raw = Codes::load_raw(tile, block / 2 + 1, lane);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        hi_piece[set][i] = hi[block & 1][kIsHalf ? 2 * h + (i & 1) : i];
        lo_piece[set][i] = !kIsHalf || i / 2 == h ? lo[block & 1][i] : 0;
      }
    }
    const uint64_t b = blocks + block * (kBlockBytes >> 4) + part * (4 * kActChunkBytes >> 4);
    const uint64_t twice = (b & ~(uint64_t{0x3fff} << 16)) + h * (2 * kPlaneBytes >> 4);
    auto &to = dot[(piece * kParts + part) & 1];
    wgmma_fence();
    wgmma_32<Codes::kIsUnsigned>(to, hi_piece[set], kIsHalf ? twice : b, false);
    wgmma_32<Codes::kIsUnsigned>(to, lo_piece[set], b + (kPlaneBytes >> 4), true);
    wgmma_commit();
  };
  start(0, 0);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    int factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] =
          kIsHalf ? *reinterpret_cast<const int8_t *>(tile + row_fields_offset(kType, g, r) + piece)
                  : unsigned_byte(scales[r][piece / 4 & 1], piece & 3);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int next = piece * kParts + part + 1;
      if (next < kPieces * kParts) {
        start(next / kParts, next % kParts);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      const auto &from = dot[(next - 1) & 1];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int &to = total[4 * part + n][j];
          to = piece == 0 ? factor[j >> 1] * from[n][j] : factor[j >> 1] * from[n][j] + to;
        }
      }
    }
  }
  if constexpr (kIsHalf)
    finish_half_scaled<kGroups>(tile, acts, lane, total, acc);
  else
    finish_scaled<kType, kGroups>(tile, acts, lane, total, acc);
}

// acc = fma(dx, p, acc) for one chunk of this warp's tile; all four warps of the group call it.
template <int kType, int kGroups>
__device__ __forceinline__ void wgmma_chunk(const uint8_t *tile, const TileActs &acts, int lane,
                                            float (&acc)[kGroups][4]) {
  if constexpr (kType == kWeightQ6_K && kGroups == 8) {
    return folded_chunk(tile, acts, lane, acc);
  } else {
    scaled_wgmma_chunk<kType, kGroups>(tile, acts, lane, acc);
  }
}

}  // namespace cuda
}  // namespace xllm
