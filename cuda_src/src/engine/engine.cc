#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <new>
#include <random>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "engine/clock.h"
#include "model/batch.h"

namespace xllm {
namespace {

constexpr int kMaxOutputs = 128;
constexpr double kIdleHeartbeatS = 0.5;
// How long a step waits for masks that the last one has asked for, so that their rows stay in one
// batch with the others: a part of what the step saves, and never more than the cap.
constexpr double kMaskPatience = 0.1;  // of the last step's duration
constexpr double kMaskPatienceMaxS = 0.005;

uint64_t random_u64() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

WeightForm form_of(DecodeMode mode) {
  return mode == DecodeMode::kPerSlot ? WeightForm::kDequantized : WeightForm::kRaw;
}

uint32_t mode_bit(DecodeMode mode) { return 1u << static_cast<unsigned>(mode); }

}  // namespace

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

// ---- callers' side ----

uint64_t Engine::submit(RequestOptions options) { return submit(std::move(options), 1).front(); }

std::vector<uint64_t> Engine::submit(RequestOptions options, int num_outputs) {
  const DecodeMode mode =
      resolve_decode_mode(config_.decode_mode, options.decode_mode, "xllm_engine_submit");
  validate(options, RequestKind::kGenerate, vocabulary_, plan_.max_seq_len);
  check_lane(mode, static_cast<int>(options.prompt.size()));
  check_deadline(mode, options);
  if (num_outputs < 1 || num_outputs > kMaxOutputs) {
    throw Error(Status::kInvalidArgument,
                "num_outputs: expected 1 to " + std::to_string(kMaxOutputs) + ", found " +
                    std::to_string(num_outputs),
                {{"field", "num_outputs"}});
  }
  // All are queued or none: what an empty engine has no places for would be refused for ever.
  const int64_t num_places = int64_t{config_.max_slots} + config_.max_queue;
  if (num_outputs > num_places) {
    throw Error(Status::kInvalidArgument,
                "num_outputs: expected at most max_slots + max_queue, " +
                    std::to_string(num_places) + ", found " + std::to_string(num_outputs),
                {{"field", "num_outputs"}});
  }
  // Built before the lock is taken: copying and counting a long prompt holds nobody up.
  std::vector<std::unique_ptr<Request>> requests;
  const uint64_t first_seed = options.sampling.seed.value_or(random_u64());
  for (int i = 0; i < num_outputs; ++i) {
    options.sampling.seed = first_seed + static_cast<uint64_t>(i);
    requests.push_back(make_request(RequestKind::kGenerate, options, mode));
  }
  std::vector<uint64_t> ids;
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    check_open();
    if (num_live_ + num_outputs > num_places) {
      throw Error(Status::kQueueFull,
                  "queue: " + std::to_string(config_.max_queue) +
                      " requests wait already (max_queue); retry later",
                  {{"limit", std::to_string(config_.max_queue)}});
    }
    for (std::unique_ptr<Request> &request : requests) {
      if (!ids.empty()) request->sequence.leader_id = ids.front();
      ids.push_back(push(std::move(request)));
    }
  }
  inbox_changed_.notify_one();
  return ids;
}

std::unique_ptr<Request> Engine::make_request(RequestKind kind, RequestOptions options,
                                              DecodeMode mode) {
  const uint64_t seed = options.sampling.seed ? 0 : random_u64();
  return std::make_unique<Request>(kind, std::move(options), mode, seed, &vocabulary_,
                                   plan_.max_seq_len, config_.block_size, now_s());
}

void Engine::check_open() const {
  if (has_failed_) {
    throw Error(Status::kEngineFailed,
                "the step loop has stopped: " + failure_ + "; create another engine");
  }
  if (is_draining_) throw Error(Status::kDraining, "the engine takes no new requests: draining");
}

