// Products of activations with weight matrices, spread over the threads.
//
// A chunk is some rows of one matrix by some tokens. Rows are independent, so neither the size of a
// chunk nor the thread that takes it changes a byte.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cpu/activations.h"
#include "backend/cpu/cpu_weights.h"
#include "backend/cpu/interleave.h"
#include "backend/cpu/kernels.h"
#include "base/thread_pool.h"

namespace xllm::cpu {

// Chunks begin at multiples of this many tokens, where any set's groups of packed rows do
// (act_pack.h).
constexpr int kTokenStep = 8;
// Tokens of a chunk, at most: the chunk's rows are read once for all of them.
constexpr int kTokenBlock = 256;
// Activations of a chunk, at most: they stay in the core's second cache while the rows pass.
constexpr int kTokenBlockBytes = 384 << 10;
// A chunk of the feed-forward stage holds this many values each of gate and up: all rows of few
// tokens in long runs through the weights, or few rows of many tokens.
constexpr int kFfnValues = 8192;
// Tokens of such a chunk, at most.
constexpr int kFfnTokens = 64;
// Rows whose second plane is held at a time, of weights that are not interleaved.
constexpr int kPlaneRows = 64;
constexpr int64_t kFfnScratchFloats = int64_t{2} * kFfnValues;

// out[t * out_stride + r] = dot(weights row first_row + r, act row t): the whole of one chunk, on
// the calling thread.
//   first_token  a multiple of kTokenStep
//   num_tokens   at most kTokenBlock; a multiple of kTokenStep, or all that are left
//   precision    of activations that meet quantised weights; act holds that many planes
inline void multiply_chunk(const Kernels &kernels, const Matrix &weights, int first_row,
                           int num_rows, const Activations &act, int first_token, int num_tokens,
                           Precision precision, float *out, int64_t out_stride) {
  const int planes = weights.is_float() ? 1 : num_planes(precision);
  if (weights.is_interleaved) {
    kernels.tiles[static_cast<int>(weights.dtype)](
        weights.row(first_row), weights.row_bytes, num_rows, act.packed(first_token, precision),
        num_tokens, planes, weights.cols, out, out_stride);
    return;
  }
  const DotFn dot = kernels.dots[static_cast<int>(weights.dtype)];
  for (int p = 0; p < planes; ++p) {
    for (int t = 0; t < num_tokens; t += kTokenTile) {
      ActRow rows[kTokenTile];
      const int count = std::min(kTokenTile, num_tokens - t);
      for (int i = 0; i < count; ++i) rows[i] = act.row(first_token + t + i, p);
      if (p == 0) {
        dot(weights.row(first_row), weights.row_bytes, num_rows, rows, count, weights.cols,
            out + t * out_stride, out_stride);
        continue;
      }
      float second[kTokenTile * kPlaneRows];
      for (int r = 0; r < num_rows; r += kPlaneRows) {
        const int some = std::min(kPlaneRows, num_rows - r);
        dot(weights.row(first_row + r), weights.row_bytes, some, rows, count, weights.cols, second,
            kPlaneRows);
        for (int i = 0; i < count; ++i)
          kernels.add(out + (t + i) * out_stride + r, second + i * kPlaneRows, some);
      }
    }
  }
}

// Tokens of a chunk whose activations have this many columns in all planes.
inline int token_block(int cols) {
  return std::max(kTokenStep,
                  std::min(kTokenBlock, kTokenBlockBytes / cols / kTokenStep * kTokenStep));
}

// One matrix of a product and where its results go: out[token * out_stride + row].
struct Product {
  const Matrix *weights;
  float *out;
  int64_t out_stride;
};

// All of `products` for tokens [0, num_tokens). done(product, first_row, num_rows, first_token,
// num_tokens) follows each chunk on the thread that computed it.
template <typename Done>
void multiply(ThreadPool &pool, const Kernels &kernels, const Product *products, int num_products,
              const Activations &act, int num_tokens, Precision precision, const Done &done) {
  int64_t total_rows = 0;
  for (int p = 0; p < num_products; ++p) total_rows += products[p].weights->rows;
  // About eight chunks per thread, so that the last one to finish is not waited for long; a
  // multiple of the interleaved rows.
  const int64_t wanted = total_rows / (int64_t{8} * pool.num_threads());
  const int chunk_rows = static_cast<int>(std::min<int64_t>(
      128, std::max<int64_t>(kInterleavedRows, wanted / kInterleavedRows * kInterleavedRows)));
  const int block_tokens = token_block(act.cols() * num_planes(precision));
  const int token_blocks = (num_tokens + block_tokens - 1) / block_tokens;
  int64_t num_chunks = 0;
  for (int p = 0; p < num_products; ++p)
    num_chunks += (products[p].weights->rows + chunk_rows - 1) / chunk_rows;

  pool.parallel_for(num_chunks * token_blocks, [&](int64_t chunk, int) {
    // Rows vary fastest: neighbours in time share the activations.
    const int first_token = static_cast<int>(chunk / num_chunks) * block_tokens;
    int64_t index = chunk % num_chunks;
    int p = 0;
    for (;; ++p) {
      const int64_t chunks = (products[p].weights->rows + chunk_rows - 1) / chunk_rows;
      if (index < chunks) break;
      index -= chunks;
    }
    const Product &product = products[p];
    const int first_row = static_cast<int>(index) * chunk_rows;
    const int num_rows = std::min(chunk_rows, product.weights->rows - first_row);
    const int count = std::min(block_tokens, num_tokens - first_token);
    multiply_chunk(kernels, *product.weights, first_row, num_rows, act, first_token, count,
                   precision, product.out + first_token * product.out_stride + first_row,
                   product.out_stride);
    done(p, first_row, num_rows, first_token, count);
  });
}

}  // namespace xllm::cpu
