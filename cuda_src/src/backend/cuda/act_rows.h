// Rows between products: partial sums added up, and the quantiser as a kernel of its own, for
// products that do not quantise their rows themselves.
#pragma once

#include "backend/cuda/matmul.h"

namespace xllm {
namespace cuda {

constexpr int kMaxNormCols = 16384;  // of rows that are normalised

// Shared-memory carve-outs as of the matrix kernels, so that they can share an SM; once per device.
void prepare_rows(const Device &device);

// out = or += sum of the slices + bias, [num_tokens, out_stride].
void add_partials(const Launch &launch, const Partials &partials, int num_tokens, const float *bias,
                  bool is_added, float *out, int64_t out_stride);

// act = Q(rows), with their norm where they have one.
void quantize_rows(const Launch &launch, const ActRows &rows, int num_tokens, const ActView &act);

// x += sum of the slices + bias, then act = Q(x) as above; x is what `rows` points to.
void add_and_quantize_rows(const Launch &launch, const Partials &partials, const float *bias,
                           float *x, const ActRows &rows, int num_tokens, const ActView &act);

// gate = silu(gate) * up in rows [num_tokens, 2 * num_cols] of gate, then up.
void swiglu_rows(const Launch &launch, float *gate_up, int num_tokens, int num_cols);

// out[i] = x[rows[i]], [num_rows, num_cols].
void gather_rows(const Launch &launch, const float *x, const int32_t *rows, int num_rows,
                 int num_cols, float *out);

// `act` as f32 [num_tokens, num_cols] again, for tests.
void expand_acts(const Launch &launch, const ActView &act, int num_tokens, int num_cols,
                 float *out);

// Of one kernel of this library, for what it says about all: what they were compiled for. The
// error of a library without code for the device.
cudaError_t kernel_attributes(cudaFuncAttributes *attributes);

}  // namespace cuda
}  // namespace xllm