uint64_t Engine::push(std::unique_ptr<Request> request) {
  const uint64_t id = next_id_++;
  request->sequence.id = id;
  if (request->options().delivery == Delivery::kPrivate) events_.open_private(id);
  inbox_.push_back(std::move(request));
  ++num_live_;
  return id;
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
  if ((loaded_modes_.load() & mode_bit(mode)) == 0) {
    check_set_fits(plan, backend_->memory().free_bytes);
  }
}

// Lenient: only what would take twice the time allowed is turned away.
void Engine::check_deadline(DecodeMode mode, const RequestOptions &options) const {
  if (options.max_duration_s == 0) return;
  Backlog backlog;
  {
    const std::lock_guard<std::mutex> lock(snapshot_mutex_);
    backlog = backlogs_[static_cast<size_t>(mode)];
    backlog.age_s = now_s() - measured_s_[static_cast<size_t>(mode)];
  }
  {
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    backlog.num_free_slots = slots_.num_free();
  }
  const int num_prompt = static_cast<int>(options.prompt.size());
  int num_new = num_prompt;
  if (!options.bypasses_cache) {
    num_new -= count_cached(options.prompt, mode, options.cache_salt);
  }
  const double estimated_s = estimate_wait_s(backlog, num_new);
  if (estimated_s <= 2 * options.max_duration_s) return;
  throw Error(Status::kDeadlineUnreachable,
              "the prompt would be computed in about " + std::to_string(estimated_s) +
                  " s, max_duration_s is " + std::to_string(options.max_duration_s) +
                  "; allow more time, or retry when the engine is less busy",
              {{"estimated_wait_s", std::to_string(estimated_s)},
               {"max_duration_s", std::to_string(options.max_duration_s)}});
}

int Engine::count_cached(Span<const int32_t> prompt, DecodeMode mode, std::string_view salt) const {
  const DecodeMode effective =
      resolve_decode_mode(config_.decode_mode, mode, "xllm_engine_count_cached");
  check_prompt_length(prompt.size(), plan_.max_seq_len);
  const Lane *lane = (effective == DecodeMode::kPerSlot ? per_slot_lane_ : batched_lane_).load();
  if (lane == nullptr) return 0;
  const int max_cached =
      max_cached_tokens(static_cast<int>(prompt.size()), config_.block_size, lane->segment_size);
  return lane->cache.count_cached(prompt, max_cached, salt);
}

void Engine::cancel(uint64_t request_id) {
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    if (request_id == 0 || request_id >= next_id_) {
      throw Error(Status::kNotFound,
                  "request " + std::to_string(request_id) + ": no such id was given out");
    }
    if (has_failed_) return;  // everything has ended
    cancels_.push_back({request_id, num_steps_.load()});
  }
  inbox_changed_.notify_one();
  const std::lock_guard<std::mutex> lock(slots_mutex_);
  slots_.set_cancelling(request_id);
}

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

// ---- lanes ----

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
  lanes_.push_back(std::make_unique<Lane>(
      mode, backend_.get(), model_.dims, model_.tensors, plan, scheduler, config_.max_slots,
      cache_key_, config_.use_prefix_cache, config_.max_token_gap_s, nullptr));
  (mode == DecodeMode::kPerSlot ? per_slot_lane_ : batched_lane_).store(lanes_.back().get());
  if (model_.release_pages) model_.release_pages();
  loaded_modes_.fetch_or(mode_bit(mode));
}

// ---- the step loop ----

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
  wait_for_masks();
  const double start_s = now_s();
  has_progress_ = false;
  take_inbox();
  end_late_requests(start_s);
  end_slots(start_s);
  // Who was cancelled or late hears of it now, not a step later.
  if (num_ended_ > 0) publish();
  bool has_run = false;
  // Another lane goes first in each step, so that both get at the seats that become free.
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane *lane = lanes_[(i + num_steps_.load()) % lanes_.size()].get();
    if (lane->scheduler.has_work() || lane->in_flight) has_run |= run_lane(lane);
  }
  if (has_run) {
    step_end_s_ = now_s();
    totals_.last_step_s = step_end_s_ - start_s;
    num_steps_.fetch_add(1);
    has_progress_ = true;
  }
  publish();
  timer_s_ = next_timer_s();
}

