// The engine: one model on one device, and a thread of its own that runs the step loop.
//
//   submit, cancel  ->  inbox  ->  step: admit, compute rows, choose tokens  ->  events  ->
//   take_events
//
// A step takes what has come in, ends what is cancelled or late and the slots whose lease is over,
// runs one batch and publishes what happened, all at once. Callers touch the inbox, the slots, the
// events and a snapshot, each behind a lock that is never held during a step, so none of them waits
// for the device.
//
// engine.cc makes and ends it and tells what can be seen of it; engine_submit.cc and
// engine_slots.cc are the callers' side; engine_loop.cc is the loop, engine_lanes.cc loads what it
// needs, engine_step.cc takes one lane's step, engine_masks.cc brings it the masks of constrained
// requests, engine_release.cc ends requests.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "backend/backend.h"
#include "engine/engine_config.h"
#include "engine/event_queue.h"
#include "engine/lane.h"
#include "engine/request.h"
#include "engine/slot.h"
#include "engine/stats.h"
#include "engine/vocabulary.h"

namespace xllm {

struct EngineInfo {
  DeviceInfo device;
  DecodeMode decode_mode = DecodeMode::kBatched;
  KvType kv_type = KvType::kF16;
  int32_t max_slots = 0, max_seq_len = 0, prefill_chunk = 0, block_size = 0, max_queue = 0;
  int32_t vocab_size = 0;  // logits in a row
  MemoryPlan plan;         // as of creation
  double load_s = 0;
};

// A slot as it is now, and how long it will stay so.
struct SlotSnapshot : Slot {
  double lease_left_s = 0;
  double owned_s = 0;
};

// What one step chose for a slot, or why it did not.
struct SlotStep {
  Status status = Status::kOk;
  std::string message;
  int32_t token_id = -1;
  std::vector<float> logits;  // [vocab_size] where asked for
};

// The tokens allowed at one position of a constrained request.
struct PositionMask {
  uint64_t request_id = 0;
  uint32_t token_index = 0;
  TokenMask mask;
};

class Engine {
 public:
  // Loads what the mode asks for and starts the step loop. Throws what plan_engine and loading
  // throw, and Error(kMemory) when the plan does not fit; then nothing stays allocated.
  Engine(EngineModel model, const EngineConfig &config, std::unique_ptr<Backend> backend);
  // Ends every request without an event; waits for the step in progress at most.
  ~Engine();
  Engine(const Engine &) = delete;
  Engine &operator=(const Engine &) = delete;

  const EngineInfo &info() const { return info_; }

  // Queues a request and returns its id. Throws Error as xllm_engine_submit lists them.
  uint64_t submit(RequestOptions options);
  // The same for several outputs of one prompt, one id each.
  std::vector<uint64_t> submit(RequestOptions options, int num_outputs);
  // Leading tokens of a prompt that the prefix cache holds now. Throws Error as
  // xllm_engine_count_cached lists them.
  int count_cached(Span<const int32_t> prompt, DecodeMode mode, std::string_view salt) const;
  // Error(kNotFound): an id never given out. Harmless for a request that has ended.
  void cancel(uint64_t request_id);
  // Masks of constrained requests, all in effect from the same step on.
  void push_masks(std::vector<PositionMask> masks);
  // No new requests from now on.
  void drain();

  // Slots as a resource; each throws Error as its namesake in xllm.h lists them.
  SlotSnapshot acquire(DecodeMode mode, int32_t wanted, double lease_s);
  SlotSnapshot renew(SlotRef ref, double lease_s);
  SlotSnapshot release(SlotRef ref);
  SlotSnapshot fork(SlotRef ref, double lease_s);
  // options: prompt, delivery and max_duration_s count.
  uint64_t prefill(SlotRef ref, RequestOptions options);
  uint64_t decode_slot(SlotRef ref, RequestOptions options);
  std::vector<uint64_t> decode_batch(Span<const SlotRef> refs, std::vector<RequestOptions> options);
  // One token for each slot, waiting for it. sampling: one for each slot.
  SlotStep step_slot(SlotRef ref, const SamplingParams &sampling, bool wants_logits);
  std::vector<SlotStep> step_batch(Span<const SlotRef> refs, Span<const SamplingParams> sampling,
                                   bool wants_logits);

  // See EventQueue.
  int event_fd() const { return events_.fd(); }
  std::vector<Event> take_events(uint64_t request_id, double timeout_s) {
    return events_.take(request_id, timeout_s);
  }

  // Never wait for a step. Slots as they are now, the rest as of the end of the last step.
  EngineStats stats() const;
  bool get_slot(int32_t index, SlotSnapshot *out) const;

 private:
  struct Cancel {
    uint64_t request_id;
    uint64_t step;  // steps done when it was asked for
  };
  struct Fork {
    SlotRef from, to;
    DecodeMode mode;
    uint64_t before_id;  // requests from this one on were submitted later
  };

  void load_lane(DecodeMode mode);
  void load_parked();
  std::optional<Error> load_by_pieces(DecodeMode mode);
  void step_between_pieces();
  double slice_s() const;
  Lane *find_lane(DecodeMode mode) const;
  const WeightSetPlan &lane_plan(DecodeMode mode) const;
  void check_lane(DecodeMode mode, int num_prompt);
  void check_deadline(DecodeMode mode, const RequestOptions &options) const;

