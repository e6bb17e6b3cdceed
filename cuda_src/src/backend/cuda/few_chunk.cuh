// The inner loop of products of 1 to 4 tokens: 16 rows by 256 columns on tensor cores.
//
// Two columns of an mma take the planes of a token's activations, so that a lane finds hi and lo of
// its own in C and 8 * hi + lo is the dot product with q, exact. Fewer than 4 tokens leave columns
// over. They hold other blocks: the 4 lanes of a row are kTokens tokens by kParts parts, and part c
// owns every block b with b % kParts = c (half blocks of 16 for q6_k). An mma has zeros in the
// columns of the parts whose block it does not multiply, so that kParts of them go into the same
// registers, and a lane scales its own blocks only. The parts of I are added up across lanes, each
// of which then goes on with one row.
//   lane 4g + t: token t % kTokens, part t / kTokens, of rows g and g + 8; after the parts are
//   added up of row g + 8 * (part % 2) (of both, where there is one part)
#pragma once

#include "backend/cuda/matmul_args.cuh"

namespace xllm {
namespace cuda {

// Activations in shared memory: codes as in act_format.cuh and a chunk of zeros, sums and scales in
// arrays of their own.
XLLM_HOST_DEVICE constexpr int few_codes_bytes(int tokens) { return act_codes_bytes(tokens); }
XLLM_HOST_DEVICE constexpr int few_sums_bytes(int tokens) { return 2 * kActBlocks * tokens; }

template <int kTokens>
struct FewLane {
  static constexpr int kParts = 4 / kTokens;
  static constexpr int kRows = kParts == 1 ? 2 : 1;
  static __device__ __forceinline__ int token(int t) { return t % kTokens; }
  static __device__ __forceinline__ int part(int t) { return t / kTokens; }
  static __device__ __forceinline__ int row(int t) { return part(t) & 1; }
};

// What the columns of an mma hold.
enum class FewColumns {
  kBlocks,  // a part has every kParts-th block
  kHalves,  // a part has every kParts-th half block
  kAll,     // the parts have all of it, over and over
};

template <int kType>
constexpr FewColumns kFewColumns =
    kType == kWeightQ6_K                           ? FewColumns::kHalves
    : kType == kWeightQ4_K || kType == kWeightQ5_K ? FewColumns::kBlocks
                                                   : FewColumns::kAll;

// The shared address of the row that a lane gives ldmatrix for unit u of a chunk: matrix lane / 8
// is a half of a block of the unit, row lane % 8 of it a column of the mma. codes: of the chunk;
// zeros: a chunk of them.
template <int kTokens, FewColumns kColumns>
__device__ __forceinline__ uint32_t few_act_row(int u, int lane, uint32_t codes, uint32_t zeros) {
  using Lane = FewLane<kTokens>;
  const int half = lane >> 3, t = (lane & 7) >> 1, plane = lane & 1;
  const int owner = kColumns == FewColumns::kHalves ? half : half / 2 + 2 * (u & 1);
  const bool has = kColumns == FewColumns::kAll || owner % Lane::kParts == Lane::part(t);
  const int at = (half * 2 + plane) * (kTokens * 16) + Lane::token(t) * 16;
  return (has ? codes + at : zeros) + u * (few_codes_bytes(kTokens) / kUnitsPerChunk);
}

// The B operands of a unit: b0, b1 of its first block in r[0], r[1], of its second in r[2], r[3].
// Free to move among other loads: `row` is to come out of after_barrier.
__device__ __forceinline__ void load_act_blocks(uint32_t (&r)[4], uint32_t row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(row));
#endif
}

// The same value, not known to the compiler before the barrier that stands above the call.
__device__ __forceinline__ uint32_t after_barrier(uint32_t value) {
  asm volatile("" : "+r"(value)::"memory");
  return value;
}

// Byte `index` of four.
__device__ __forceinline__ int signed_byte(uint32_t bytes, int index) {
  int value;
  // Its sign in the upper three.
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(value) : "r"(bytes), "r"(index * 0x1111 + 0x8880));
  return value;
}