// Only for rows of the last step: who has missed a step does not slow the others again.
void Engine::wait_for_masks() {
  const size_t num_awaited = std::exchange(num_masks_wanted_, 0);
  if (num_awaited == 0) return;
  const double patience_s = std::min(kMaskPatience * totals_.last_step_s, kMaskPatienceMaxS);
  const double left_s = step_end_s_ + patience_s - now_s();
  if (left_s <= 0) return;
  std::unique_lock<std::mutex> lock(inbox_mutex_);
  inbox_changed_.wait_for(lock, std::chrono::duration<double>(left_s), [&] {
    return masks_.size() >= num_awaited || !cancels_.empty() || is_stopping_;
  });
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
  for (PositionMask &entry : masks) {
    const auto found = requests_.find(entry.request_id);
    if (found != requests_.end()) found->second->add_mask(entry.token_index, std::move(entry.mask));
  }
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
    try {
      if (find_lane(request.decode_mode()) == nullptr) load_lane(request.decode_mode());
    } catch (const Error &error) {
      finish(id, error.status(), error.message(), error.details());
      continue;
    }
    if (request.is_on_slot()) {
      begin_on_slot(&request);
    } else {
      find_lane(request.decode_mode())->scheduler.add(&request.sequence);
    }
  }
  while (fork != forks.end()) fork_slot(*fork++);
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

// One batch. False when there was nothing to compute.
bool Engine::run_lane(Lane *lane) {
  if (!lane->in_flight && !start_step(lane)) return false;
  if (!lane->in_flight) return true;  // there was no memory for it
  StepInFlight step = std::exchange(lane->in_flight, {});
  // Requests that have ended since take no part any more: what was computed for them is dropped.
  const size_t num_chosen = static_cast<size_t>(std::count_if(
      step.rows.begin(), step.rows.end(), [](const ScheduledRows &r) { return r.wants_token; }));
  std::vector<size_t> places;  // in what was chosen, of the rows that are left
  StepInFlight live;
  size_t place = 0;
  for (size_t i = 0; i < step.rows.size(); ++i) {
    if (requests_.count(step.ids[i]) != 0) {
      live.rows.push_back(step.rows[i]);
      live.ids.push_back(step.ids[i]);
      if (step.rows[i].wants_token) places.push_back(place);
    }
    if (step.rows[i].wants_token) ++place;
  }
  for (const ScheduledRows &rows : live.rows) lane->scheduler.advance(rows);
  if (lane->is_on_device) {
    if (live) lane->in_flight = start_ahead(lane, live);
    lane->chosen = lane->runner.finish_sample(num_chosen);
  }
  // A step that was started ahead has waited for the one before it.
  const double end_s = now_s();
  const double step_s = end_s - std::max(step.start_s, std::exchange(lane->end_s, end_s));
  if (lane->pace.record(step.has_decode, step.num_prefill_rows, step_s)) lane->measured_s = end_s;
  std::vector<Sampled> wanted;
  wanted.reserve(places.size());
  for (const size_t at : places) wanted.push_back(std::move(lane->chosen[at]));
  complete(lane, live, wanted);
  return true;
}

std::vector<SampleRow> Engine::sample_rows(const std::vector<ScheduledRows> &rows) {
  std::vector<SampleRow> out;
  for (const ScheduledRows &entry : rows) {
    if (entry.wants_token) out.push_back(requests_.at(entry.sequence->id)->sample_row());
  }
  return out;
}

