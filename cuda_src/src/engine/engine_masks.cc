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
// rows need not be computed again, where other rows wait with them: of the last step's duration.
constexpr double kMaskPatience = 0.1;
// How often it looks meanwhile whether the device is still computing the rows.
constexpr double kDeviceLookS = 50e-6;

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

// Of a row whose request goes on, and whose token cannot be chosen as yet.
bool Engine::waits_for_mask(const StepInFlight &step, size_t index) const {
  return step.rows[index].wants_token && requests_.count(step.ids[index]) != 0 &&
         step.rows[index].sequence->is_held;
}

// Whether a row of a step could have its token without one that waits for a mask, or somebody the
// next step.
bool Engine::keeps_others_waiting(const Lane &lane, const StepInFlight &step) const {
  size_t num_live = 0;  // rows of requests that have not ended since
  for (size_t i = 0; i < step.rows.size(); ++i) {
    if (requests_.count(step.ids[i]) == 0) continue;
    if (!waits_for_mask(step, i)) return true;
    ++num_live;
  }
  size_t num_going_on = 0;
  for (const Sequence *sequence : lane.scheduler.running()) {
    if (!sequence->sits_out()) ++num_going_on;
  }
  if (num_going_on > num_live || has_work_elsewhere(&lane)) return true;
  const std::lock_guard<std::mutex> lock(slots_mutex_);
  return !lane.scheduler.waiting().empty() && slots_.num_free() > 0;
}

// Gives the masks that rows of this step wait for until the device has computed the rows, and a
// little longer: each of them was asked for when the step began, or while it ran. Where nobody else
// is kept waiting, that is mask_patience_s. Rows that have none then drop out of the step; who has
// missed it does not slow the others again, see Sequence::is_due.
void Engine::wait_for_masks(Lane *lane, StepInFlight *step) {
  const auto is_waiting = [&] {
    for (size_t i = 0; i < step->rows.size(); ++i) {
      if (waits_for_mask(*step, i)) return true;
    }
    return false;
  };
  if (!is_waiting()) return;
  double computed_s = 0;  // when the device had nothing more to do
  // Of a request that has not begun the masks stay where they are: it has still to come in.
  const auto is_ours = [this](const PositionMask &mask) {
    return requests_.count(mask.request_id) != 0;
  };
  bool has_time = true;
  while (has_time && is_waiting()) {
    const bool is_computing = lane->runner.is_computing();
    const double begin_s = now_s();
    if (!is_computing && computed_s == 0) computed_s = begin_s;
    const bool is_alone = !is_computing && !keeps_others_waiting(*lane, *step);
    const double most_s = config_.mask_patience_s;
    const double patience_s =
        is_alone ? most_s : std::min(kMaskPatience * totals_.last_step_s, most_s);
    const double end_s = computed_s + patience_s;
    const double wait_s = is_computing ? kDeviceLookS : end_s - begin_s;
    std::vector<PositionMask> taken;
    {
      std::unique_lock<std::mutex> lock(inbox_mutex_);
      const auto has_ours = [&] { return std::any_of(masks_.begin(), masks_.end(), is_ours); };
      const auto is_wanted_elsewhere = [&] {
        return !cancels_.empty() || is_stopping_ || (is_alone && !inbox_.empty());
      };
      inbox_changed_.wait_for(lock, std::chrono::duration<double>(wait_s),
                              [&] { return has_ours() || is_wanted_elsewhere(); });
      has_time = (is_computing || now_s() < end_s) && !is_wanted_elsewhere();
      const auto others = std::stable_partition(masks_.begin(), masks_.end(), is_ours);
      std::move(masks_.begin(), others, std::back_inserter(taken));
      masks_.erase(masks_.begin(), others);
    }
    take_masks(std::move(taken));
  }
  for (size_t i = 0; i < step->rows.size(); ++i) {
    if (!waits_for_mask(*step, i)) continue;
    step->rows[i].sequence->is_due = false;
    step->ids[i] = 0;
  }
}

}  // namespace xllm
