// Lanes: which ways to decode an engine has, what each may take, and its load on first use.
//
// A load takes seconds, and streams of the other lane run meanwhile: between two pieces of the load
// (a tensor on the CPU, a buffer of the upload on a GPU) the loop takes a step like any other. So
// no second thread touches the device, and the gap between tokens grows by a slice of the load.
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "engine/clock.h"
#include "engine/engine.h"

namespace xllm {
namespace {

WeightForm form_of(DecodeMode mode) {
  return mode == DecodeMode::kPerSlot ? WeightForm::kDequantized : WeightForm::kRaw;
}

// Of the bound on the gap between tokens, the part that a load may take in one go; and where there
// is no bound.
constexpr double kSlice = 0.25;
constexpr double kSliceS = 0.05;

uint32_t mode_bit(DecodeMode mode) { return 1u << static_cast<unsigned>(mode); }

}  // namespace

const WeightSetPlan &Engine::lane_plan(DecodeMode mode) const {
  const WeightSetPlan *plan = plan_.memory.find(form_of(mode));
  if (plan == nullptr) throw Error(Status::kInternal, "no plan for this decode mode");
  return *plan;
}

Lane *Engine::find_lane(DecodeMode mode) const {
  for (const std::unique_ptr<Lane> &lane : lanes_) {
    if (lane->mode == mode) return lane.get();
  }
  return nullptr;
}

void Engine::check_lane(DecodeMode mode, int num_prompt) {
  if (mode == DecodeMode::kPerSlot && !plan_.without_per_slot.empty()) {
    throw Error(Status::kUnimplemented, plan_.without_per_slot);
  }
  const WeightSetPlan &plan = lane_plan(mode);
  const int64_t capacity = int64_t{plan.num_blocks} * config_.block_size;
  if (int64_t{num_prompt} + 1 > capacity) {
    const uint64_t needed =
        ceil_div(static_cast<uint64_t>(num_prompt) + 1, static_cast<uint64_t>(config_.block_size));
    throw Error(Status::kNeverFits,
                "prompt: " + std::to_string(num_prompt) + " tokens and one more need " +
                    std::to_string(needed) + " KV blocks, the whole pool has " +
                    std::to_string(plan.num_blocks) + "; shorten it or raise kv_memory",
                {{"field", "prompt"},
                 {"blocks_needed", std::to_string(needed)},
                 {"blocks_total", std::to_string(plan.num_blocks)}});
  }
  // An AUTO engine loads a set on first use: what does not fit is refused here, before anything is
  // allocated.
  if (((loaded_modes_.load() | loading_mode_.load()) & mode_bit(mode)) == 0) {
    check_set_fits(plan, backend_->memory().free_bytes);
  }
}

void Engine::load_lane(DecodeMode mode) {
  const WeightSetPlan &plan = lane_plan(mode);
  check_set_fits(plan, backend_->memory().free_bytes);
  if (model_.check_file) model_.check_file();
  SchedulerConfig scheduler;
  scheduler.max_running = mode == DecodeMode::kPerSlot ? 1 : config_.max_slots;
  scheduler.prefill_chunk = config_.prefill_chunk;
  const bool has_segments = mode == DecodeMode::kBatched && backend_->info().has_segment_path;
  scheduler.segment_size = has_segments ? kSegmentTokens : 1;
  scheduler.max_step_sequences = mode == DecodeMode::kPerSlot ? 1 : 0;
  std::function<void(uint64_t, uint64_t)> on_piece;
  if (is_loading_) on_piece = [this](uint64_t, uint64_t) { step_between_pieces(); };
  auto lane = std::make_unique<Lane>(mode, backend_.get(), model_.dims, model_.tensors, plan,
                                     scheduler, config_.max_slots, cache_key_,
                                     config_.use_prefix_cache, config_.max_token_gap_s, on_piece);
  lanes_.push_back(std::move(lane));  // not before it is whole: steps have run meanwhile
  (mode == DecodeMode::kPerSlot ? per_slot_lane_ : batched_lane_).store(lanes_.back().get());
  if (model_.release_pages) model_.release_pages();
  loaded_modes_.fetch_or(mode_bit(mode));
}

// Loads the lanes that requests wait for and lets these begin, in their order.
void Engine::load_parked() {
  while (!parked_.empty()) {
    const auto first = requests_.find(parked_.front());
    if (first == requests_.end()) {  // it has ended while it waited
      parked_.erase(parked_.begin());
      continue;
    }
    const DecodeMode mode = first->second->decode_mode();
    const std::optional<Error> problem = load_by_pieces(mode);
    // Those that have come meanwhile, too.
    for (const uint64_t id : std::exchange(parked_, {})) {
      const auto found = requests_.find(id);
      if (found == requests_.end()) continue;
      if (found->second->decode_mode() != mode) {
        parked_.push_back(id);
      } else if (problem) {
        finish(id, problem->status(), problem->message(), problem->details());
      } else {
        begin(found->second.get());
      }
    }
    has_progress_ = true;
  }
}

// Why it could not be loaded; nothing where it could. Throws what ended a step meanwhile.
std::optional<Error> Engine::load_by_pieces(DecodeMode mode) {
  std::optional<Error> problem;
  is_loading_ = true;
  loading_mode_.store(mode_bit(mode));
  slice_start_s_ = now_s();
  try {
    load_lane(mode);
  } catch (const Error &error) {
    problem = error;
  }
  loading_mode_.store(0);
  is_loading_ = false;
  if (failure_meanwhile_) std::rethrow_exception(std::exchange(failure_meanwhile_, nullptr));
  return problem;
}

double Engine::slice_s() const {
  return config_.max_token_gap_s > 0 ? kSlice * config_.max_token_gap_s : kSliceS;
}

// A step in the middle of a load. What ends it is thrown when the load is done: the backend that
// asks is busy with it.
void Engine::step_between_pieces() {
  heartbeat_ns_.store(now_ns());
  if (failure_meanwhile_ || now_s() - slice_start_s_ < slice_s()) return;
  try {
    step();
  } catch (...) {
    failure_meanwhile_ = std::current_exception();
  }
  slice_start_s_ = now_s();
}

}  // namespace xllm