// The next step in full: who takes part, its rows on their way and, where the device can, their
// tokens. False when there is nothing to compute.
bool Engine::start_step(Lane *lane) {
  const Schedule *scheduled = nullptr;
  {
    // Held from counting the free seats to taking them, so that no caller acquires one in between.
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    scheduled =
        &lane->scheduler.schedule(slots_.num_free(), lane->pace.prefill_rows(decode_wait_s(*lane)));
    seat(lane->mode, *scheduled);
  }
  const Schedule &schedule = *scheduled;
  for (const Sequence *sequence : schedule.exhausted) end_exhausted(*lane, *sequence);
  if (schedule.rows.empty()) return false;
  // A request hears that it has its seat before its prompt is computed, not after.
  if (!new_events_.empty()) publish();

  StepInFlight step;
  step.start_s = now_s();
  for (const ScheduledRows &rows : schedule.rows) {
    const bool is_decode = rows.sequence->is_decoding();
    step.has_decode |= is_decode;
    if (!is_decode) step.num_prefill_rows += rows.num_tokens;
  }
  if (!compute(lane, schedule)) return true;
  lane->in_flight = std::move(step);
  lane->in_flight.rows = schedule.rows;
  for (const ScheduledRows &rows : schedule.rows) lane->in_flight.ids.push_back(rows.sequence->id);
  return true;
}

// Starts the step after `step`, whose tokens are not known yet, so that the device goes on while
// the host reads and publishes them. Nothing where that step is not certain; a request that ends
// with its token has been computed for once too often, which nobody sees.
StepInFlight Engine::start_ahead(Lane *lane, const StepInFlight &step) {
  if (step.rows.size() != lane->scheduler.running().size()) return {};
  for (const std::unique_ptr<Lane> &other : lanes_) {
    if (other.get() != lane && other->scheduler.has_work()) return {};
  }
  for (const ScheduledRows &rows : step.rows) {
    if (!rows.wants_token || !requests_.at(rows.sequence->id)->can_go_ahead()) return {};
  }
  {
    // Who has come takes part in the next step, not in the one after it.
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    if (!inbox_.empty() || !cancels_.empty()) return {};
  }
  struct Placeholders {
    const std::vector<ScheduledRows> &rows;
    explicit Placeholders(const std::vector<ScheduledRows> &of) : rows(of) {
      for (const ScheduledRows &entry : rows)
        entry.sequence->tokens.push_back(ForwardBatch::kSampledOnDevice);
    }
    ~Placeholders() {
      for (const ScheduledRows &entry : rows) entry.sequence->tokens.pop_back();
    }
  } const placeholders(step.rows);
  StepInFlight ahead;
  ahead.start_s = now_s();
  ahead.has_decode = true;
  if (!lane->scheduler.schedule_ahead(&ahead.rows)) return {};
  try {
    lane->runner.forward({}, ahead.rows);
    if (!lane->runner.start_sample(sample_rows(ahead.rows))) return {};
  } catch (const Error &error) {
    if (error.status() != Status::kMemory) throw;
    return {};  // it is computed again in its turn, and fails there if it must
  }
  for (const ScheduledRows &rows : ahead.rows) ahead.ids.push_back(rows.sequence->id);
  return ahead;
}

// What a step has computed becomes events. chosen: a token for each of its rows that wants one.
void Engine::complete(Lane *lane, const StepInFlight &step, const std::vector<Sampled> &chosen) {
  {
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    for (const ScheduledRows &rows : step.rows) {
      const Sequence &sequence = *rows.sequence;
      slots_.set_state(sequence.slot,
                       rows.wants_token ? SlotState::kDecoding : SlotState::kPrefilling);
      slots_.set_usage(sequence.slot, sequence.num_computed, sequence.blocks.num_blocks());
    }
  }
  const double now = now_s();
  size_t next = 0;
  for (const ScheduledRows &rows : step.rows) {
    report_prefill(rows);
    if (rows.wants_token) {
      Request &request = *requests_.at(rows.sequence->id);
      std::vector<float> logits;
      if (request.options().wants_logits) logits = lane->runner.logits(next);
      handle_token(rows, chosen[next++], std::move(logits), now);
    } else if (rows.sequence->is_prefill_only && rows.sequence->num_to_compute() == 0) {
      requests_.at(rows.sequence->id)->complete_prefill();
      finish(rows.sequence->id, Status::kOk, "");
    }
  }
}