// I of a lane's rows from what its parts have of rows g and g + 8.
template <int kTokens>
__device__ __forceinline__ void add_parts(const int (&i)[2], int t,
                                          int (&sum)[FewLane<kTokens>::kRows]) {
  if constexpr (kTokens == 4) {
    sum[0] = i[0];
    sum[FewLane<kTokens>::kRows - 1] = i[1];
  } else {
    const bool second = FewLane<kTokens>::row(t) != 0;
    sum[0] = second ? i[1] : i[0];
    sum[0] += __shfl_xor_sync(0xffffffffu, second ? i[0] : i[1], kTokens);
    if constexpr (kTokens == 1) sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], 2);
  }
}

// p of the lane's rows and token: of the chunk of weights at `chunk`, of which num_units exist (4
// but at the ragged end). codes: shared address of the chunk's activations; sums: of the chunk and
// the lane's token.
template <int kType, int kTokens>
__device__ __forceinline__ void few_chunk(const uint8_t *chunk, int num_units, int lane,
                                          uint32_t codes, uint32_t zeros, const uint8_t *sums,
                                          float (&p)[FewLane<kTokens>::kRows]) {
  using Tile = WeightTile<kType>;
  using Lane = FewLane<kTokens>;
  constexpr int kParts = Lane::kParts, kRows = Lane::kRows;
  const int g = lane >> 2, t = lane & 3, part = Lane::part(t);
  const auto dot = [](const int (&c)[4], int r) { return 8 * c[2 * r] + c[2 * r + 1]; };
  const auto act_row = [&](int u) {
    return few_act_row<kTokens, kFewColumns<kType>>(u, lane, codes, zeros);
  };
  const auto block_mma = [&](int (&c)[4], const uint32_t (&a)[2][4], const uint32_t (&b)[4],
                             int step) {
    if (Tile::kHighInPlace && step == 1) {
      mma_u8_k32(c, a[step], b[2], b[3]);
    } else {
      mma_s8_k32(c, a[step], b[2 * step], b[2 * step + 1]);
    }
  };
  if constexpr (kType == kWeightQ4_K || kType == kWeightQ5_K) {
    const auto fields = [&](int r8) {
      return *reinterpret_cast<const uint4 *>(chunk + row_fields_offset(kType, g, r8));
    };
    // Set s of registers has block s * kParts + part.
    constexpr int kSets = 8 / kParts;
    int c[kSets][4] = {};
#pragma unroll
    for (int u = 0; u < kUnitsPerChunk; ++u) {
      uint32_t a[2][4], b[4];
      Tile::load_codes(chunk, u, lane, a);
      load_act_blocks(b, act_row(u));
#pragma unroll
      for (int step = 0; step < 2; ++step) block_mma(c[(2 * u + step) / kParts], a, b, step);
    }
    constexpr int kShift = Tile::kHighInPlace ? 4 : 0;  // the codes of odd blocks are times 16
    int i[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 v = fields(r);
      const uint32_t words[2] = {v.y >> (8 * part), v.z >> (8 * part)};
      int sum[2] = {0, 0};  // of even and odd blocks
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        const int first = s * kParts;  // the block of part 0
        const uint32_t scale = words[first / 4] >> (8 * (first % 4)) & 63u;
        sum[kParts == 1 ? s & 1 : 0] += static_cast<int>(scale) * dot(c[s], r);
      }
      i[r] = kParts == 1 ? sum[0] + (sum[1] >> kShift) : sum[0] >> (kShift * (part & 1));
    }
    int all[kRows];
    add_parts<kTokens>(i, t, all);
    const uint4 s = *reinterpret_cast<const uint4 *>(sums);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowFields row = unpack_fields(fields(kRows == 1 ? Lane::row(t) : r));
      int j = __dp2a_lo(static_cast<int>(s.x), static_cast<int>(row.minima[0]), 0);
      j = __dp2a_hi(static_cast<int>(s.y), static_cast<int>(row.minima[0]), j);
      j = __dp2a_lo(static_cast<int>(s.z), static_cast<int>(row.minima[1]), j);
      j = __dp2a_hi(static_cast<int>(s.w), static_cast<int>(row.minima[1]), j);
      p[r] = __fmaf_rn(row.d, __int2float_rn(all[r]), __fmul_rn(-row.dmin, __int2float_rn(j)));
    }
  } else if constexpr (kType == kWeightQ6_K) {
    // Set s has half block s * kParts + part, times 4.
    constexpr int kSets = 16 / kParts;
    int c[kSets][4] = {};
    static_assert(Tile::code_factor(0) == 4, "taken out below");
#pragma unroll
    for (int u = 0; u < kUnitsPerChunk; ++u) {
      uint32_t a[2][4], b[4];
      Tile::load_codes(chunk, u, lane, a);
      load_act_blocks(b, act_row(u));
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int h = 4 * u + 2 * step;
        if constexpr (kParts == 1) {
          mma_s8_k16(c[h], a[step][0], a[step][1], b[2 * step]);
          mma_s8_k16(c[h + 1], a[step][2], a[step][3], b[2 * step + 1]);
        } else {
          block_mma(c[h / kParts], a, b, step);
        }
      }
    }
    int i[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 v = *reinterpret_cast<const uint4 *>(chunk + row_fields_offset(kType, g, r));
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      int sum[2] = {0, 0};  // of up to 8 half blocks each: 4 |I| < 2^31
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        const int first = s * kParts;
        sum[kParts == 1 && s >= 8 ? 1 : 0] +=
            signed_byte(words[first / 4], first % 4 + part) * dot(c[s], r);
      }
      i[r] = (sum[0] >> 2) + (sum[1] >> 2);
    }
    int all[kRows];
    add_parts<kTokens>(i, t, all);
    const uint32_t d = *reinterpret_cast<const uint32_t *>(chunk + kQ6SuperScaleOffset + g * 4);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = kRows == 1 ? Lane::row(t) : r;
      p[r] = __fmul_rn(half_bits_to_float(d >> (16 * row)), __int2float_rn(all[r]));
    }
  } else {
    const uint4 s4 = *reinterpret_cast<const uint4 *>(sums);
    const uint32_t s[4] = {s4.x, s4.y, s4.z, s4.w};
    float both[2] = {0.0f, 0.0f};
#pragma unroll
    for (int u = 0; u < kUnitsPerChunk; ++u) {
      const auto scales = Tile::load_scales(chunk, u, g);
      uint32_t a[2][4], b[4];
      Tile::load_codes(chunk, u, lane, a);
      load_act_blocks(b, act_row(u));
      int c[2][4] = {};
#pragma unroll
      for (int step = 0; step < 2; ++step) block_mma(c[step], a, b, step);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float v = both[r];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          constexpr float kInverse[2] = {1.0f / Tile::code_factor(0), 1.0f / Tile::code_factor(1)};
          const float d = __fmul_rn(scales.d[step][r], kInverse[step]);
          v = __fmaf_rn(d, __int2float_rn(dot(c[step], r)), v);
          if constexpr (Tile::kHasMin) {
            const int sum = static_cast<int16_t>(s[u] >> (16 * step) & 0xffffu);
            v = __fmaf_rn(scales.m[step][r], __int2float_rn(sum), v);
          }
        }
        if (u < num_units) both[r] = v;
      }
    }
    if constexpr (kRows == 1) {
      p[0] = Lane::row(t) != 0 ? both[1] : both[0];
    } else {
      p[0] = both[0];
      p[kRows - 1] = both[1];
    }
  }
}

}  // namespace cuda
}  // namespace xllm
