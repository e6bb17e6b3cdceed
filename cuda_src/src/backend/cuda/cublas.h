// cuBLAS for the per-slot form, opened where it is first needed: the system's library, or the one
// of the Python package nvidia-cublas beside this one (its folder is in this library's run path).
// Declared here by hand, so that building needs no cuBLAS.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "backend/cuda/device_memory.h"

namespace xllm::cuda {

// The open library and what we call of it.
class CublasLibrary {
 public:
  // Throws Error(kUnimplemented) with the remedy where there is none.
  static std::shared_ptr<const CublasLibrary> open();
  ~CublasLibrary();
  CublasLibrary(const CublasLibrary &) = delete;
  CublasLibrary &operator=(const CublasLibrary &) = delete;

  using Handle = void *;
  int (*create)(Handle *);
  int (*destroy)(Handle);
  int (*set_stream)(Handle, cudaStream_t);
  int (*set_workspace)(Handle, void *, size_t);
  int (*set_math_mode)(Handle, int);
  int (*sgemm)(Handle, int op_a, int op_b, int m, int n, int k, const float *alpha, const float *a,
               int lda, const float *b, int ldb, const float *beta, float *c, int ldc);

 private:
  explicit CublasLibrary(void *handle);
  void *handle_;
};

// out = x W^T in f32, nothing rounded to less (no TF32). One per workspace.
class Sgemm {
 public:
  // Tokens of every call: the kernel that cuBLAS chooses, and so the bytes of a row, must not
  // depend on how many rows a step has. Buffers hold a multiple of this many rows.
  static constexpr int kTokens = 16;
  static constexpr uint64_t kWorkspaceBytes = uint64_t{32} << 20;  // what cuBLAS asks for on sm_90

  Sgemm(std::shared_ptr<const CublasLibrary> library, Allocator *allocator, cudaStream_t stream);
  ~Sgemm();
  Sgemm(const Sgemm &) = delete;
  Sgemm &operator=(const Sgemm &) = delete;

  // out [num_tokens, out_stride] = or += x [num_tokens, x_stride] * weights [rows, cols]^T. Rows up
  // to the next multiple of kTokens are written too.
  void multiply(const float *weights, int64_t rows, int64_t cols, const float *x, int64_t x_stride,
                int num_tokens, float *out, int64_t out_stride, bool is_added) const;

  uint64_t size_bytes() const { return memory_.size_bytes(); }

 private:
  std::shared_ptr<const CublasLibrary> library_;
  CublasLibrary::Handle handle_ = nullptr;
  Buffer memory_;
};

}  // namespace xllm::cuda
