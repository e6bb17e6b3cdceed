// Slots as a resource: callers own one, fill it, decode it and give it back. The step loop keeps
// what an idle slot holds, lends it to the call that runs in it, and frees it when its ownership
// has ended.
#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "engine/clock.h"
#include "engine/engine.h"

namespace xllm {
namespace {

constexpr double kLongestLeaseS = 1e6;

void check_lease(double lease_s) {
  if (lease_s > 0 && lease_s <= kLongestLeaseS) return;
  throw Error(
      Status::kInvalidArgument,
      "lease_s: expected more than 0 and at most 1000000 seconds, found " + std::to_string(lease_s),
      {{"field", "lease_s"}});
}

SlotSnapshot snapshot(const Slot &slot, double now) {
  SlotSnapshot out;
  static_cast<Slot &>(out) = slot;
  if (slot.is_acquired) out.lease_left_s = std::max(0.0, slot.lease_end_s - now);
  if (slot.state != SlotState::kFree) out.owned_s = std::max(0.0, now - slot.owned_since_s);
  return out;
}

// The same error, told of one entry of several.
[[noreturn]] void rethrow_of(const Error &error, size_t entry) {
  Error::Details details = error.details();
  details.emplace_back("entry", std::to_string(entry));
  throw Error(error.status(), "entry " + std::to_string(entry) + ": " + error.message(), details);
}

}  // namespace

// ---- callers' side ----

void Engine::wake() {
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    has_slot_news_ = true;
  }
  inbox_changed_.notify_one();
}

bool Engine::get_slot(int32_t index, SlotSnapshot *out) const {
  const std::lock_guard<std::mutex> lock(slots_mutex_);
  if (index < 0 || index >= slots_.num_slots()) return false;
  *out = snapshot(slots_.slot(index), now_s());
  return true;
}

Slot Engine::owned_slot(SlotRef ref) const {
  const std::lock_guard<std::mutex> lock(slots_mutex_);
  return slots_.owned(ref, now_s());
}

SlotSnapshot Engine::acquire(DecodeMode mode, int32_t wanted, double lease_s) {
  const DecodeMode effective =
      resolve_decode_mode(config_.decode_mode, mode, "xllm_engine_acquire");
  check_lease(lease_s);
  check_lane(effective, 0);
  SlotSnapshot out;
  {
    const std::lock_guard<std::mutex> inbox_lock(inbox_mutex_);
    check_open();
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    const double now = now_s();
    out = snapshot(slots_.slot(slots_.acquire(effective, wanted, lease_s, now)), now);
  }
  wake();  // the lease is a timer of the loop's
  return out;
}

SlotSnapshot Engine::renew(SlotRef ref, double lease_s) {
  check_lease(lease_s);
  SlotSnapshot out;
  {
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    const double now = now_s();
    slots_.renew(ref, lease_s, now);
    out = snapshot(slots_.slot(ref.slot), now);
  }
  wake();
  return out;
}

SlotSnapshot Engine::release(SlotRef ref) {
  SlotSnapshot out;
  {
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    const double now = now_s();
    const Slot &slot = slots_.owned(ref, now);
    const bool is_empty = slot.request_id == 0 && slot.num_tokens == 0;
    slots_.end_ownership(ref.slot, SlotEnd::kReleased);
    if (is_empty) slots_.release(ref);  // nothing for the loop to give back
    out = snapshot(slot, now);
  }
  wake();
  return out;
}

SlotSnapshot Engine::fork(SlotRef ref, double lease_s) {
  check_lease(lease_s);
  SlotSnapshot out;
  {
    const std::lock_guard<std::mutex> inbox_lock(inbox_mutex_);
    check_open();
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    const double now = now_s();
    const Slot from = slots_.owned(ref, now);
    require_state(from, {SlotState::kReady}, "xllm_engine_fork");
    const int index = slots_.acquire(from.decode_mode, -1, lease_s, now);
    // Whatever is asked of the new slot comes to the loop behind the fork itself.
    slots_.set_usage(index, from.num_tokens, from.num_blocks);
    slots_.set_state(index, SlotState::kReady);
    forks_.push_back({ref, {index, slots_.slot(index).epoch}, from.decode_mode, next_id_});
    out = snapshot(slots_.slot(index), now);
  }
  wake();
  return out;
}

