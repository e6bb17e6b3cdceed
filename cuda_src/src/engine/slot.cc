#include "engine/slot.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace xllm {
namespace {

std::string ownership(SlotRef ref) {
  return "slot " + std::to_string(ref.slot) + ", epoch " + std::to_string(ref.epoch);
}

}  // namespace

const char *slot_state_name(SlotState state) {
  constexpr const char *kNames[] = {"FREE",     "ACQUIRED", "PREFILLING", "READY",
                                    "DECODING", "STALLED",  "CANCELLING"};
  return kNames[static_cast<size_t>(state)];
}

void require_state(const Slot &slot, std::initializer_list<SlotState> allowed, const char *call) {
  if (std::find(allowed.begin(), allowed.end(), slot.state) != allowed.end()) return;
  std::string names;
  for (const SlotState state : allowed) {
    if (!names.empty()) names += " or ";
    names += slot_state_name(state);
  }
  std::string remedy = "wait for the call that runs in it, or cancel it";
  if (slot.state == SlotState::kAcquired) remedy = "prefill it first";
  throw Error(Status::kSlotState,
              std::string(call) + ": slot " + std::to_string(slot.index) + ": expected " + names +
                  ", found " + slot_state_name(slot.state) + "; " + remedy,
              {{"slot", std::to_string(slot.index)},
               {"state", slot_state_name(slot.state)},
               {"call", call}});
}

SlotTable::SlotTable(int num_slots) : slots_(static_cast<size_t>(num_slots)), num_free_(num_slots) {
  for (int i = 0; i < num_slots; ++i) edit(i).index = i;
}

const Slot &SlotTable::at(int32_t index) const {
  if (index < 0 || index >= num_slots()) {
    throw Error(Status::kNotFound, "slot " + std::to_string(index) + ": expected 0 to " +
                                       std::to_string(num_slots() - 1));
  }
  return slot(index);
}

void SlotTable::occupy(Slot *slot, DecodeMode mode, double now_s) {
  XLLM_DCHECK(mode != DecodeMode::kAuto);
  slot->state = SlotState::kAcquired;
  slot->decode_mode = mode;
  slot->end = SlotEnd::kNone;
  slot->owned_since_s = now_s;
  ++slot->epoch;
  --num_free_;
}

int SlotTable::take(DecodeMode mode, uint64_t request_id, double now_s) {
  for (Slot &slot : slots_) {
    if (slot.state != SlotState::kFree) continue;
    occupy(&slot, mode, now_s);
    slot.request_id = request_id;
    return slot.index;
  }
  return -1;
}

int SlotTable::acquire(DecodeMode mode, int32_t wanted, double lease_s, double now_s) {
  if (wanted >= 0 && at(wanted).state != SlotState::kFree) {
    throw Error(Status::kNoFreeSlot,
                "slot " + std::to_string(wanted) + " is taken (" +
                    slot_state_name(at(wanted).state) + "); take any other, or retry later",
                {{"slot", std::to_string(wanted)}});
  }
  for (Slot &slot : slots_) {
    if (slot.state != SlotState::kFree || (wanted >= 0 && slot.index != wanted)) continue;
    occupy(&slot, mode, now_s);
    slot.is_acquired = true;
    slot.lease_end_s = now_s + lease_s;
    ++num_acquired_;
    return slot.index;
  }
  throw Error(Status::kNoFreeSlot,
              "all " + std::to_string(num_slots()) +
                  " slots are taken; retry later, release one, or raise max_slots",
              {{"max_slots", std::to_string(num_slots())}});
}

const Slot &SlotTable::owned(SlotRef ref, double now_s) const {
  const Slot &slot = at(ref.slot);
  const bool is_last = slot.epoch == ref.epoch && ref.epoch > 0;
  const bool is_in_time = now_s < slot.lease_end_s;
  if (is_last && slot.is_acquired && slot.end == SlotEnd::kNone && is_in_time) return slot;
  const bool is_expired =
      slot.end == SlotEnd::kExpired || (slot.is_acquired && slot.end == SlotEnd::kNone);
  if (is_last && is_expired) {
    throw Error(Status::kLeaseLost, ownership(ref) + ": the lease is over; acquire a slot again");
  }
  throw Error(Status::kStaleEpoch, ownership(ref) + ": not the present ownership, which is epoch " +
                                       std::to_string(slot.epoch) +
                                       (slot.end == SlotEnd::kNone ? "" : " and has ended") +
                                       "; acquire a slot again");
}

void SlotTable::renew(SlotRef ref, double lease_s, double now_s) {
  edit(owned(ref, now_s).index).lease_end_s = now_s + lease_s;
}

void SlotTable::begin_call(int index, SlotState state, uint64_t request_id) {
  edit(index).state = state;
  edit(index).request_id = request_id;
}

void SlotTable::end_call(SlotRef ref, int num_tokens, int num_blocks) {
  Slot &slot = edit(ref.slot);
  if (slot.epoch != ref.epoch || slot.state == SlotState::kFree) return;
  slot.request_id = 0;
  set_usage(ref.slot, num_tokens, num_blocks);
  if (slot.end != SlotEnd::kNone) return;
  slot.state = num_tokens > 0 ? SlotState::kReady : SlotState::kAcquired;
}

void SlotTable::end_ownership(int index, SlotEnd end) {
  edit(index).end = end;
  edit(index).state = SlotState::kCancelling;
}

void SlotTable::set_state(int index, SlotState state) {
  Slot &slot = edit(index);
  XLLM_DCHECK(slot.state != SlotState::kFree && state != SlotState::kFree);
  if (slot.state != SlotState::kCancelling) slot.state = state;
}

void SlotTable::set_usage(int index, int num_tokens, int num_blocks) {
  edit(index).num_tokens = num_tokens;
  edit(index).num_blocks = num_blocks;
}

void SlotTable::set_cancelling(uint64_t request_id) {
  for (Slot &slot : slots_) {
    if (slot.request_id == request_id) slot.state = SlotState::kCancelling;
  }
}

void SlotTable::release(SlotRef ref) {
  if (ref.slot < 0) return;
  Slot &slot = edit(ref.slot);
  if (slot.state == SlotState::kFree || slot.epoch != ref.epoch) return;
  if (slot.is_acquired) --num_acquired_;
  slot.state = SlotState::kFree;
  slot.decode_mode = DecodeMode::kAuto;
  slot.request_id = 0;
  slot.is_acquired = false;
  slot.lease_end_s = 0;
  slot.owned_since_s = 0;
  slot.num_tokens = 0;
  slot.num_blocks = 0;
  ++num_free_;
}

}  // namespace xllm
