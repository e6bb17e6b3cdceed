#include "engine/slot.h"

#include <utility>

#include "base/error.h"

namespace xllm {

SlotTable::SlotTable(int num_slots) : slots_(static_cast<size_t>(num_slots)), num_free_(num_slots) {
  for (int i = 0; i < num_slots; ++i) slots_[static_cast<size_t>(i)].index = i;
}

int SlotTable::acquire(DecodeMode mode, uint64_t request_id, std::string owner,
                       double lease_end_s) {
  XLLM_DCHECK(mode != DecodeMode::kAuto);
  for (Slot &slot : slots_) {
    if (slot.state != SlotState::kFree) continue;
    slot.state = SlotState::kAcquired;
    slot.decode_mode = mode;
    slot.request_id = request_id;
    slot.owner = std::move(owner);
    slot.lease_end_s = lease_end_s;
    ++slot.epoch;
    --num_free_;
    return slot.index;
  }
  return -1;
}

void SlotTable::set_state(int index, SlotState state) {
  Slot &slot = slots_[static_cast<size_t>(index)];
  XLLM_DCHECK(slot.state != SlotState::kFree && state != SlotState::kFree);
  slot.state = state;
}

void SlotTable::set_usage(int index, int num_tokens, int num_blocks) {
  Slot &slot = slots_[static_cast<size_t>(index)];
  slot.num_tokens = num_tokens;
  slot.num_blocks = num_blocks;
}

void SlotTable::release(int index, uint64_t epoch) {
  if (index < 0) return;
  Slot &slot = slots_[static_cast<size_t>(index)];
  if (slot.state == SlotState::kFree || slot.epoch != epoch) return;
  slot.state = SlotState::kFree;
  slot.decode_mode = DecodeMode::kAuto;
  slot.request_id = 0;
  slot.owner.clear();
  slot.lease_end_s = 0;
  slot.num_tokens = 0;
  slot.num_blocks = 0;
  ++num_free_;
}

}  // namespace xllm