uint64_t Engine::prefill(SlotRef ref, RequestOptions options) {
  constexpr const char *kCall = "xllm_engine_prefill";
  validate(options, RequestKind::kPrefill, vocabulary_, plan_.max_seq_len);
  const size_t num_prompt = options.prompt.size();
  const Slot seen = owned_slot(ref);
  require_state(seen, {SlotState::kAcquired, SlotState::kReady}, kCall);
  check_prompt_length(static_cast<size_t>(seen.num_tokens) + num_prompt, plan_.max_seq_len);
  check_lane(seen.decode_mode, seen.num_tokens + static_cast<int>(num_prompt));
  auto request = make_request(RequestKind::kPrefill, std::move(options), seen.decode_mode);
  request->bind(ref);
  uint64_t id = 0;
  {
    const std::lock_guard<std::mutex> inbox_lock(inbox_mutex_);
    check_open();
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    const Slot &slot = slots_.owned(ref, now_s());
    require_state(slot, {SlotState::kAcquired, SlotState::kReady}, kCall);
    // Another call may have come and gone meanwhile.
    check_prompt_length(static_cast<size_t>(slot.num_tokens) + num_prompt, plan_.max_seq_len);
    id = push(std::move(request));
    slots_.begin_call(ref.slot, SlotState::kPrefilling, id);
  }
  inbox_changed_.notify_one();
  return id;
}

uint64_t Engine::decode_slot(SlotRef ref, RequestOptions options) {
  std::vector<RequestOptions> all;
  all.push_back(std::move(options));
  return start_decode("xllm_engine_decode_slot", DecodeMode::kPerSlot, {&ref, 1}, std::move(all))
      .front();
}

std::vector<uint64_t> Engine::decode_batch(Span<const SlotRef> refs,
                                           std::vector<RequestOptions> options) {
  return start_decode("xllm_engine_decode_batch", DecodeMode::kBatched, refs, std::move(options));
}

// With slots_mutex_ held.
void Engine::check_decode(const char *call, DecodeMode mode, SlotRef ref,
                          const RequestOptions &options) {
  const Slot &slot = slots_.owned(ref, now_s());
  check_slot_mode(config_.decode_mode, slot.decode_mode, mode, call);
  if (options.decode_mode != DecodeMode::kAuto) {
    check_slot_mode(config_.decode_mode, slot.decode_mode, options.decode_mode, call);
  }
  require_state(slot, {SlotState::kReady}, call);
  if (slot.num_tokens >= plan_.max_seq_len) {
    throw Error(Status::kSlotState,
                std::string(call) + ": slot " + std::to_string(slot.index) + " is full: it holds " +
                    std::to_string(slot.num_tokens) + " tokens, max_seq_len is " +
                    std::to_string(plan_.max_seq_len) + "; release it, or raise max_seq_len",
                {{"slot", std::to_string(slot.index)},
                 {"state", slot_state_name(slot.state)},
                 {"call", call}});
  }
}

// All or none.
std::vector<uint64_t> Engine::start_decode(const char *call, DecodeMode mode,
                                           Span<const SlotRef> refs,
                                           std::vector<RequestOptions> options) {
  if (refs.empty()) {
    throw Error(Status::kInvalidArgument, "slots: expected at least one, found none",
                {{"field", "slots"}});
  }
  const bool is_batch = mode == DecodeMode::kBatched;
  const auto for_each = [&](const auto &body) {
    for (size_t i = 0; i < refs.size(); ++i) {
      try {
        body(i);
      } catch (const Error &error) {
        if (!is_batch) throw;
        rethrow_of(error, i);
      }
    }
  };
  std::vector<bool> is_seen(static_cast<size_t>(config_.max_slots));
  for_each([&](size_t i) {
    const int32_t index = refs[i].slot;
    if (index < 0 || index >= config_.max_slots) return;  // NOT_FOUND below
    if (is_seen[static_cast<size_t>(index)]) {
      throw Error(Status::kInvalidArgument,
                  "slots: expected each slot once, found slot " + std::to_string(index) + " twice",
                  {{"field", "slots"}});
    }
    is_seen[static_cast<size_t>(index)] = true;
  });
  {
    // First what the slots say, then the fields: a call in the wrong mode hears of its mode.
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    for_each([&](size_t i) { check_decode(call, mode, refs[i], options[i]); });
  }
  for_each([&](size_t i) {
    validate(options[i], RequestKind::kDecode, vocabulary_, plan_.max_seq_len);
  });
  std::vector<std::unique_ptr<Request>> requests;
  for (size_t i = 0; i < refs.size(); ++i) {
    requests.push_back(make_request(RequestKind::kDecode, options[i], mode));
    requests.back()->bind(refs[i]);
  }
  std::vector<uint64_t> ids;
  {
    const std::lock_guard<std::mutex> inbox_lock(inbox_mutex_);
    check_open();
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    for_each([&](size_t i) { check_decode(call, mode, refs[i], options[i]); });
    // One batch of the inbox: all begin in the same step.
    for (size_t i = 0; i < refs.size(); ++i) {
      ids.push_back(push(std::move(requests[i])));
      slots_.begin_call(refs[i].slot, SlotState::kDecoding, ids.back());
    }
  }
  inbox_changed_.notify_one();
  return ids;
}