  // Callers' side; these two with inbox_mutex_ held.
  void check_open() const;
  uint64_t push(std::unique_ptr<Request> request);
  void wake();
  std::unique_ptr<Request> make_request(RequestKind kind, RequestOptions options, DecodeMode mode);
  Slot owned_slot(SlotRef ref) const;
  std::vector<uint64_t> start_decode(const char *call, DecodeMode mode, Span<const SlotRef> refs,
                                     std::vector<RequestOptions> options);
  void check_decode(const char *call, DecodeMode mode, SlotRef ref, const RequestOptions &options);
  std::vector<SlotStep> collect(const std::vector<uint64_t> &ids);

  // The step loop's thread.
  void run();
  bool wait_for_work();
  void step();
  void take_inbox();
  void take_masks(std::vector<PositionMask> masks);
  void begin(Request *request);
  void end_late_requests(double now_s);
  void begin_on_slot(Request *request);
  void fork_slot(const Fork &fork);
  void end_slots(double now_s);
  void free_slot(const Slot &slot);
  double next_timer_s() const;
  bool run_lane(Lane *lane);
  bool start_step(Lane *lane);
  StepInFlight start_ahead(Lane *lane, const StepInFlight &step);
  void complete(Lane *lane, const StepInFlight &step, const std::vector<size_t> &places);
  bool choose(Lane *lane, StepInFlight *step);
  bool has_work_elsewhere(const Lane *lane) const;
  std::vector<SampleRow> sample_rows(const StepInFlight &step);
  double decode_wait_s(const Lane &lane) const;
  void note_gap(Request *request, bool wants_mask, double now_s);
  void seat(DecodeMode mode, const Schedule &schedule);
  bool compute(const StepInFlight &step, const std::function<void()> &part);
  bool waits_for_mask(const StepInFlight &step, size_t index) const;
  bool keeps_others_waiting(const Lane &lane, const StepInFlight &step) const;
  void wait_for_masks(Lane *lane, StepInFlight *step);
  void end_exhausted(const Lane &lane, const Sequence &sequence);
  void report_prefill(const ScheduledRows &rows);
  void handle_token(const ScheduledRows &rows, const Sampled &sampled, std::vector<float> logits,
                    double now_s);
  // The one release path: ends a request wherever it is, gives back slot and blocks (a call's to
  // the slot that it ran in) and reports it.
  void finish(uint64_t request_id, Status status, const std::string &message,
              const Error::Details &details = {});
  void give_back(Request *request);
  void note_freed_seat(const Lane &lane);
  void fail(const std::string &message);
  void publish();

  // Set at creation.
  EngineModel model_;
  EngineConfig config_;
  std::unique_ptr<Backend> backend_;
  Vocabulary vocabulary_;
  EnginePlan plan_;
  EngineInfo info_;
  HashKey cache_key_;

  // The step loop's own.
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::unordered_map<uint64_t, std::unique_ptr<Request>> requests_;
  std::vector<Sequence> holdings_;  // per slot: what an acquired one holds while no call runs in it
  std::vector<uint64_t> parked_;    // requests whose lane is not loaded yet
  bool is_loading_ = false;         // a step runs between two pieces of a load
  double slice_start_s_ = 0;        // of a load, since the last step between
  std::exception_ptr failure_meanwhile_;  // what has ended such a step
  std::vector<Event> new_events_;
  int64_t num_ended_ = 0;       // since the last publish
  bool has_progress_ = false;   // the last step did something: the next one may, too
  double timer_s_ = 0;          // when there will be something to do without anybody asking
  EngineStats totals_;          // counters
  double seat_freed_s_ = -1;    // when a seat last became free while others waited for one
  double seat_interval_s_ = 0;  // between two such moments, of late
  double seat_noted_s_ = 0;     // when that was last measured

  // Between callers and the loop.
  mutable std::mutex inbox_mutex_;
  std::condition_variable inbox_changed_;
  std::vector<std::unique_ptr<Request>> inbox_;
  std::vector<Cancel> cancels_;
  std::vector<PositionMask> masks_;
  std::vector<Fork> forks_;
  uint64_t next_id_ = 1;
  int64_t num_live_ = 0;  // submitted and not ended
  bool has_slot_news_ = false;
  bool is_stopping_ = false;
  bool is_draining_ = false;
  bool has_failed_ = false;
  std::string failure_;

  mutable std::mutex snapshot_mutex_;
  EngineStats snapshot_;
  Backlog backlogs_[3];        // by DecodeMode; with what is in the inbox left out
  double measured_s_[3] = {};  // when their rates were measured
  double seat_measured_s_ = 0;

  mutable std::mutex
      slots_mutex_;  // may be taken with inbox_mutex_ held, never the other way round
  SlotTable slots_;

  std::atomic<uint64_t> num_steps_{0};
  std::atomic<int64_t> heartbeat_ns_{0};
  std::atomic<uint32_t> loaded_modes_{0};  // bit per DecodeMode
  std::atomic<uint32_t> loading_mode_{0};  // likewise, while it takes memory
  std::atomic<const Lane *> batched_lane_{nullptr}, per_slot_lane_{nullptr};  // once loaded

  EventQueue events_;
  std::thread thread_;
};

}  // namespace xllm
