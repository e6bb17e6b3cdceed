// The one door into libxllm_cuda.so. No CUDA header: factory.cc includes this file in builds that
// have no CUDA at all.
//
// The library carries its own copy of the core's lower layers, so the two sides must come from the
// same sources: the entry compares the ABI number and the build id before it reads anything else,
// and both travel as plain integers and C strings.
#pragma once

#include <cstdint>

namespace xllm {

class Backend;
struct BackendOptions;

// Rises with every change of backend.h or of this file that moves a field or a virtual function.
constexpr uint32_t kBackendAbi = 1;

constexpr const char *kCudaLibraryName = "libxllm_cuda.so";
constexpr const char *kCudaEntryName = "xllm_cuda_backend_create";

// Makes the CUDA backend of options.device_index.
//   abi, build_id   kBackendAbi and XLLM_BUILD_ID (build_info.h) of the caller
//   options         read during the call only
//   out             set only when the result is Status::kOk (0); the caller owns it and deletes it,
//   and never unloads the library message         [message_size] receives a zero-terminated line,
//   cut to fit, when the result is not kOk
// Returns a Status as int: kDevice for a foreign abi or build id, for a missing or too old driver
// and for a device that the library was not compiled for, kMemory where nothing fits. No exception
// leaves it.
using CudaBackendCreate = int (*)(uint32_t abi, const char *build_id, const BackendOptions *options,
                                  Backend **out, char *message, uint64_t message_size);

}  // namespace xllm

extern "C" __attribute__((visibility("default"))) int xllm_cuda_backend_create(
    uint32_t abi, const char *build_id, const xllm::BackendOptions *options, xllm::Backend **out,
    char *message, uint64_t message_size);
