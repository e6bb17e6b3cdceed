// How requests end, each by the one release path, and how everything ends when the loop cannot go
// on.
#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "engine/clock.h"
#include "engine/engine.h"

namespace xllm {

void Engine::finish(uint64_t request_id, Status status, const std::string &message,
                    const Error::Details &details) {
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return;
  Request &request = *found->second;
  Event event = request.finished_event(status, message, details, now_s());
  give_back(&request);
  if (request.cancel_step) {
    const uint64_t num_steps = num_steps_.load() - *request.cancel_step;
    totals_.cancel_steps_max = std::max(totals_.cancel_steps_max, static_cast<uint32_t>(num_steps));
  }
  if (status == Status::kOk) {
    ++totals_.num_requests_finished;
  } else if (status == Status::kCancelled) {
    ++totals_.num_requests_cancelled;
  } else {
    ++totals_.num_requests_failed;
  }
  new_events_.push_back(std::move(event));
  requests_.erase(found);
  ++num_ended_;
  has_progress_ = true;
}

// Blocks and seat of a request; of a call, what it leaves goes back into its slot.
void Engine::give_back(Request *request) {
  Lane *lane = find_lane(request->decode_mode());
  if (lane != nullptr) lane->scheduler.remove(&request->sequence);
  if (!request->is_on_slot()) {
    if (request->sequence.slot >= 0 && lane != nullptr) note_freed_seat(*lane);
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    slots_.release({request->sequence.slot, request->epoch});
    return;
  }
  Sequence &held = holdings_[static_cast<size_t>(request->ref().slot)];
  if (request->has_begun()) {
    held = request->hand_back();
    lane->scheduler.trim(&held);
  }
  const std::lock_guard<std::mutex> lock(slots_mutex_);
  slots_.end_call(request->ref(), held.num_tokens(), held.blocks.num_blocks());
}

// How often a seat becomes free while others wait for one.
void Engine::note_freed_seat(const Lane &lane) {
  const double now = now_s();
  const double last_s = std::exchange(seat_freed_s_, lane.scheduler.waiting().empty() ? -1 : now);
  if (last_s < 0 || seat_freed_s_ < 0) return;
  const double interval_s = now - last_s;
  seat_interval_s_ += (seat_interval_s_ == 0 ? 1 : 0.3) * (interval_s - seat_interval_s_);
  seat_noted_s_ = now;
}

// The end of everything: the loop cannot go on.
void Engine::fail(const std::string &message) {
  try {
    if (config_.log) config_.log("engine failed: " + message);
    {
      const std::lock_guard<std::mutex> lock(inbox_mutex_);
      has_failed_ = true;
      failure_ = message;
      for (std::unique_ptr<Request> &request : inbox_) {
        const uint64_t id = request->id();
        requests_.emplace(id, std::move(request));
      }
      inbox_.clear();
      cancels_.clear();
      masks_.clear();
    }
    std::vector<uint64_t> ids;
    ids.reserve(requests_.size());
    for (const auto &entry : requests_) ids.push_back(entry.first);
    std::sort(ids.begin(), ids.end());
    for (const uint64_t id : ids) {
      finish(id, Status::kEngineFailed, "the step loop has stopped: " + message);
    }
    end_slots(std::numeric_limits<double>::infinity());
    publish();
  } catch (const std::exception &) {
    // No memory left even to say so: callers learn from fail() below and from has_failed_.
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    has_failed_ = true;
  }
  events_.fail();
}

}  // namespace xllm
