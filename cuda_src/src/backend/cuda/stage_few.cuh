// Activations of a product of 1 to 4 tokens on their way into shared memory, all of K: rows of f32
// are normed and quantised here, a warp per chunk, by every CTA for itself; an ActView is copied.
#pragma once

#include "backend/cuda/act_quant.cuh"
#include "backend/cuda/few_chunk.cuh"

namespace xllm {
namespace cuda {

// codes [chunks], sums [chunks][kTokens][8 blocks] int16, scales [chunks][kTokens]
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
  return num_chunks * (few_codes_bytes(tokens) + few_sums_bytes(tokens)) +
         2 * few_square_floats(num_chunks) * tokens * 4;
}
template <int kTokens>
__device__ __forceinline__ FewActs few_acts(uint8_t *at, int num_chunks) {
  FewActs acts;
  acts.codes = at;
  acts.sums = at + num_chunks * few_codes_bytes(kTokens);
  acts.scales = reinterpret_cast<float *>(acts.sums + num_chunks * few_sums_bytes(kTokens));
  acts.squares = acts.scales + few_square_floats(num_chunks) * kTokens;
  return acts;
}

// ---- rows of f32 ----

template <int kTokens>
__device__ __forceinline__ void store_item(const ActLane &q, int chunk, int token, int lane,
                                           const FewActs &acts) {
  uint8_t *at = acts.codes + chunk * few_codes_bytes(kTokens);
#pragma unroll
  for (int plane = 0; plane < 2; ++plane) {
    const uint2 v = plane == 0 ? q.hi : q.lo;
    uint8_t *words = at + few_code_offset(kTokens, token, 2 * lane, plane);
    *reinterpret_cast<uint32_t *>(words) = v.x;
    *reinterpret_cast<uint32_t *>(words + few_code_offset(kTokens, 0, 1, 0)) = v.y;
  }
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
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t a = __float_as_uint(__fadd_rn(__fmul_rn(x[2 * i], inverse), kMagic + 4.0f));
    const uint32_t b = __float_as_uint(__fadd_rn(__fmul_rn(x[2 * i + 1], inverse), kMagic + 4.0f));
    sum += a + b;
    pairs[i] = __byte_perm(a, b, 0x5410);
  }
  lane->sum = static_cast<int>(sum - kActLaneCols * (uint32_t{kMagicBits} + 4u));
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

// Whole chunks of a warp whose values are on their way at once.
template <int kTokens>
constexpr int kRowChunks = 4 / kTokens;

// Columns 8 * lane.. of a whole chunk.
__device__ __forceinline__ void load_whole(const float *at, float (&v)[kActLaneCols]) {
  const float4 a = reinterpret_cast<const float4 *>(at)[0];
  const float4 b = reinterpret_cast<const float4 *>(at)[1];
  v[0] = a.x;
  v[1] = a.y;
  v[2] = a.z;
  v[3] = a.w;
  v[4] = b.x;
  v[5] = b.y;
  v[6] = b.z;
  v[7] = b.w;
}

// Any chunk, in the plain way.
template <int kTokens>
__device__ __forceinline__ void stage_other(const MatmulArgs &args, const float *row, int chunk,
                                            int token, const FewActs &acts) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float v[kActLaneCols];
  load_act_cols(row, chunk * kActCols, args.rows.num_cols, lane, v);
  if (args.rows.norm_weight != nullptr) {
    float weight[kActLaneCols];
    load_act_cols(args.rows.norm_weight, chunk * kActCols, args.rows.num_cols, lane, weight);
    const float squares = chunk_squares(v);
    if (lane == 0) acts.squares[token * few_square_floats(args.num_chunks) + chunk] = squares;
#pragma unroll
    for (int k = 0; k < kActLaneCols; ++k) v[k] = __fmul_rn(v[k], weight[k]);
  }
  store_item<kTokens>(quantize_chunk(v), chunk, token, lane, acts);
}

