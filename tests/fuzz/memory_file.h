// A file in memory alone, for a reader that takes paths.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

namespace xllm {

class MemoryFile {
 public:
  MemoryFile(const uint8_t *data, size_t size) : number_(::memfd_create("gguf", MFD_CLOEXEC)) {
    if (number_ < 0) std::abort();
    while (size > 0) {
      const ssize_t written = ::write(number_, data, size);
      if (written <= 0) std::abort();
      data += written;
      size -= static_cast<size_t>(written);
    }
  }
  ~MemoryFile() { ::close(number_); }
  MemoryFile(const MemoryFile &) = delete;
  MemoryFile &operator=(const MemoryFile &) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(number_); }

 private:
  int number_;
};

}  // namespace xllm
