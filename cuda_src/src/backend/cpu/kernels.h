// The arithmetic of the CPU backend behind one table of functions per instruction set, chosen once
// at creation.
//
// Every set gives equal bytes. What makes that possible is one canonical order of operations,
// stated here and at each function, with every fused multiply-add written out (the files are
// compiled with -ffp-contract=off) and no library function but sqrt:
//   * the integer dot of a quant block with int8 activations is exact in int32 and exact as f32
//   (|sum| < 2^24), so any order does;
//   * its f32 terms go into ONE accumulator per output row, blocks ascending (rows are the lanes of
//   the vector sets);
//   * f32 dots and sums keep 16 partial sums, element i in partial i % 16, ascending, the tail
//   padded with zeros; then
//     r[l] = p[l] + p[l + 8] and ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7)).
// A row's result never depends on how many rows or tokens a call holds.
#pragma once

#include <cstdint>

#include "tensor/dtype.h"
#include "tensor/kv.h"

namespace xllm::cpu {

// One token's activations: f32, and int8 per 32 values with x = d * q. Which of the two is filled
// is the caller's matter: f32 weights read f, quantised ones the rest.
struct ActRow {
  const float *f = nullptr;      // [cols]
  const int8_t *q = nullptr;     // [cols] in -127..127
  const float *d = nullptr;      // [cols / 32] scale, its two low mantissa bits clear
  const float *ds = nullptr;     // [cols / 32] d * sum(q), for types with a min per 32 or more
  const int16_t *sum = nullptr;  // [cols / 16] sum(q), for types with a min per 16
};

// A product takes at most this many tokens at once.
constexpr int kTokenTile = 8;

// out[t * out_stride + r] = dot(weight row r, acts[t]) for r < num_rows and t < num_tokens <=
// kTokenTile.
//   weights   num_rows rows of `cols` elements, row_bytes apart
// Order per row: plain blocks, acc = fma(d * ad, sum(q * aq), acc), then with a min acc = fma(m,
// ads, acc); super-blocks, over their 32s inner = fma(ad, sum(scale * q * aq), inner) from 0 and
// least = fma(ads, min, least) (q2_k: fma(ad, sum(min * asum), least)), then acc = fma(d, inner,
// acc), then acc = fma(-dmin, least, acc). f16, bf16: the f32 dot above; f32: the same
// with what additions and products lose carried along (float_dot.h).
using DotFn = void (*)(const uint8_t *weights, uint64_t row_bytes, int num_rows, const ActRow *acts,
                       int num_tokens, int cols, float *out, int64_t out_stride);

// The same over weights as interleave.h lays them out: rows from a multiple of kInterleavedRows on,
// any number of tokens, packed as act_pack.h says, each as its num_planes (1 or 2) rows one after
// the other. The products of a token's two planes are added at the end.
using TileFn = void (*)(const uint8_t *weights, uint64_t row_bytes, int num_rows,
                        const uint8_t *acts, int num_tokens, int num_planes, int cols, float *out,
                        int64_t out_stride);

// Attention is computed over tiles of this many keys, at positions that are multiples of it, and
// begins anew at multiples of kKeySplit; the parts are merged in ascending order. Both are the same
// for every row, so that a long context can be spread over threads without changing a byte.
constexpr int kKeyTile = 32;
constexpr int kKeySplit = 256;

// What attention carries from tile to tile for one query: the running maximum, the denominator and
// the weighted sum of values.
struct AttentionState {
  float max;
  float denominator;
  float *out;  // [head_dim]
};

// A tile's keys and values as an f16 cache holds them whose blocks are whole pieces of kTilePiece
// rows [head_dim]. Null: not there, or not wanted.
constexpr int kTilePiece = 16;
struct HalfTile {
  const uint16_t *k[kKeyTile / kTilePiece] = {};
  const uint16_t *v[kKeyTile / kTilePiece] = {};
};

struct Kernels {
  const char *name;

