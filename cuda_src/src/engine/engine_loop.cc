// The step loop's thread: waits for something to do, takes in what callers have asked for, ends
// what is late, and gives each lane its turn.
#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "base/error.h"
#include "engine/clock.h"
#include "engine/engine.h"

namespace xllm {
namespace {

constexpr double kIdleHeartbeatS = 0.5;

}  // namespace

void Engine::run() {
  try {
    while (wait_for_work()) step();
  } catch (const std::exception &error) {
    fail(error.what());
  }
}

// False when the loop is to end.
bool Engine::wait_for_work() {
  std::unique_lock<std::mutex> lock(inbox_mutex_);
  while (true) {
    heartbeat_ns_.store(now_ns());
    if (is_stopping_) return false;
    const bool has_news = !inbox_.empty() || !cancels_.empty() || !masks_.empty() ||
                          !forks_.empty() || has_slot_news_;
    has_slot_news_ = false;
    const double left_s = timer_s_ - now_s();
    if (has_progress_ || has_news || left_s <= 0) return true;
    // Requests may be live all the same, waiting for a seat or for blocks that owned slots hold.
    inbox_changed_.wait_for(lock, std::chrono::duration<double>(std::min(left_s, kIdleHeartbeatS)));
  }
}

void Engine::step() {
  has_progress_ = false;
  take_inbox();
  if (config_.on_taken) config_.on_taken();
  const double taken_s = now_s();
  end_late_requests(taken_s);
  end_slots(taken_s);
  // Who was cancelled or late hears of it now, not a step later.
  if (num_ended_ > 0) publish();
  if (!is_loading_) load_parked();
  const double start_s = now_s();
  bool has_run = false;
  // Another lane goes first in each step, so that both get at the seats that become free.
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane *lane = lanes_[(i + num_steps_.load()) % lanes_.size()].get();
    if (lane->scheduler.has_work() || lane->in_flight) has_run |= run_lane(lane);
  }
  if (has_run) {
    totals_.last_step_s = now_s() - start_s;
    num_steps_.fetch_add(1);
    has_progress_ = true;
  }
  publish();
  timer_s_ = next_timer_s();
}

// When the next request or lease runs out of its time.
double Engine::next_timer_s() const {
  double next = std::numeric_limits<double>::infinity();
  for (const auto &entry : requests_) {
    const Request &request = *entry.second;
    next = std::min(next, request.duration_end_s());
    if (!request.is_admitted()) next = std::min(next, request.queue_end_s());
  }
  const std::lock_guard<std::mutex> lock(slots_mutex_);
  if (slots_.num_acquired() == 0) return next;
  for (const Slot &slot : slots_.slots()) {
    if (slot.is_acquired && slot.end == SlotEnd::kNone) next = std::min(next, slot.lease_end_s);
  }
  return next;
}

void Engine::take_inbox() {
  std::vector<std::unique_ptr<Request>> arrived;
  std::vector<Cancel> cancels;
  std::vector<PositionMask> masks;
  std::vector<Fork> forks;
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    arrived.swap(inbox_);
    forks.swap(forks_);
    cancels.swap(cancels_);
    masks.swap(masks_);
  }
  std::vector<uint64_t> ids;
  for (std::unique_ptr<Request> &request : arrived) {
    ids.push_back(request->id());
    requests_.emplace(request->id(), std::move(request));
  }
  take_masks(std::move(masks));
  for (const Cancel &cancel : cancels) {
    const auto found = requests_.find(cancel.request_id);
    if (found == requests_.end()) continue;
    found->second->cancel_step = cancel.step;
    finish(cancel.request_id, Status::kCancelled, "cancelled");
  }
  auto fork = forks.begin();
  for (const uint64_t id : ids) {
    // In the order they were asked for: a slot is forked as it was then.
    while (fork != forks.end() && fork->before_id <= id) fork_slot(*fork++);
    const auto found = requests_.find(id);
    if (found == requests_.end()) continue;
    Request &request = *found->second;
    if (find_lane(request.decode_mode()) == nullptr) {
      parked_.push_back(id);
    } else {
      begin(&request);
    }
  }
  while (fork != forks.end()) fork_slot(*fork++);
}

void Engine::begin(Request *request) {
  if (request->is_on_slot()) {
    begin_on_slot(request);
  } else {
    find_lane(request->decode_mode())->scheduler.add(&request->sequence);
  }
}

void Engine::end_late_requests(double now) {
  std::vector<uint64_t> too_long;
  std::vector<uint64_t> queued_too_long;
  for (const auto &entry : requests_) {
    const Request &request = *entry.second;
    if (now >= request.duration_end_s()) {
      too_long.push_back(entry.first);
    } else if (!request.is_admitted() && now >= request.queue_end_s()) {
      queued_too_long.push_back(entry.first);
    }
  }
  for (const uint64_t id : too_long) {
    finish(id, Status::kDeadlineExceeded, "max_duration_s is over");
  }
  for (const uint64_t id : queued_too_long) {
    finish(id, Status::kQueueTimeout, "waited longer than max_queue_s for a slot; retry later");
  }
}

}  // namespace xllm
