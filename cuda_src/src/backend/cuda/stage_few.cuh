// Activations of a product of 1 to 4 tokens on their way into shared memory, all of K: rows of f32
// are normed and quantised here, a warp per chunk, by every CTA for itself; an ActView is copied.
#pragma once

#include "backend/cuda/act_quant.cuh"
#include "backend/cuda/few_chunk.cuh"

namespace xllm {
namespace cuda {

// codes [chunks and one of zeros], sums [chunks][kTokens][8 blocks] int16, scales [chunks][kTokens]
// f32 without the row's factor, squares [kTokens][chunks, padded].
struct FewActs {
  uint8_t *codes, *sums;
  float *scales, *squares;
};
constexpr int kSquaresPad = 16;

XLLM_HOST_DEVICE int few_square_floats(int num_chunks) {
  return (num_chunks + kSquaresPad - 1) / kSquaresPad * kSquaresPad;
}
XLLM_HOST_DEVICE int few_acts_bytes(int num_chunks, int tokens) {
  return (num_chunks + 1) * few_codes_bytes(tokens) + num_chunks * few_sums_bytes(tokens) +
         2 * few_square_floats(num_chunks) * tokens * 4;
}
template <int kTokens>
__device__ __forceinline__ FewActs few_acts(uint8_t *at, int num_chunks) {
  FewActs acts;
  acts.codes = at;
  acts.sums = at + (num_chunks + 1) * few_codes_bytes(kTokens);
  acts.scales = reinterpret_cast<float *>(acts.sums + num_chunks * few_sums_bytes(kTokens));
  acts.squares = acts.scales + few_square_floats(num_chunks) * kTokens;
  return acts;
}

// ---- rows of f32 ----

// Items, (chunk, token), of a warp whose values are on their way at once, and those of them that
// are quantised side by side.
constexpr int kRowItems = 8, kRowItemsAtOnce = 2;

// What is no kernel's output, of the first chunks of a warp: asked for before the previous kernel
// is done.
constexpr int kNormChunks = 2;
struct FewNorm {
  float weight[kNormChunks][kActLaneCols];
};
__device__ __forceinline__ void load_norm(const MatmulArgs &args, int chunk, int stride, int lane,
                                          FewNorm *norm) {
#pragma unroll
  for (int i = 0; i < kNormChunks; ++i)
    load_act_cols(args.rows.norm_weight, (chunk + i * stride) * kActCols, args.rows.num_cols, lane,
                  norm->weight[i]);
}

template <int kTokens>
__device__ __forceinline__ void store_item(const ActLane &q, int chunk, int token, int lane,
                                           const FewActs &acts) {
  uint8_t *at = acts.codes + chunk * few_codes_bytes(kTokens) +
                act_code_offset(kTokens, token, lane * kActLaneCols, 0);
  *reinterpret_cast<uint2 *>(at) = q.hi;
  *reinterpret_cast<uint2 *>(at + act_code_offset(kTokens, 0, 0, 1)) = q.lo;
  if ((lane & 3) == 0) {
    reinterpret_cast<int16_t *>(acts.sums)[(chunk * kTokens + token) * kActBlocks + lane / 4] =
        static_cast<int16_t>(q.sum);
  }
  if (lane == 0) acts.scales[chunk * kTokens + token] = q.d;
}

// max, NaN where one of them is.
__device__ __forceinline__ float max_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
#endif
  return a;
}

// __frcp_rn where it needs no special cases: what it does itself there, without its branch.
__device__ __forceinline__ float ordinary_inverse(float d) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(d));
  return __fmaf_rn(near, __fmaf_rn(-d, near, 1.0f), near);
}

// quantize_chunk (act_quant.cuh) in half as many instructions, the same bytes where the largest |x|
// is of an ordinary size; false, in all lanes, where it is not.
__device__ __forceinline__ bool quantize_ordinary(const float (&x)[kActLaneCols], ActLane *lane) {
  constexpr uint32_t kAll = 0xffffffffu;
  float most[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) most[i] = max_nan(fabsf(x[i]), fabsf(x[i + 4]));
  const float own = max_nan(max_nan(most[0], most[1]), max_nan(most[2], most[3]));
  const uint32_t largest = warp_max(__float_as_uint(own));
  constexpr uint32_t kLeast = 0x17800000u, kMost = 0x67800000u;  // 2^-80, 2^80
  const float amax = __uint_as_float(largest);
  // Division by a constant, rounded once: with these bounds nothing here under- or overflows, and
  // the residual is exact.
  constexpr float kInverse = 1.0f / kActMaxCode;
  const float near = __fmul_rn(amax, kInverse);
  lane->d = __fmaf_rn(__fmaf_rn(-static_cast<float>(kActMaxCode), near, amax), kInverse, near);
  const float inverse = ordinary_inverse(lane->d);
  // rn(x * inverse) + 4 in the low bits of 1.5 * 2^23 + 4 + it, which rounds to an integer, the
  // nearest, even of two. Its bits 3.. are hi, its bits 0..2 are lo + 4.
  uint32_t pairs[4];  // of two: 16 bits each
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t a = __float_as_uint(__fadd_rn(__fmul_rn(x[2 * i], inverse), kMagic + 4.0f));
    const uint32_t b = __float_as_uint(__fadd_rn(__fmul_rn(x[2 * i + 1], inverse), kMagic + 4.0f));
    sum += static_cast<int>(a + b);
    pairs[i] = __byte_perm(a, b, 0x5410);
  }
  lane->sum = sum - kActLaneCols * (kMagicBits + 4);
  const auto hi_of = [](uint32_t p, uint32_t q) { return __byte_perm(p >> 3, q >> 3, 0x6420); };
  const auto lo_of = [](uint32_t p, uint32_t q) {
    return ((__byte_perm(p, q, 0x6420) & 0x07070707u) + 0x7c7c7c7cu) ^ 0x80808080u;
  };
  lane->hi = make_uint2(hi_of(pairs[0], pairs[1]), hi_of(pairs[2], pairs[3]));
  lane->lo = make_uint2(lo_of(pairs[0], pairs[1]), lo_of(pairs[2], pairs[3]));
  lane->sum += __shfl_xor_sync(kAll, lane->sum, 1);
  lane->sum += __shfl_xor_sync(kAll, lane->sum, 2);
  return largest - kLeast < kMost - kLeast;
}