// weight: the norm's for this warp's first chunk, where it is whole and there is a norm.
template <int kTokens>
__device__ __forceinline__ void stage_rows(const MatmulArgs &args, int warp, int num_warps,
                                           int lane, float (&weight)[kActLaneCols],
                                           const FewActs &acts) {
  constexpr int kChunks = kRowChunks<kTokens>;
  const int num_whole = args.rows.num_cols / kActCols;
  const bool has_norm = args.rows.norm_weight != nullptr;
  const auto row_of = [&](int token) {
    return args.rows.x + (args.first_token + min(token, args.num_tokens - 1)) * args.rows.stride;
  };
  int chunk = warp;
  bool all_ordinary = true;
#pragma unroll 1
  while (chunk < num_whole) {
    float x[kChunks][kTokens][kActLaneCols];
    const int lane_col = lane * kActLaneCols;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (chunk + i * num_warps >= num_whole) break;
#pragma unroll
      for (int m = 0; m < kTokens; ++m)
        load_whole(row_of(m) + (chunk + i * num_warps) * kActCols + lane_col, x[i][m]);
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (chunk >= num_whole) break;
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
        if (has_norm) {
          const float squares = chunk_squares(x[i][m]);
          if (lane == 0) acts.squares[m * few_square_floats(args.num_chunks) + chunk] = squares;
#pragma unroll
          for (int k = 0; k < kActLaneCols; ++k) x[i][m][k] = __fmul_rn(x[i][m][k], weight[k]);
        }
        ActLane q;
        all_ordinary = quantize_ordinary(x[i][m], &q) && all_ordinary;
        store_item<kTokens>(q, chunk, m, lane, acts);
      }
      chunk += num_warps;
      if (has_norm && chunk < num_whole)
        load_whole(args.rows.norm_weight + chunk * kActCols + lane_col, weight);
    }
  }
  if (all_ordinary && chunk >= args.num_chunks) return;
  __syncwarp();
#pragma unroll 1
  for (chunk = all_ordinary ? chunk : warp; chunk < args.num_chunks; chunk += num_warps) {
#pragma unroll 1
    for (int m = 0; m < kTokens; ++m) stage_other<kTokens>(args, row_of(m), chunk, m, acts);
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

// ---- an ActView ----

template <int kTokens>
__device__ __forceinline__ void copy_acts(const MatmulArgs &args, const FewActs &acts) {
  const int thread = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
  const int in_group = args.first_token % kActGroup;
  constexpr int kPieces = few_codes_bytes(kTokens) / 16;  // of a chunk: 16 columns of a plane
  for (int i = thread; i < args.num_chunks * kPieces; i += num_threads) {
    const int chunk = i / kPieces, piece = i % kPieces;
    const int token = piece % kTokens, plane = piece / kTokens % 2, k = piece / kTokens / 2 * 16;
    const uint4 v =
        *reinterpret_cast<const uint4 *>(args.act.chunk(args.first_token, chunk) +
                                         act_code_offset(kActGroup, in_group + token, k, plane));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    uint8_t *at = acts.codes + chunk * few_codes_bytes(kTokens);
#pragma unroll
    for (int t = 0; t < 4; ++t)
      *reinterpret_cast<uint32_t *>(at + few_code_offset(kTokens, token, k / 4 + t, plane)) =
          words[t];
  }
  for (int i = thread; i < args.num_chunks * kTokens; i += num_threads) {
    const int token = in_group + i % kTokens;
    const uint8_t *from = args.act.chunk(args.first_token, i / kTokens);
    reinterpret_cast<uint4 *>(acts.sums)[i] =
        *reinterpret_cast<const uint4 *>(from + act_sums_offset(kActGroup) + token * 16);
    acts.scales[i] = reinterpret_cast<const float *>(from + act_codes_bytes(kActGroup))[token];
  }
}

}  // namespace cuda
}  // namespace xllm