  // The product of each type; null for a type that this set leaves to the scalar one (see dot()).
  DotFn dots[32];
  // The product of interleaved weights; null for a type that this set computes from the file's
  // rows.
  TileFn tiles[32];
  // Rows of activations that those take at once, 8 or 4; 0 where there are none.
  int tile_rows;

  // q, d, ds and sum of ActRow from f. cols is a multiple of 32. d = max|x| / 127 with its two low
  // mantissa bits cleared, q = round to nearest even of x * (1 / d) within -127..127. A block whose
  // d is too small to invert becomes zeros; one that holds NaN or infinity gets d = NaN, so that
  // the logits show it.
  void (*quantize)(const float *f, int cols, int8_t *q, float *d, float *ds, int16_t *sum);

  // What quantize left: out[i] = fma(-d, q, f), d of the 32 that i belongs to.
  void (*remainder)(const float *f, int cols, const int8_t *q, const float *d, float *out);

  // out[i] = (x[i] * (1 / sqrt(sum(x^2) / n + eps))) * weight[i]. out may be x.
  void (*rms_norm)(const float *x, const float *weight, int n, float eps, float *out);

  // out[i] = (gate[i] / (1 + exp(-gate[i]))) * up[i]. out may be gate or up.
  void (*silu_mul)(const float *gate, const float *up, int n, float *out);

  // x[i] += y[i].
  void (*add)(float *x, const float *y, int n);

  // Rotates one head in place: pairs (2i, 2i + 1) or (i, i + rotary_dim / 2) by cos_sin [rotary_dim
  // / 2, 2]: x = fma(x, c, -(y * s)), y = fma(y, c, x * s) of the old x and y.
  void (*rope)(float *head, const float *cos_sin, int rotary_dim, bool is_neighbor);

  // Row `offset` of a page from f32 and back (kv.h says how a row is coded). int8: scale =
  // f16(max|x| / 127), q the nearest even of x / scale; int4: 7 in place of 127. An f16 scale that
  // rounds to zero stores zeros.
  void (*store_kv)(const KvLayout &layout, const float *row, int offset, uint8_t *page);
  // load_kv reads num_rows rows from `offset` on to rows [num_rows, head_dim].
  void (*load_kv)(const KvLayout &layout, const uint8_t *page, int offset, int num_rows,
                  float *rows);

  // One tile of keys for the queries q [num_queries, head_dim] of a group, each with its state:
  // keys [lo, hi) of k and v [kKeyTile, head_dim] f32, the rest is not read as a number. Per query:
  // s = dot(q, k) * scale; M = max(max, s...); p = exp(s - M), 0 outside; c = exp(max - M);
  // denominator = fma(denominator, c, T), T the sum of p as an f32 sum of 32; out = out * c, then
  // out = fma(p, v, out), keys ascending.
  void (*attend_tile)(const float *q, int num_queries, const float *k, const float *v, int head_dim,
                      int lo, int hi, float scale, AttentionState *states);

  // The same from f16 keys and values where they lie, head_dim a multiple of 16; rows outside
  // [lo, hi) may hold anything. `next` is the tile that will follow and may be fetched meanwhile.
  // Null for a set that attends to f32 tiles alone.
  void (*attend_halves)(const float *q, int num_queries, const HalfTile &tile, const HalfTile &next,
                        int head_dim, int lo, int hi, float scale, AttentionState *states);

  // Adds the part `from`, of later keys, to `into`: M = max of both, a = exp(into.max - M),
  // b = exp(from.max - M), denominator = fma(denominator, a, from.denominator * b), out likewise.
  void (*merge_attention)(AttentionState *into, const AttentionState &from, int head_dim);
};

const Kernels &scalar_kernels();
const Kernels &avx2_kernels();    // x86-64 only
const Kernels &avx512_kernels();  // x86-64 only
const Kernels &neon_kernels();    // AArch64 only

}  // namespace xllm::cpu
