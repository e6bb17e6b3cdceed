// A read-only file in memory. Pages come in as they are touched, are shared with every other
// process that maps the file, and cost no memory of our own. note: a file that someone else
// shortens while it is mapped ends the process with SIGBUS; replace model files by renaming, never
// in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace xllm {

// Owns the mapping and a descriptor of the file. Movable, not copyable; a move keeps addresses.
class MappedFile {
 public:
  MappedFile() = default;
  // Maps `path` (UTF-8). Throws Error(kNotFound) when there is no such file and Error(kIo) for what
  // the system refuses and for anything but a regular file. Messages hold the file's name without
  // its folder, and the system's words.
  explicit MappedFile(const std::string &path);
  MappedFile(MappedFile &&other) noexcept;
  MappedFile &operator=(MappedFile &&other) noexcept;
  MappedFile(const MappedFile &) = delete;
  MappedFile &operator=(const MappedFile &) = delete;
  ~MappedFile();

  // Page aligned; null for an empty file.
  const uint8_t *data() const { return data_; }
  uint64_t size() const { return size_; }
  // False when the file has become shorter since it was mapped: touching what is gone would end the
  // process with a signal. A file renamed over this one does not matter.
  bool is_whole() const noexcept;
  // The last part of the path, for messages.
  const std::string &name() const { return name_; }

  // Asks the system to read `size` bytes from `offset` ahead of use. A hint: returns at once and
  // never fails.
  void prefetch(uint64_t offset, uint64_t size) const noexcept;
  // Gives the pages that are in memory back to the system, which keeps them cached as long as it
  // likes; they come in again when touched. Addresses and contents stay as they are.
  void release_pages() const noexcept;

 private:
  void unmap() noexcept;

  const uint8_t *data_ = nullptr;
  uint64_t size_ = 0;
  int descriptor_ = -1;
  std::string name_;
};

// The part of `path` after the last '/'.
std::string file_name(const std::string &path);

}  // namespace xllm