// norm: load_norm of this warp's first chunks, where kNorm.
template <int kTokens, bool kNorm>
__device__ __forceinline__ void stage_rows(const MatmulArgs &args, int warp, int num_warps,
                                           int lane, FewNorm *norm, const FewActs &acts) {
  constexpr int kChunks = kNorm ? kNormChunks : kRowItems / kTokens;
  constexpr int kItems = kChunks * kTokens;
  const auto row_of = [&](int token) {
    return args.rows.x + (args.first_token + min(token, args.num_tokens - 1)) * args.rows.stride;
  };
#pragma unroll 1
  for (int first = warp; first < args.num_chunks; first += kChunks * num_warps) {
    const auto chunk_of = [&](int item) { return first + item / kTokens * num_warps; };
    float x[kItems][kActLaneCols];
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      load_act_cols(row_of(i % kTokens), chunk_of(i) * kActCols, args.rows.num_cols, lane, x[i]);
    uint32_t others = 0;  // items that are not ordinary
#pragma unroll
    for (int pair = 0; pair < kItems; pair += kRowItemsAtOnce) {
      if (chunk_of(pair) >= args.num_chunks) break;
#pragma unroll
      for (int i = pair; i < pair + kRowItemsAtOnce; ++i) {
        const int chunk = chunk_of(i), token = i % kTokens;
        const bool exists = chunk < args.num_chunks;
        if constexpr (kNorm) {
          const float squares = chunk_squares(x[i]);
          if (lane == 0 && exists)
            acts.squares[token * few_square_floats(args.num_chunks) + chunk] = squares;
#pragma unroll
          for (int k = 0; k < kActLaneCols; ++k)
            x[i][k] = __fmul_rn(x[i][k], norm->weight[i / kTokens][k]);
        }
        ActLane q;
        if (!quantize_ordinary(x[i], &q)) others |= 1u << i;
        if (exists) store_item<kTokens>(q, chunk, token, lane, acts);
      }
    }
    // All zeros are the most likely of these.
#pragma unroll 1
    for (; others != 0; others &= others - 1) {
      const int item = __ffs(static_cast<int>(others)) - 1;
      const int chunk = chunk_of(item), token = item % kTokens;
      if (chunk >= args.num_chunks) break;
      float v[kActLaneCols];
      load_act_cols(row_of(token), chunk * kActCols, args.rows.num_cols, lane, v);
      if constexpr (kNorm) {
        float weight[kActLaneCols];
        load_act_cols(args.rows.norm_weight, chunk * kActCols, args.rows.num_cols, lane, weight);
#pragma unroll
        for (int k = 0; k < kActLaneCols; ++k) v[k] = __fmul_rn(v[k], weight[k]);
      }
      __syncwarp();
      store_item<kTokens>(quantize_chunk(v), chunk, token, lane, acts);
    }
    if constexpr (kNorm) {
      if (first + kChunks * num_warps < args.num_chunks)
        load_norm(args, first + kChunks * num_warps, num_warps, lane, norm);
    }
  }
}

// 1 / rms of a row, as row_inverse (act_quant.cuh): squares behind the last chunk are 0 and change
// nothing.
__device__ __forceinline__ float few_row_inverse(const float *squares, const MatmulArgs &args) {
  float sum = 0;
#pragma unroll 1
  for (int first = 0; first < args.num_chunks; first += kSquaresPad) {
    float4 v[kSquaresPad / 4];
#pragma unroll
    for (int i = 0; i < kSquaresPad / 4; ++i)
      v[i] = reinterpret_cast<const float4 *>(squares + first)[i];
#pragma unroll
    for (int i = 0; i < kSquaresPad / 4; ++i)
      sum = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(sum, v[i].x), v[i].y), v[i].z), v[i].w);
  }
  const float mean = __fdiv_rn(sum, static_cast<float>(args.rows.num_cols));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, args.rows.eps)));
}

template <int kTokens>
__device__ __forceinline__ void copy_acts(const MatmulArgs &args, const FewActs &acts) {
  const int thread = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
  const int in_group = args.first_token % kActGroup;
  constexpr int kPieces = few_codes_bytes(kTokens) / 16;  // of a chunk: 16 bytes each
  for (int i = thread; i < args.num_chunks * kPieces; i += num_threads) {
    const int chunk = i / kPieces, piece = i % kPieces;
    copy_async_16(acts.codes + i * 16,
                  args.act.chunk(args.first_token, chunk) +
                      (piece / kTokens * kActGroup + piece % kTokens + in_group) * 16);
  }
  for (int i = thread; i < args.num_chunks * kTokens; i += num_threads) {
    const int token = in_group + i % kTokens;
    const uint8_t *from = args.act.chunk(args.first_token, i / kTokens);
    copy_async_16(acts.sums + i * few_sums_bytes(1),
                  from + act_sums_offset(kActGroup) + token * few_sums_bytes(1));
    acts.scales[i] = reinterpret_cast<const float *>(from + act_codes_bytes(kActGroup))[token];
  }
  commit_copies();
  wait_for_copies<0>();
}

}  // namespace cuda
}  // namespace xllm
