// Matrix products on the device: which kernel, which grid. The numbers do not depend on either
// (matmul_args.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "backend/cuda/act_format.cuh"
#include "backend/cuda/launch.h"

namespace xllm {
namespace cuda {

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
  bool has_plain_part() const;
};

// Sums of slices that a product left to the kernel after it: [num_slices][tokens of the product]
// [num_rows] f32, to be added up in order. data null: none.
struct Partials {
  const float *data = nullptr;
  int num_slices = 0;
  int num_rows = 0;
};

enum class Finish {
  kStore,   // out = y + bias
  kAdd,     // out += y + bias
  kSwiGlu,  // parts gate and up of tile types: out = silu(gate) * up
};

struct Product {
  const FusedMatrix *matrix;
  ActView act;   // the activations: of the two the one that is there
  ActRows rows;  // only where takes_rows
  int num_tokens;
  float *out;  // [num_tokens, out_stride] f32
  int64_t out_stride;
  const float *bias;  // [rows], or null; never with kSwiGlu
  Finish finish;
  float *partials;  // partial_floats
};

// Opts all kernels in to the shared memory they use; once per device.
void prepare_matmul(Device *device);

// Whether a product is faster when it quantises its rows itself.
bool takes_rows(const Device &device, const FusedMatrix &matrix, int num_tokens);

// `left`, where not null, may receive what the kernel that reads `out` next has to add to it
// (act_rows.h), together with the bias; null: the product is finished.
void matmul(const Launch &launch, const Product &product, Partials *left = nullptr);

// Where partial sums go: f32, this many for one matrix of so many rows and columns.
uint64_t partial_floats(int64_t rows, int64_t cols, int64_t num_tokens);

}  // namespace cuda
}  // namespace xllm
