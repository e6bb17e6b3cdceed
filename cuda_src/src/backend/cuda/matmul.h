// Matrix products on the device: which kernel, which grid. The numbers do not depend on either
// (matmul_args.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "backend/cuda/launch.h"

namespace xllm {
namespace cuda {

struct ActView;
struct DeferredNorm;

// One matrix in device memory.
struct DeviceMatrix {
  const uint8_t *data = nullptr;  // tiles (planes.cuh), or rows where the type is plain
  int type = -1;                  // WeightType
  int64_t rows = 0, cols = 0;
};

// y = W x for matrices that share x, their rows one after the other in the output (Q|K|V).
struct FusedMatrix {
  std::vector<DeviceMatrix> parts;
  int64_t rows() const;
  int64_t cols() const { return parts.front().cols; }
};

// How K is cut (matmul_args.cuh).
struct SlicePlan {
  int num_units, num_chunks, num_slices;
};
SlicePlan slice_plan(int64_t cols);

// Where partial sums of products of more than 8 tokens go: f32, this many for one matrix.
uint64_t partial_floats(const FusedMatrix &matrix, int64_t num_tokens);

struct Product {
  const FusedMatrix *matrix;
  const ActView *act;
  const DeferredNorm *norm_in;  // what is left to do to act; null: nothing. Up to 8 tokens
  int num_tokens;
  float *out;  // [num_tokens, out_stride] f32
  int64_t out_stride;
  const float *bias;  // [rows], or null
  bool is_added;      // out += y
  float *partials;    // partial_floats
};

// Opts all kernels in to the shared memory they use and notes what bounds their occupancy; once per
// device.
void prepare_matmul(Device *device);

void matmul(const Launch &launch, const Product &product);

// out += y of up to 8 tokens, act_out = Q(out * norm_weight) with the norm left to the next
// product; squares [8][rows / 32]. Only where can_defer_norm.
bool can_defer_norm(const Device &device, const FusedMatrix &matrix, int num_tokens);
void matmul_norm(const Launch &launch, const Product &product, const float *norm_weight,
                 const ActView &act_out, float *squares);

// act_out = Q(silu(gate x) * (up x)), 32 outputs to a block; both matrices of tile types with the
// same number of rows.
void matmul_swiglu(const Launch &launch, const DeviceMatrix &gate, const DeviceMatrix &up,
                   const ActView &act, const DeferredNorm *norm_in, int num_tokens,
                   const ActView &act_out);

}  // namespace cuda
}  // namespace xllm
