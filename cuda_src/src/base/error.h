// Errors of the core. Expected outcomes (no free block, queue full) are return values; an exception
// is for what ends a load, a request or the engine. None crosses the C ABI: capi turns each into an
// xllm_status and a message.
#pragma once

#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace xllm {

// Same numbers as xllm_status in xllm.h (asserted in capi); one value per reason that a caller can
// act on.
enum class Status : int {
  kOk = 0,
  kInvalidArgument = 1,       // a field is wrong; `field` in the details names it
  kPromptTooLong = 2,         // prompt leaves no room in max_seq_len
  kNeverFits = 3,             // would not fit an empty KV pool
  kNotFound = 4,              // file, request or slot unknown
  kAlreadyExists = 5,         // id in use
  kDecodeModeMismatch = 6,    // the engine or slot decodes the other way
  kSlotState = 7,             // call not allowed in this state of the slot
  kNoTokenizer = 8,           // token ids work, text does not
  kNoChatTemplate = 9,        //
  kQueueFull = 10,            // retry later
  kQueueTimeout = 11,         // waited longer than the request allowed
  kNoFreeSlot = 12,           //
  kKvExhausted = 13,          //
  kMemory = 14,               // does not fit: needed, free and remedy are in the details
  kStaleEpoch = 15,           // the slot changed hands
  kLeaseLost = 16,            //
  kPermissionDenied = 17,     // foreign slot
  kCancelled = 18,            //
  kDeadlineExceeded = 19,     //
  kModelMalformed = 20,       // the file contradicts its format
  kModelTruncated = 21,       // the file ends early
  kModelUnsupported = 22,     // version, architecture, tensor type or tokenizer unknown
  kUnimplemented = 23,        // this build or model lacks it
  kNonFiniteLogits = 24,      // a row of logits held NaN or infinity
  kDevice = 25,               // CUDA or driver fault
  kEngineFailed = 26,         // the step loop has stopped
  kDraining = 27,             // no new work
  kIo = 28,                   // the operating system refused
  kInternal = 29,             // a broken invariant of ours
  kDeadlineUnreachable = 30,  // refused before it began: its time would be over first
};

// An error with a machine-readable status, one line of text that names the thing, what was expected
// and what was found, and details for programs (key, value): "field", "bytes_needed",
// "engine_mode", ...
// note: default visibility, because the CUDA library throws it across the boundary of a shared
// object.
class __attribute__((visibility("default"))) Error : public std::exception {
 public:
  using Details = std::vector<std::pair<std::string, std::string>>;

  Error(Status status, std::string message, Details details = {})
      : status_(status), message_(std::move(message)), details_(std::move(details)) {}

  Status status() const { return status_; }
  const std::string &message() const { return message_; }
  const Details &details() const { return details_; }
  const char *what() const noexcept override { return message_.c_str(); }

 private:
  Status status_;
  std::string message_;
  Details details_;
};

// Reports a failed XLLM_DCHECK on stderr and aborts.
[[noreturn]] void check_failed(const char *expression, const char *file, int line);

}  // namespace xllm

// For our own mistakes only: never reachable from a request or a file. Compiled out of release
// builds.
#ifdef NDEBUG
#define XLLM_DCHECK(expression) static_cast<void>(sizeof(!(expression)))
#else
#define XLLM_DCHECK(expression) \
  ((expression) ? static_cast<void>(0) : ::xllm::check_failed(#expression, __FILE__, __LINE__))
#endif
