// The table of slots: epochs, leases and states, by itself.

#include "engine/slot.h"

#include <gtest/gtest.h>

#include "engine_fixture.h"

namespace xllm {
namespace {

constexpr DecodeMode kMode = DecodeMode::kBatched;

Status owned_status(const SlotTable &table, SlotRef ref, double now_s) {
  return status_of([&] { table.owned(ref, now_s); });
}

TEST(SlotTable, EachAcquisitionRaisesTheEpoch) {
  SlotTable table(2);
  const int first = table.acquire(kMode, -1, 10, 0);
  const SlotRef ref = {first, table.slot(first).epoch};
  EXPECT_EQ(table.owned(ref, 1).state, SlotState::kAcquired);
  table.end_ownership(first, SlotEnd::kReleased);
  EXPECT_EQ(owned_status(table, ref, 1), Status::kStaleEpoch);
  table.release(ref);
  EXPECT_EQ(owned_status(table, ref, 1), Status::kStaleEpoch);
  EXPECT_EQ(table.acquire(kMode, -1, 10, 2), first);
  EXPECT_EQ(table.slot(first).epoch, ref.epoch + 1);
  EXPECT_EQ(owned_status(table, ref, 3), Status::kStaleEpoch);
  table.release(ref);  // late: it is another's by now
  EXPECT_EQ(table.slot(first).state, SlotState::kAcquired);
}

TEST(SlotTable, ALeaseEndsAtItsTimeUnlessRenewed) {
  SlotTable table(1);
  const SlotRef ref = {table.acquire(kMode, -1, 10, 0), 1};
  EXPECT_EQ(owned_status(table, ref, 9.9), Status::kOk);
  table.renew(ref, 10, 9);
  EXPECT_EQ(owned_status(table, ref, 18.9), Status::kOk);
  EXPECT_EQ(owned_status(table, ref, 19), Status::kLeaseLost);  // nobody has freed it yet
  EXPECT_EQ(status_of([&] { table.renew(ref, 10, 19); }), Status::kLeaseLost);
  table.end_ownership(0, SlotEnd::kExpired);
  table.release(ref);
  EXPECT_EQ(owned_status(table, ref, 20), Status::kLeaseLost);
  table.acquire(kMode, -1, 10, 21);
  EXPECT_EQ(owned_status(table, ref, 22), Status::kStaleEpoch);
}

TEST(SlotTable, RequestsAndCallersShareTheSeats) {
  SlotTable table(2);
  EXPECT_EQ(table.take(kMode, 7, 0), 0);
  EXPECT_EQ(status_of([&] { table.acquire(kMode, 0, 10, 0); }), Status::kNoFreeSlot);
  EXPECT_EQ(table.acquire(kMode, 1, 10, 0), 1);
  EXPECT_EQ(status_of([&] { table.acquire(kMode, -1, 10, 0); }), Status::kNoFreeSlot);
  EXPECT_EQ(status_of([&] { table.acquire(kMode, 2, 10, 0); }), Status::kNotFound);
  EXPECT_EQ(table.take(kMode, 8, 0), -1);
  // A request's seat is nobody's to use, whoever guesses its epoch.
  EXPECT_EQ(owned_status(table, {0, 1}, 0), Status::kStaleEpoch);
  EXPECT_EQ(owned_status(table, {0, 0}, 0), Status::kStaleEpoch);
  EXPECT_EQ(owned_status(table, {-1, 1}, 0), Status::kNotFound);
}

TEST(SlotTable, ACallLeavesItsSlotReadyUnlessTheOwnershipEndedMeanwhile) {
  SlotTable table(1);
  const SlotRef ref = {table.acquire(kMode, -1, 10, 0), 1};
  table.begin_call(0, SlotState::kPrefilling, 5);
  table.set_cancelling(5);
  table.set_state(0, SlotState::kPrefilling);  // a step that was under way
  EXPECT_EQ(table.slot(0).state, SlotState::kCancelling);
  table.end_call(ref, 0, 0);
  EXPECT_EQ(table.slot(0).state, SlotState::kAcquired);
  table.begin_call(0, SlotState::kPrefilling, 6);
  table.end_call(ref, 4, 1);
  EXPECT_EQ(table.slot(0).state, SlotState::kReady);
  table.begin_call(0, SlotState::kDecoding, 7);
  table.end_ownership(0, SlotEnd::kReleased);
  table.end_call(ref, 5, 1);
  EXPECT_EQ(table.slot(0).state, SlotState::kCancelling);
  table.release(ref);
  EXPECT_EQ(table.num_free(), 1);
  EXPECT_EQ(table.num_acquired(), 0);
}

}  // namespace
}  // namespace xllm