SlotStep Engine::step_slot(SlotRef ref, const SamplingParams &sampling, bool wants_logits) {
  RequestOptions options;
  options.sampling = sampling;
  options.max_tokens = 1;
  options.ignore_eos = true;
  options.delivery = Delivery::kPrivate;
  options.wants_logits = wants_logits;
  std::vector<RequestOptions> all(1, options);
  return collect(start_decode("xllm_engine_decode_step_slot", DecodeMode::kPerSlot, {&ref, 1},
                              std::move(all)))
      .front();
}

std::vector<SlotStep> Engine::step_batch(Span<const SlotRef> refs,
                                         Span<const SamplingParams> sampling, bool wants_logits) {
  std::vector<RequestOptions> all(refs.size());
  for (size_t i = 0; i < refs.size(); ++i) {
    all[i].sampling = sampling[i];
    all[i].max_tokens = 1;
    all[i].ignore_eos = true;
    all[i].delivery = Delivery::kPrivate;
    all[i].wants_logits = wants_logits;
  }
  return collect(
      start_decode("xllm_engine_decode_step_batch", DecodeMode::kBatched, refs, std::move(all)));
}

// Waits for the end of each of these calls, all of one token.
std::vector<SlotStep> Engine::collect(const std::vector<uint64_t> &ids) {
  std::vector<SlotStep> steps(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    bool is_finished = false;
    while (!is_finished) {
      for (Event &event : events_.take(ids[i], -1)) {
        if (event.kind == EventKind::kToken) {
          steps[i].token_id = event.token_id;
          steps[i].logits = std::move(event.logits);
        }
        if (event.kind != EventKind::kFinished) continue;
        steps[i].status = event.status;
        steps[i].message = std::move(event.message);
        is_finished = true;
      }
    }
  }
  return steps;
}

// ---- the step loop ----

void Engine::begin_on_slot(Request *request) {
  Lane *lane = find_lane(request->decode_mode());
  request->take_over(std::move(holdings_[static_cast<size_t>(request->ref().slot)]));
  Sequence &sequence = request->sequence;
  lane->scheduler.add(&sequence);
  request->set_admitted(now_s());
  if (request->kind() == RequestKind::kPrefill) {
    totals_.num_prompt_tokens += static_cast<uint64_t>(sequence.num_prompt);
    totals_.num_cached_tokens += static_cast<uint64_t>(sequence.num_cached);
  }
  new_events_.push_back(request->accepted_event());
  if (request->kind() == RequestKind::kPrefill && sequence.num_to_compute() == 0) {
    request->complete_prefill();
    finish(request->id(), Status::kOk, "");
  }
}

// Before any ownership ends in this step: both slots are still what they were when it was asked
// for. See end_slots for those that are asked for meanwhile.
void Engine::fork_slot(const Fork &fork) {
  find_lane(fork.mode)->scheduler.fork(holdings_[static_cast<size_t>(fork.from.slot)],
                                       &holdings_[static_cast<size_t>(fork.to.slot)]);
}

// Ends every ownership that was released or whose lease is over.
void Engine::end_slots(double now) {
  std::vector<Slot> ending;
  {
    const std::lock_guard<std::mutex> inbox_lock(inbox_mutex_);
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    if (slots_.num_acquired() == 0) return;
    // Of a fork that this step has not taken in yet, both slots are left for the next step: it has
    // still to find what the one holds, and to fill the other.
    const auto is_forking = [&](const Slot &slot) {
      return std::any_of(forks_.begin(), forks_.end(), [&](const Fork &fork) {
        return fork.from.slot == slot.index || fork.to.slot == slot.index;
      });
    };
    for (int i = 0; i < slots_.num_slots(); ++i) {
      const Slot &slot = slots_.slot(i);
      if (!slot.is_acquired) continue;
      if (slot.end == SlotEnd::kNone && now >= slot.lease_end_s) {
        slots_.end_ownership(i, SlotEnd::kExpired);
      }
      if (slot.end != SlotEnd::kNone && !is_forking(slot)) ending.push_back(slot);
    }
  }
  for (const Slot &slot : ending) {
    if (slot.request_id != 0) {
      // A call that is still in the inbox is ended in the next step, which has begun to be due.
      if (requests_.count(slot.request_id) == 0) continue;
      finish(slot.request_id, Status::kLeaseLost,
             slot.end == SlotEnd::kExpired ? "the slot's lease is over; renew it in time"
                                           : "the slot was released under the call");
    }
    free_slot(slot);
  }
}

void Engine::free_slot(const Slot &slot) {
  Sequence &held = holdings_[static_cast<size_t>(slot.index)];
  if (Lane *lane = find_lane(slot.decode_mode)) lane->cache.release_all(&held.blocks);
  held = Sequence(config_.block_size);
  has_progress_ = true;  // a seat and its blocks are free for those who wait
  const std::lock_guard<std::mutex> lock(slots_mutex_);
  slots_.release({slot.index, slot.epoch});
}

}  // namespace xllm
