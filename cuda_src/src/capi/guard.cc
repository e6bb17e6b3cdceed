#include "capi/guard.h"

#include <algorithm>
#include <cstdlib>

namespace xllm {
namespace {

// Copies text into a fixed array, cut between characters.
void copy_text(const std::string &text, char *out, size_t capacity) {
  size_t size = std::min(text.size(), capacity - 1);
  if (size < text.size()) {
    while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0) == 0x80) --size;
  }
  std::memcpy(out, text.data(), size);
  out[size] = '\0';
}

std::string one_line(std::string text) {
  for (char &c : text) {
    if (c == '\n' || c == '\r' || c == '\0') c = ' ';
  }
  return text;
}

}  // namespace

xllm_status report(const Error &error, xllm_error *err) {
  const auto status = static_cast<xllm_status>(error.status());
  if (err == nullptr) return status;
  err->status = status;
  copy_text(one_line(error.message()), err->message, sizeof err->message);
  std::string details;
  for (const auto &[key, value] : error.details()) {
    const std::string line = key + "=" + one_line(value) + "\n";
    if (details.size() + line.size() < sizeof err->details) details += line;  // whole lines only
  }
  copy_text(details, err->details, sizeof err->details);
  return status;
}

void refuse(const char *field, const std::string &message) {
  throw Error(Status::kInvalidArgument, std::string(field) + ": " + message, {{"field", field}});
}

void require(const void *pointer, const char *name) {
  if (pointer == nullptr) refuse(name, "expected a pointer, found NULL");
}

void require_array(const void *pointer, size_t count, const char *name) {
  if (pointer == nullptr && count > 0) {
    refuse(name, "expected " + std::to_string(count) + " elements, found NULL");
  }
}

void require_range(int64_t value, int64_t min, int64_t max, const char *field) {
  if (value >= min && value <= max) return;
  refuse(field, "expected " + std::to_string(min) + " to " + std::to_string(max) + ", found " +
                    std::to_string(value));
}

void *allocate(size_t size_bytes) {
  void *memory = std::malloc(size_bytes > 0 ? size_bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace xllm
