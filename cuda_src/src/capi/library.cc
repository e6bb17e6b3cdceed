// What is known of the library itself, and that both sides of the ABI number their enums alike.
#include <cstdlib>

#include "backend/factory.h"
#include "base/error.h"
#include "build_info.h"
#include "engine/event.h"
#include "engine/slot.h"
#include "tensor/kv.h"
#include "xllm.h"

// clang-format off
#define XLLM_STATUSES(X) \
  X(OK, kOk) X(INVALID_ARGUMENT, kInvalidArgument) X(PROMPT_TOO_LONG, kPromptTooLong) \
  X(NEVER_FITS, kNeverFits) X(NOT_FOUND, kNotFound) X(ALREADY_EXISTS, kAlreadyExists) \
  X(DECODE_MODE_MISMATCH, kDecodeModeMismatch) X(SLOT_STATE, kSlotState) \
  X(NO_TOKENIZER, kNoTokenizer) X(NO_CHAT_TEMPLATE, kNoChatTemplate) \
  X(QUEUE_FULL, kQueueFull) X(QUEUE_TIMEOUT, kQueueTimeout) X(NO_FREE_SLOT, kNoFreeSlot) \
  X(KV_EXHAUSTED, kKvExhausted) X(MEMORY, kMemory) X(STALE_EPOCH, kStaleEpoch) \
  X(LEASE_LOST, kLeaseLost) X(PERMISSION_DENIED, kPermissionDenied) \
  X(CANCELLED, kCancelled) X(DEADLINE_EXCEEDED, kDeadlineExceeded) \
  X(MODEL_MALFORMED, kModelMalformed) X(MODEL_TRUNCATED, kModelTruncated) \
  X(MODEL_UNSUPPORTED, kModelUnsupported) X(UNIMPLEMENTED, kUnimplemented) \
  X(NON_FINITE_LOGITS, kNonFiniteLogits) X(DEVICE, kDevice) X(ENGINE_FAILED, kEngineFailed) \
  X(DRAINING, kDraining) X(IO, kIo) X(INTERNAL, kInternal) \
  X(DEADLINE_UNREACHABLE, kDeadlineUnreachable)
// clang-format on

namespace xllm {
namespace {

#define XLLM_CHECK(c_name, name)                                                          \
  static_assert(static_cast<int>(XLLM_STATUS_##c_name) == static_cast<int>(Status::name), \
                "xllm.h and base/error.h disagree on " #c_name);
XLLM_STATUSES(XLLM_CHECK)
#undef XLLM_CHECK

template <typename C, typename Core>
constexpr bool is_same(C c_value, Core core_value) {
  return static_cast<int>(c_value) == static_cast<int>(core_value);
}

static_assert(is_same(XLLM_DECODE_MODE_AUTO, DecodeMode::kAuto));
static_assert(is_same(XLLM_DECODE_MODE_BATCHED, DecodeMode::kBatched));
static_assert(is_same(XLLM_DECODE_MODE_PER_SLOT, DecodeMode::kPerSlot));
static_assert(is_same(XLLM_BACKEND_AUTO, BackendKind::kAuto));
static_assert(is_same(XLLM_BACKEND_CPU, BackendKind::kCpu));
static_assert(is_same(XLLM_BACKEND_CUDA, BackendKind::kCuda));
static_assert(is_same(XLLM_KV_TYPE_F16, KvType::kF16));
static_assert(is_same(XLLM_KV_TYPE_INT8, KvType::kInt8));
static_assert(is_same(XLLM_KV_TYPE_INT4, KvType::kInt4));
static_assert(is_same(XLLM_DELIVERY_SHARED, Delivery::kShared));
static_assert(is_same(XLLM_DELIVERY_PRIVATE, Delivery::kPrivate));
static_assert(is_same(XLLM_EVENT_ACCEPTED, EventKind::kAccepted));
static_assert(is_same(XLLM_EVENT_PREFILL, EventKind::kPrefill));
static_assert(is_same(XLLM_EVENT_TOKEN, EventKind::kToken));
static_assert(is_same(XLLM_EVENT_FINISHED, EventKind::kFinished));
static_assert(is_same(XLLM_FINISH_NONE, FinishReason::kNone));
static_assert(is_same(XLLM_FINISH_EOS, FinishReason::kEos));
static_assert(is_same(XLLM_FINISH_STOP_TOKEN, FinishReason::kStopToken));
static_assert(is_same(XLLM_FINISH_STOP_STRING, FinishReason::kStopString));
static_assert(is_same(XLLM_FINISH_MAX_TOKENS, FinishReason::kMaxTokens));
static_assert(is_same(XLLM_FINISH_CONTEXT_FULL, FinishReason::kContextFull));
static_assert(is_same(XLLM_SLOT_FREE, SlotState::kFree));
static_assert(is_same(XLLM_SLOT_ACQUIRED, SlotState::kAcquired));
static_assert(is_same(XLLM_SLOT_PREFILLING, SlotState::kPrefilling));
static_assert(is_same(XLLM_SLOT_READY, SlotState::kReady));
static_assert(is_same(XLLM_SLOT_DECODING, SlotState::kDecoding));
static_assert(is_same(XLLM_SLOT_STALLED, SlotState::kStalled));
static_assert(is_same(XLLM_SLOT_CANCELLING, SlotState::kCancelling));

}  // namespace
}  // namespace xllm

extern "C" {

const char *xllm_status_name(xllm_status status) {
  switch (status) {
#define XLLM_NAME(c_name, name) \
  case XLLM_STATUS_##c_name:    \
    return #c_name;
    XLLM_STATUSES(XLLM_NAME)
#undef XLLM_NAME
  }
  return "UNKNOWN";
}

const char *xllm_version(void) { return XLLM_VERSION; }
int xllm_abi_version(void) { return XLLM_ABI_VERSION; }
const char *xllm_build_id(void) { return XLLM_BUILD_ID; }
void xllm_free(void *memory) { std::free(memory); }

}  // extern "C"
