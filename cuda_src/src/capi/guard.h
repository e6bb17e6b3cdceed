// What every function of the C ABI does around its body: check pointers, turn exceptions into a
// status, describe the failure.
#pragma once

#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "base/error.h"
#include "xllm.h"

namespace xllm {

// Describes the error in *err (may be null) and returns its status.
xllm_status report(const Error &error, xllm_error *err);

// Runs a function's body and turns what it throws into a status. Nothing gets past this.
template <typename Body>
xllm_status guarded(xllm_error *err, Body &&body) noexcept {
  try {
    if (err != nullptr) {
      err->status = XLLM_STATUS_OK;
      err->message[0] = '\0';
      err->details[0] = '\0';
    }
    try {
      body();
      return XLLM_STATUS_OK;
    } catch (const Error &error) {
      return report(error, err);
    } catch (const std::bad_alloc &) {
      return report(Error(Status::kMemory, "out of memory; free some, or use smaller limits"), err);
    } catch (const std::exception &error) {
      return report(Error(Status::kInternal, std::string("unexpected: ") + error.what()), err);
    }
  } catch (...) {  // no memory left to describe it
    if (err != nullptr) err->status = XLLM_STATUS_INTERNAL;
    return XLLM_STATUS_INTERNAL;
  }
}

// Each throws Error(kInvalidArgument) with detail "field" where its condition does not hold.
[[noreturn]] void refuse(const char *field, const std::string &message);
void require(const void *pointer, const char *name);
void require_array(const void *pointer, size_t count, const char *name);
void require_range(int64_t value, int64_t min, int64_t max, const char *field);

// The number in a caller's enum, which may be none of its values: reading such a one as the enum
// would be undefined.
template <typename Enum>
int enum_number(const Enum &value) {
  static_assert(sizeof value == sizeof(int));
  int number;
  std::memcpy(&number, &value, sizeof number);
  return number;
}

// Memory for xllm_free.
void *allocate(size_t size_bytes);

// A caller's struct of this or an earlier version: fields that it does not have keep their
// defaults. null: the defaults.
template <typename T>
T read_struct(const T *in, void (*init)(T *), const char *name) {
  T out;
  init(&out);
  if (in == nullptr) return out;
  const size_t size = in->struct_size;
  if (size <= sizeof(size_t) || size > sizeof(T)) {
    refuse("struct_size", std::string(name) + ": expected at most " + std::to_string(sizeof(T)) +
                              ", found " + std::to_string(size) +
                              "; call its _init function, with one version of header and library");
  }
  std::memcpy(static_cast<void *>(&out), in, size);
  return out;
}

}  // namespace xllm
