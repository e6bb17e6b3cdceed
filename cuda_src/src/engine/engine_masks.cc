// Masks of constrained requests on their way in: pushed by callers at any time, taken between
// steps, and waited for within one.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "engine/clock.h"
#include "engine/engine.h"

namespace xllm {
namespace {

// How long a step whose rows are computed waits for masks before tokens are chosen, so that their
// rows need not be computed again: a part of what the step takes, and never more than the cap.
constexpr double kMaskPatience = 0.1;  // of the last step's duration
constexpr double kMaskPatienceMaxS = 0.005;

}  // namespace

void Engine::push_masks(std::vector<PositionMask> masks) {
  for (size_t i = 0; i < masks.size(); ++i) {
    if (masks[i].token_index < static_cast<uint32_t>(plan_.max_seq_len)) continue;
    throw Error(Status::kInvalidArgument,
                "token_index: expected less than max_seq_len " + std::to_string(plan_.max_seq_len) +
                    ", found " + std::to_string(masks[i].token_index),
                {{"field", "token_index"}, {"entry", std::to_string(i)}});
  }
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    for (size_t i = 0; i < masks.size(); ++i) {
      const uint64_t id = masks[i].request_id;
      if (id > 0 && id < next_id_) continue;
      throw Error(Status::kNotFound, "request " + std::to_string(id) + ": no such id was given out",
                  {{"entry", std::to_string(i)}});
    }
    if (has_failed_) return;  // everything has ended
    std::move(masks.begin(), masks.end(), std::back_inserter(masks_));
  }
  inbox_changed_.notify_one();
}

// Those of requests that have ended are dropped.
void Engine::take_masks(std::vector<PositionMask> masks) {
  for (PositionMask &entry : masks) {
    const auto found = requests_.find(entry.request_id);
    if (found != requests_.end()) found->second->add_mask(entry.token_index, std::move(entry.mask));
  }
}

// Whether a token cannot be chosen for it as yet.
bool Engine::waits_for_mask(const ScheduledRows &rows) const {
  return rows.wants_token && rows.sequence->is_held;
}

// Gives the masks that rows of this step wait for a little more time: each of them was asked for
// when the step began. Who has missed it does not slow the others again, see Sequence::is_due.
void Engine::wait_for_masks(const std::vector<ScheduledRows> &rows) {
  const auto is_waiting = [&] {
    return std::any_of(rows.begin(), rows.end(),
                       [this](const ScheduledRows &entry) { return waits_for_mask(entry); });
  };
  if (!is_waiting()) return;
  const double end_s = now_s() + std::min(kMaskPatience * totals_.last_step_s, kMaskPatienceMaxS);
  // Of a request that has not begun the masks stay where they are: it has still to come in.
  const auto is_ours = [this](const PositionMask &mask) {
    return requests_.count(mask.request_id) != 0;
  };
  bool has_time = true;
  while (has_time && is_waiting()) {
    std::vector<PositionMask> taken;
    {
      std::unique_lock<std::mutex> lock(inbox_mutex_);
      const auto has_ours = [&] { return std::any_of(masks_.begin(), masks_.end(), is_ours); };
      has_time = inbox_changed_.wait_for(
                     lock, std::chrono::duration<double>(end_s - now_s()),
                     [&] { return has_ours() || !cancels_.empty() || is_stopping_; }) &&
                 cancels_.empty() && !is_stopping_;
      const auto others = std::stable_partition(masks_.begin(), masks_.end(), is_ours);
      std::move(masks_.begin(), others, std::back_inserter(taken));
      masks_.erase(masks_.begin(), others);
    }
    take_masks(std::move(taken));
  }
}

}  // namespace xllm
