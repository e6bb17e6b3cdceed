#include <dlfcn.h>

#include <string>

#include "backend/cuda/cublas.h"
#include "backend/cuda/cuda_check.h"

namespace xllm::cuda {
namespace {

// Of cublas_api.h; the values are part of the library's binary interface.
constexpr int kOpNone = 0, kOpTranspose = 1;
constexpr int kPedanticMath = 2;  // f32 products and sums, whatever the device could do faster
constexpr int kAllocationFailed = 3;

// By the major version of the runtime that this library was built with, then the other.
constexpr const char *kNames[] = {CUDART_VERSION >= 13000 ? "libcublas.so.13" : "libcublas.so.12",
                                  CUDART_VERSION >= 13000 ? "libcublas.so.12" : "libcublas.so.13"};

void check_cublas(int result, const char *what) {
  if (result == 0) return;
  if (result == kAllocationFailed) {
    throw Error(Status::kMemory, std::string("cuBLAS: ") + what + ": no memory left on the device");
  }
  throw Error(Status::kDevice,
              std::string("cuBLAS: ") + what + " failed with status " + std::to_string(result),
              {{"cublas_status", std::to_string(result)}});
}

}  // namespace

CublasLibrary::CublasLibrary(void *handle) : handle_(handle) {
  const auto find = [&](auto *function, const char *name) {
    void *found = dlsym(handle_, name);
    if (found == nullptr) {
      dlclose(handle_);
      throw Error(Status::kUnimplemented,
                  std::string("CUDA: the cuBLAS found here lacks ") + name +
                      "; install `xllm[cuda]` (nvidia-cublas), or use decode mode batched");
    }
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(found);
  };
  find(&create, "cublasCreate_v2");
  find(&destroy, "cublasDestroy_v2");
  find(&set_stream, "cublasSetStream_v2");
  find(&set_workspace, "cublasSetWorkspace_v2");
  find(&set_math_mode, "cublasSetMathMode");
  find(&sgemm, "cublasSgemm_v2");
}

// note: stays loaded. cuBLAS registers its kernels with the runtime, which does not forget them.
CublasLibrary::~CublasLibrary() = default;

std::shared_ptr<const CublasLibrary> CublasLibrary::open() {
  std::string reason;
  for (const char *name : kNames) {
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) return std::shared_ptr<const CublasLibrary>(new CublasLibrary(handle));
    const char *text = dlerror();
    reason += (reason.empty() ? "" : "; ") + std::string(text != nullptr ? text : name);
  }
  throw Error(Status::kUnimplemented,
              "CUDA: decode mode per-slot multiplies with cuBLAS, which is not here (" + reason +
                  "); install `xllm[cuda]` (nvidia-cublas) or the CUDA toolkit's libcublas, or use "
                  "decode mode batched");
}

Sgemm::Sgemm(std::shared_ptr<const CublasLibrary> library, Allocator *allocator,
             cudaStream_t stream)
    : library_(std::move(library)), memory_(allocator, kWorkspaceBytes) {
  check_cublas(library_->create(&handle_), "make a handle");
  try {
    check_cublas(library_->set_stream(handle_, stream), "set the stream");
    check_cublas(library_->set_workspace(handle_, memory_.data(), kWorkspaceBytes),
                 "set the workspace");
    check_cublas(library_->set_math_mode(handle_, kPedanticMath), "set the math mode");
  } catch (...) {
    (void)library_->destroy(handle_);
    throw;
  }
}

Sgemm::~Sgemm() { (void)library_->destroy(handle_); }

void Sgemm::multiply(const float *weights, int64_t rows, int64_t cols, const float *x,
                     int64_t x_stride, int num_tokens, float *out, int64_t out_stride,
                     bool is_added) const {
  const float one = 1, beta = is_added ? 1.0f : 0.0f;
  for (int64_t first = 0; first < num_tokens; first += kTokens) {
    // Its matrices stand column by column: ours, transposed.
    check_cublas(library_->sgemm(handle_, kOpTranspose, kOpNone, static_cast<int>(rows), kTokens,
                                 static_cast<int>(cols), &one, weights, static_cast<int>(cols),
                                 x + first * x_stride, static_cast<int>(x_stride), &beta,
                                 out + first * out_stride, static_cast<int>(out_stride)),
                 "multiply");
  }
}

}  // namespace xllm::cuda
