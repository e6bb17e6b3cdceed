#include "base/mmap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace xllm {
namespace {

[[noreturn]] void fail(const std::string &name, int error_number) {
  const bool is_absent = error_number == ENOENT || error_number == ENOTDIR;
  throw Error(is_absent ? Status::kNotFound : Status::kIo,
              name + ": " + std::generic_category().message(error_number));
}

// A file descriptor that closes itself.
struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

// A name for messages of one line.
std::string without_controls(std::string name) {
  for (char &c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return name;
}

}  // namespace

std::string file_name(const std::string &path) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

MappedFile::MappedFile(const std::string &path) : name_(without_controls(file_name(path))) {
  if (path.find('\0') != std::string::npos) fail(name_, ENOENT);
  // O_NONBLOCK: a named pipe is refused below instead of being waited for.
  Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.number < 0) fail(name_, errno);
  struct stat info{};
  if (::fstat(file.number, &info) != 0) fail(name_, errno);
  if (S_ISDIR(info.st_mode)) fail(name_, EISDIR);
  if (!S_ISREG(info.st_mode)) throw Error(Status::kIo, name_ + ": expected a regular file");
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size == 0) return;
  if (size > std::numeric_limits<size_t>::max()) fail(name_, EFBIG);
  void *memory = ::mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_PRIVATE, file.number, 0);
  if (memory == MAP_FAILED) fail(name_, errno);
  data_ = static_cast<const uint8_t *>(memory);
  size_ = size;
  descriptor_ = std::exchange(file.number, -1);
}

bool MappedFile::is_whole() const noexcept {
  struct stat info{};
  if (descriptor_ < 0) return true;  // nothing is mapped
  return ::fstat(descriptor_, &info) == 0 && static_cast<uint64_t>(info.st_size) >= size_;
}

MappedFile::MappedFile(MappedFile &&other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      name_(std::move(other.name_)) {}

MappedFile &MappedFile::operator=(MappedFile &&other) noexcept {
  if (this != &other) {
    unmap();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    descriptor_ = std::exchange(other.descriptor_, -1);
    name_ = std::move(other.name_);
  }
  return *this;
}

MappedFile::~MappedFile() { unmap(); }

void MappedFile::unmap() noexcept {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t *>(data_), static_cast<size_t>(size_));
  if (descriptor_ >= 0) ::close(descriptor_);
  data_ = nullptr;
  size_ = 0;
  descriptor_ = -1;
}

void MappedFile::prefetch(uint64_t offset, uint64_t size) const noexcept {
  if (offset >= size_) return;
  if (size > size_ - offset) size = size_ - offset;
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t start = offset / page * page;
  // Failure means only that pages come in later, as they are touched.
  static_cast<void>(::madvise(const_cast<uint8_t *>(data_) + start,
                              static_cast<size_t>(offset - start + size), MADV_WILLNEED));
}

void MappedFile::release_pages() const noexcept {
  if (data_ == nullptr) return;
  // Nothing was ever written to the mapping, so dropping its pages loses nothing.
  static_cast<void>(
      ::madvise(const_cast<uint8_t *>(data_), static_cast<size_t>(size_), MADV_DONTNEED));
}

}  // namespace xllm