// What streams that decode wait for besides the next step of this lane; -1 where nobody decodes.
double Engine::decode_wait_s(const Lane &lane) const {
  double wait_s = 0;
  bool has_any = false;
  for (const std::unique_ptr<Lane> &other : lanes_) {
    int num_decoding = 0;
    for (const Sequence *sequence : other->scheduler.running()) {
      num_decoding += sequence->is_decoding() && !sequence->is_held ? 1 : 0;
    }
    has_any |= num_decoding > 0;
    // A lane that takes turns has each of them in a step of its own.
    const int num_steps = other->takes_turns ? num_decoding : std::min(num_decoding, 1);
    const int num_others = other.get() == &lane ? std::max(0, num_steps - 1) : num_steps;
    wait_s += num_others * other->pace.decode_s();
  }
  return has_any ? wait_s : -1;
}

void Engine::note_gap(Request *request, bool wants_mask, double now) {
  if (request->last_token_s >= 0) {
    totals_.token_gap_max_s = std::max(totals_.token_gap_max_s, now - request->last_token_s);
  }
  request->last_token_s = wants_mask ? -1 : now;
}

// Computes the rows; their tokens are chosen, or on their way. False when there was no memory for
// the step's scratch: the request that asked for most of it has ended, and nothing else has
// changed.
bool Engine::compute(Lane *lane, const Schedule &schedule) {
  Error problem(Status::kMemory, "");
  try {
    lane->runner.forward(schedule.copies, schedule.rows);
    const std::vector<SampleRow> wishes = sample_rows(schedule.rows);
    lane->is_on_device = lane->runner.start_sample(wishes);
    if (!lane->is_on_device) lane->chosen = lane->runner.sample(wishes);
    totals_.workspace_bytes = std::max(totals_.workspace_bytes, lane->runner.workspace_bytes());
    return true;
  } catch (const Error &error) {
    if (error.status() != Status::kMemory) throw;
    problem = error;
  } catch (const std::bad_alloc &) {
    problem = Error(Status::kMemory, "out of memory for a step; lower prefill_chunk or max_slots");
  }
  const auto largest = std::max_element(  // the most junior one of several
      schedule.rows.rbegin(), schedule.rows.rend(),
      [](const ScheduledRows &a, const ScheduledRows &b) { return a.num_tokens < b.num_tokens; });
  finish(largest->sequence->id, problem.status(), problem.message(), problem.details());
  return false;
}

void Engine::end_exhausted(const Lane &lane, const Sequence &sequence) {
  const int block_size = lane.cache.block_size();
  const int num_needed = (sequence.num_tokens() + block_size - 1) / block_size;
  const Error::Details details = {{"blocks_needed", std::to_string(num_needed)},
                                  {"blocks_free", std::to_string(lane.cache.num_available())},
                                  {"blocks_total", std::to_string(lane.cache.num_blocks())}};
  const bool is_whole_pool = num_needed > lane.cache.num_blocks();
  finish(sequence.id, Status::kKvExhausted,
         is_whole_pool
             ? "the tokens have outgrown the whole KV pool; raise kv_memory or lower max_tokens"
             : "no KV block left for this slot; release slots, raise kv_memory or ask for less",
         details);
}

