// The seats in the batch and their lifecycle:
//
//   FREE -> ACQUIRED -> PREFILLING -> READY -> DECODING -> READY ... -> FREE
//
// with CANCELLING on the way out and STALLED beside DECODING while a reader holds it up. Every
// state but FREE has an owner; each change of ownership raises the epoch, so a name kept from
// before is told from the present owner's. KV blocks belong to the sequence in the seat, not to the
// seat.
#pragma once

#include <cstdint>
#include <string>
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

struct Slot {
  int index = 0;
  uint64_t epoch = 0;  // 0: never owned
  SlotState state = SlotState::kFree;
  DecodeMode decode_mode = DecodeMode::kAuto;  // effective while owned
  uint64_t request_id = 0;                     // the request that runs in it; 0: none
  std::string owner;       // principal or secret of an acquired slot; empty: the request itself
  double lease_end_s = 0;  // monotonic clock; 0: as long as the request lives
  int num_tokens = 0;      // in the KV cache
  int num_blocks = 0;
};

// Not thread-safe: it belongs to the step loop's thread; others see copies.
class SlotTable {
 public:
  explicit SlotTable(int num_slots);

  // A free slot in state ACQUIRED under a new epoch, lowest index first; -1 when there is none.
  int acquire(DecodeMode mode, uint64_t request_id, std::string owner = {}, double lease_end_s = 0);
  // Moves an owned slot to another state.
  void set_state(int index, SlotState state);
  void set_usage(int index, int num_tokens, int num_blocks);
  // Back to FREE. Does nothing unless the slot is still in the ownership that `epoch` names, so a
  // late or repeated call cannot take it from its next owner.
  void release(int index, uint64_t epoch);

  int num_slots() const { return static_cast<int>(slots_.size()); }
  int num_free() const { return num_free_; }
  const Slot &slot(int index) const { return slots_[static_cast<size_t>(index)]; }
  const std::vector<Slot> &slots() const { return slots_; }

 private:
  std::vector<Slot> slots_;
  int num_free_;
};

}  // namespace xllm
