// Requests on their way in: what is refused at once, and what waits for the step loop.
#include <utility>

#include "base/error.h"
#include "engine/clock.h"
#include "engine/engine.h"
#include "engine/entropy.h"

namespace xllm {
namespace {

constexpr int kMaxOutputs = 128;

}  // namespace

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

// Lenient: only what would take twice the time allowed is turned away.
void Engine::check_deadline(DecodeMode mode, const RequestOptions &options) const {
  if (options.max_duration_s == 0) return;
  Backlog backlog;
  {
    const std::lock_guard<std::mutex> lock(snapshot_mutex_);
    backlog = backlogs_[static_cast<size_t>(mode)];
    const double now = now_s();
    backlog.age_s = now - measured_s_[static_cast<size_t>(mode)];
    backlog.seat_age_s = now - seat_measured_s_;
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

}  // namespace xllm