// Gives admitted sequences their seats, and says of preempted ones that theirs is empty. With
// slots_mutex_ held.
void Engine::seat(DecodeMode mode, const Schedule &schedule) {
  for (Sequence *sequence : schedule.admitted) {
    if (sequence->slot >= 0) continue;  // kept through a preemption
    Request &request = *requests_.at(sequence->id);
    sequence->slot = slots_.take(mode, sequence->id, now_s());
    XLLM_DCHECK(sequence->slot >= 0);
    request.epoch = slots_.slot(sequence->slot).epoch;
    slots_.set_state(sequence->slot, SlotState::kPrefilling);
    request.set_admitted(now_s());
    totals_.num_prompt_tokens += static_cast<uint64_t>(sequence->num_prompt);
    totals_.num_cached_tokens += static_cast<uint64_t>(sequence->num_cached);
    new_events_.push_back(request.accepted_event());
  }
  for (const Sequence *sequence : schedule.preempted) {
    requests_.at(sequence->id)->last_token_s = -1;
    if (sequence->slot < 0) continue;
    slots_.set_state(sequence->slot, SlotState::kAcquired);
    slots_.set_usage(sequence->slot, 0, 0);
    ++totals_.num_preemptions;
  }
}

void Engine::report_prefill(const ScheduledRows &rows) {
  const Sequence &sequence = *rows.sequence;
  Request &request = *requests_.at(sequence.id);
  const int num_computed = sequence.num_prompt_computed();
  // A prompt of one chunk needs no report, nor does what is computed again after a preemption.
  const bool is_news = num_computed > request.num_prefill_reported && sequence.num_generated() == 0;
  const bool has_several = !rows.wants_token || request.num_prefill_reported > 0;
  if (!is_news || !has_several) return;
  request.num_prefill_reported = num_computed;
  new_events_.push_back(request.prefill_event());
}

void Engine::handle_token(const ScheduledRows &rows, const Sampled &sampled,
                          std::vector<float> logits, double now) {
  const uint64_t id = rows.sequence->id;
  const std::string position = std::to_string(rows.sequence->num_tokens());
  switch (sampled.outcome) {
    case SampleOutcome::kNotFinite:
      finish(id, Status::kNonFiniteLogits,
             "logits for position " + position + " hold NaN or infinity", {{"position", position}});
      return;
    case SampleOutcome::kAllForbidden:
      finish(id, Status::kInvalidArgument,
             "position " + position + ": " +
                 (requests_.at(id)->options().is_constrained ? "its mask, " : "") +
                 "logit_biases and min_tokens forbid every token");
      return;
    case SampleOutcome::kChosen:
      break;
  }
  Event event;
  const bool is_last = requests_.at(id)->add_token(sampled, now, &event);
  ++totals_.num_generated_tokens;
  if (event.wants_mask) ++num_masks_wanted_;
  note_gap(requests_.at(id).get(), event.wants_mask, now);
  event.logits = std::move(logits);
  new_events_.push_back(std::move(event));
  if (is_last) finish(id, Status::kOk, "");
}

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

// How often a seat becomes free while others wait for one.
void Engine::note_freed_seat(const Lane &lane) {
  const double now = now_s();
  const double last_s = std::exchange(seat_freed_s_, lane.scheduler.waiting().empty() ? -1 : now);
  if (last_s < 0 || seat_freed_s_ < 0) return;
  const double interval_s = now - last_s;
  seat_interval_s_ += (seat_interval_s_ == 0 ? 1 : 0.3) * (interval_s - seat_interval_s_);
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
  stats.token_gap_bound_s = config_.max_token_gap_s;
  if (lanes_.empty()) {  // AUTO before its first request: the pool it will have
    stats.blocks_total = static_cast<uint64_t>(lane_plan(DecodeMode::kBatched).num_blocks);
  }
  {
    const std::lock_guard<std::mutex> lock(snapshot_mutex_);
    snapshot_ = stats;
    std::copy(std::begin(backlogs), std::end(backlogs), std::begin(backlogs_));
    std::copy(std::begin(measured_s), std::end(measured_s), std::begin(measured_s_));
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
