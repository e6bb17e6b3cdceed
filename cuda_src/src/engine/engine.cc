// The engine from its creation to its end, and what is seen of it from outside.
#include "engine/engine.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "engine/clock.h"
#include "engine/entropy.h"

namespace xllm {

Engine::Engine(EngineModel model, const EngineConfig &config, std::unique_ptr<Backend> backend)
    : model_(std::move(model)),
      config_(config),
      backend_(std::move(backend)),
      vocabulary_(model_.tokenizer, model_.dims.vocab_size),
      plan_(plan_engine(model_, config_, *backend_)),
      cache_key_{random_u64(), random_u64()},
      holdings_(static_cast<size_t>(config.max_slots), Sequence(config.block_size)),
      slots_(config.max_slots) {
  const double start_s = now_s();
  check_plan(plan_.memory);
  if (config_.decode_mode != DecodeMode::kAuto) load_lane(config_.decode_mode);
  info_.device = backend_->info();
  info_.decode_mode = config_.decode_mode;
  info_.kv_type = config_.kv_type;
  info_.max_slots = config_.max_slots;
  info_.max_seq_len = plan_.max_seq_len;
  info_.prefill_chunk = config_.prefill_chunk;
  info_.block_size = config_.block_size;
  info_.max_queue = config_.max_queue;
  info_.vocab_size = vocabulary_.vocab_size();
  info_.plan = plan_.memory;
  info_.load_s = now_s() - start_s;
  publish();
  thread_ = std::thread([this] { run(); });
}

Engine::~Engine() {
  events_.close();
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    is_stopping_ = true;
  }
  inbox_changed_.notify_all();
  thread_.join();
  requests_.clear();
  lanes_.clear();
}

void Engine::drain() {
  const std::lock_guard<std::mutex> lock(inbox_mutex_);
  is_draining_ = true;
}

EngineStats Engine::stats() const {
  EngineStats out;
  {
    const std::lock_guard<std::mutex> lock(snapshot_mutex_);
    out = snapshot_;
  }
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    out.num_waiting += static_cast<uint32_t>(inbox_.size());
    out.is_draining = is_draining_;
    out.has_failed = has_failed_;
  }
  {
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    out.slots_total = static_cast<uint32_t>(slots_.num_slots());
    out.slots_used = static_cast<uint32_t>(slots_.num_slots() - slots_.num_free());
  }
  out.heartbeat_age_s = static_cast<double>(now_ns() - heartbeat_ns_.load()) * 1e-9;
  return out;
}

// What this step did becomes visible, blocks and slots before the events that tell of them.
void Engine::publish() {
  EngineStats stats = totals_;
  stats.num_steps = num_steps_.load();
  for (const std::unique_ptr<Lane> &lane : lanes_) {
    stats.num_running += static_cast<uint32_t>(lane->scheduler.running().size());
    stats.num_waiting += static_cast<uint32_t>(lane->scheduler.waiting().size());
    stats.blocks_total += static_cast<uint64_t>(lane->cache.num_blocks());
    stats.blocks_used += static_cast<uint64_t>(lane->cache.num_in_use());
    stats.blocks_cached += static_cast<uint64_t>(lane->cache.num_idle());
  }
  Backlog backlogs[3];
  double measured_s[3] = {};
  for (const std::unique_ptr<Lane> &lane : lanes_) {
    Backlog &backlog = backlogs[static_cast<size_t>(lane->mode)];
    backlog.num_waiting = static_cast<int>(lane->scheduler.waiting().size());
    for (const auto *list : {&lane->scheduler.waiting(), &lane->scheduler.running()}) {
      for (const Sequence *sequence : *list) {
        if (!sequence->is_decoding()) backlog.num_rows += sequence->num_to_compute();
      }
    }
    backlog.prefill_rate = lane->pace.prefill_rate();
    measured_s[static_cast<size_t>(lane->mode)] = lane->measured_s;
    backlog.seat_interval_s = seat_interval_s_;
    stats.prefill_tokens_per_s = std::max(stats.prefill_tokens_per_s, backlog.prefill_rate);
  }
  stats.num_waiting += static_cast<uint32_t>(std::count_if(
      parked_.begin(), parked_.end(), [&](uint64_t id) { return requests_.count(id) != 0; }));
  stats.token_gap_bound_s = config_.max_token_gap_s;
  if (lanes_.empty()) {  // AUTO before its first request: the pool it will have
    stats.blocks_total = static_cast<uint64_t>(lane_plan(DecodeMode::kBatched).num_blocks);
  }
  {
    const std::lock_guard<std::mutex> lock(snapshot_mutex_);
    snapshot_ = stats;
    std::copy(std::begin(backlogs), std::end(backlogs), std::begin(backlogs_));
    std::copy(std::begin(measured_s), std::end(measured_s), std::begin(measured_s_));
    seat_measured_s_ = seat_noted_s_;
  }
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    num_live_ -= num_ended_;
  }
  num_ended_ = 0;
  heartbeat_ns_.store(now_ns());
  events_.publish(&new_events_);
}

}  // namespace xllm
