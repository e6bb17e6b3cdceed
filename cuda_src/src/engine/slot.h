// The seats in the batch and their lifecycle:
//
//   FREE -> ACQUIRED -> PREFILLING -> READY -> DECODING -> READY ... -> FREE
//
// with CANCELLING on the way out and STALLED beside DECODING while a reader holds it up. A seat is
// taken by a request, for as long as it lives, or acquired by a caller under a lease. Each
// acquisition raises the epoch, so a name kept from before is told from the present owner's. KV
// blocks belong to the sequence in the seat, not to the seat.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "engine/decode_mode.h"

namespace xllm {

// Numbers are those of xllm_slot_state in xllm.h.
enum class SlotState : int {
  kFree = 0,
  kAcquired = 1,
  kPrefilling = 2,
  kReady = 3,
  kDecoding = 4,
  kStalled = 5,
  kCancelling = 6
};

// One ownership of a slot.
struct SlotRef {
  int32_t slot = -1;
  uint64_t epoch = 0;
};

// How the last ownership of an acquired slot ended; its blocks may not be back yet.
enum class SlotEnd { kNone, kReleased, kExpired };

struct Slot {
  int index = 0;
  uint64_t epoch = 0;  // 0: never owned
  SlotState state = SlotState::kFree;
  DecodeMode decode_mode = DecodeMode::kAuto;  // effective while owned
  uint64_t request_id = 0;                     // the request or call that runs in it; 0: none
  bool is_acquired = false;                    // by a caller; else free, or a request's own
  SlotEnd end = SlotEnd::kNone;
  double lease_end_s = 0;  // monotonic clock; of an acquired slot
  double owned_since_s = 0;
  int num_tokens = 0;  // in the KV cache; of an idle acquired slot with the one still to compute
  int num_blocks = 0;
};

// Not thread-safe: the engine guards it with a lock that is never held during a step.
class SlotTable {
 public:
  explicit SlotTable(int num_slots);

  // A free slot in state ACQUIRED under a new epoch for a request, lowest index first; -1 when
  // there is none.
  int take(DecodeMode mode, uint64_t request_id, double now_s);
  // The same for a caller with a lease. wanted: -1, or the one slot that will do.
  // Error(kNoFreeSlot), Error(kNotFound): no slot of that number.
  int acquire(DecodeMode mode, int32_t wanted, double lease_s, double now_s);
  // The slot of a present ownership. Error(kNotFound), Error(kLeaseLost): the lease is over and
  // nobody has it since, Error(kStaleEpoch): it ended otherwise.
  const Slot &owned(SlotRef ref, double now_s) const;
  void renew(SlotRef ref, double lease_s, double now_s);

  // A call begins to run in an acquired slot, and ends. After that it is READY, or ACQUIRED when it
  // holds no tokens, unless its ownership has ended meanwhile.
  void begin_call(int index, SlotState state, uint64_t request_id);
  void end_call(SlotRef ref, int num_tokens, int num_blocks);
  // The ownership is over: CANCELLING until it is released.
  void end_ownership(int index, SlotEnd end);

  // Moves an owned slot to another state; one that is CANCELLING stays so.
  void set_state(int index, SlotState state);
  void set_usage(int index, int num_tokens, int num_blocks);
  // The slot in which this request runs, if any, is CANCELLING.
  void set_cancelling(uint64_t request_id);
  // Back to FREE. Does nothing unless the slot is still in the ownership that `ref` names, so a
  // late or repeated call cannot take it from its next owner.
  void release(SlotRef ref);

  int num_slots() const { return static_cast<int>(slots_.size()); }
  int num_free() const { return num_free_; }
  int num_acquired() const { return num_acquired_; }
  const Slot &slot(int index) const { return slots_[static_cast<size_t>(index)]; }
  const std::vector<Slot> &slots() const { return slots_; }

 private:
  void occupy(Slot *slot, DecodeMode mode, double now_s);
  const Slot &at(int32_t index) const;
  Slot &edit(int index) { return slots_[static_cast<size_t>(index)]; }

  std::vector<Slot> slots_;
  int num_free_;
  int num_acquired_ = 0;
};

// "READY" for SlotState::kReady.
const char *slot_state_name(SlotState state);

// Throws Error(kSlotState) unless the slot is in one of `allowed`; `call` names the caller's
// operation.
void require_state(const Slot &slot, std::initializer_list<SlotState> allowed, const char *call);

}  // namespace xllm
