#include "backend/factory.h"

#include <dlfcn.h>

#include <string>

#include "backend/cpu/cpu_backend.h"
#include "backend/cuda/cuda_entry.h"
#include "base/error.h"
#include "build_info.h"

namespace xllm {
namespace {

// An open shared object. The driver is closed again; our own library stays loaded, because the
// backend's code lives in it.
class Library {
 public:
  explicit Library(const std::string &path) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      const char *text = dlerror();
      error_ = text != nullptr ? text : "cannot be loaded";
    }
  }
  Library(const Library &) = delete;
  Library &operator=(const Library &) = delete;
  ~Library() {
    if (handle_ != nullptr) dlclose(handle_);
  }

  template <typename Function>
  Function find(const char *name) const {
    return handle_ != nullptr ? reinterpret_cast<Function>(dlsym(handle_, name)) : nullptr;
  }
  explicit operator bool() const { return handle_ != nullptr; }
  const std::string &error() const { return error_; }
  void keep_loaded() { handle_ = nullptr; }

 private:
  void *handle_;
  std::string error_;
};

// Whether the driver is there and shows a device; *reason says why not. Takes the time of cuInit,
// no device memory.
bool driver_has_device(std::string *reason) {
  Library driver("libcuda.so.1");
  if (!driver) {
    *reason = "no NVIDIA driver (libcuda.so.1) on this machine";
    return false;
  }
  const auto init = driver.find<int (*)(unsigned)>("cuInit");
  const auto count_devices = driver.find<int (*)(int *)>("cuDeviceGetCount");
  driver.keep_loaded();  // note: the driver keeps threads and exit handlers; unloading it after
                         // cuInit is not safe
  if (init == nullptr || count_devices == nullptr) {
    *reason = "libcuda.so.1 lacks cuInit or cuDeviceGetCount";
    return false;
  }
  int count = 0;
  const int result = init(0);
  const int counted = result == 0 ? count_devices(&count) : result;
  if (counted != 0) {
    *reason = "the NVIDIA driver answers error " + std::to_string(counted) +
              " (is a GPU present and permitted here?)";
    return false;
  }
  if (count == 0) *reason = "the NVIDIA driver shows no device";
  return count > 0;
}

// The folder of the shared object (or program) that this code was linked into, with its slash;
// empty when unknown.
std::string own_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void *>(&own_folder), &info) == 0 || info.dli_fname == nullptr)
    return "";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "./" : path.substr(0, slash + 1);
}

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions &options) {
  std::string reason;
  if (!driver_has_device(&reason)) {
    throw Error(Status::kDevice,
                "CUDA backend: " + reason + "; install the driver, or use the CPU backend");
  }
  Library library(own_folder() + kCudaLibraryName);
  if (!library) {
    throw Error(
        Status::kDevice,
        "CUDA backend: " + library.error() +
            "; this installation was built without CUDA: build it where nvcc is found, or use the "
            "CPU backend");
  }
  const auto create = library.find<CudaBackendCreate>(kCudaEntryName);
  if (create == nullptr) {
    throw Error(
        Status::kDevice,
        std::string("CUDA backend: ") + kCudaLibraryName + " has no " + kCudaEntryName +
            "; it belongs to another version: install core and CUDA library from one build");
  }
  char message[1024] = "";
  Backend *backend = nullptr;
  const int status =
      create(kBackendAbi, XLLM_BUILD_ID, &options, &backend, message, sizeof message);
  if (status != 0)
    throw Error(static_cast<Status>(status), std::string("CUDA backend: ") + message);
  library.keep_loaded();
  return std::unique_ptr<Backend>(backend);
}

}  // namespace

std::unique_ptr<Backend> make_backend(BackendKind kind, const BackendOptions &options) {
  if (kind == BackendKind::kCuda) return make_cuda_backend(options);
  if (kind == BackendKind::kAuto) {
    std::string reason;
    try {
      if (driver_has_device(&reason)) return make_cuda_backend(options);
    } catch (const Error &error) {
      if (error.status() != Status::kDevice)
        throw;  // a GPU that works but lacks memory is the caller's to know
      reason = error.message();
    }
    if (options.log) options.log("backend: CPU (" + reason + ")");
  }
  return cpu::make_cpu_backend(options);
}

}  // namespace xllm
