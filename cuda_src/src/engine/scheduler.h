// Who computes what in the next step, and with which KV blocks. Policy over sequences and block
// ids: no device, no text, no clock.
//
// Rules. Each has a dash in front, which keeps clang-format from making one paragraph of them.
//   - order       by seniority: owned slots, then priority, then tenants' turns, then arrival. A
//                 tenant that comes with many requests at once gets a turn for each, one behind the
//                 other, and one that comes later is not behind all of them but at the turn that is
//                 served now. Everything below goes from senior to junior.
//   - decode      every running sequence whose prompt is computed gets one row in every step.
//   - prefill     the others share prefill_chunk rows per step, the most senior first.
//   - held        a sequence whose next token may not be chosen yet (its mask has not come)
//                 computes what lies before its last token and then sits steps out, with its
//                 blocks; the others go on. One that is due, as its mask may come while a step
//                 runs, takes part in the next step as if it had come, where free blocks suffice
//                 for that: it takes none from others and is not exhausted. Whether the mask did
//                 come is the caller's business, who advances the row or does not.
//   - turns       where max_step_sequences is 1, a step holds one sequence: the one whose turn is
//                 longest ago.
//   - blocks      are taken for the rows of this step only. A sequence that gets none takes them
//                 from the most junior running one, which is preempted: all its blocks go back, and
//                 it waits with its tokens. When there is no junior to take from, it sits this step
//                 out and keeps what it has; a senior or the end of one will free more. The most
//                 senior always gets on, unless owned slots hold what it needs.
//   - pinned      what runs in an owned slot never waits and is never preempted. When nobody is
//                 left to take blocks from, it is exhausted; its blocks stay with the slot.
//   - admission   the most senior waiting sequence runs when it has a seat and the pool could hold
//                 all its tokens, beside what the running ones need for theirs and one more block
//                 for each. So a preempted one does not come back only to be preempted again at
//                 once.
//   - sharing     sequences of one prompt (outputs of one request) wait for the first of them, the
//                 leader, to compute it, and then share its blocks; forked slots share likewise.
//                 Whoever writes into a block that others use makes it its own first: the device
//                 copies it before the step.
//   - resumption  a preempted sequence computes its tokens again, generated ones as rows of a
//                 chunk: rows do not depend on their neighbours, so its bytes are what they would
//                 have been.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "engine/sequence.h"
#include "kvcache/prefix_cache.h"

namespace xllm {

struct SchedulerConfig {
  int max_running = 1;         // sequences computing at once, beside those of owned slots
  int prefill_chunk = 1;       // rows of prefill in a step
  int segment_size = 1;        // tokens per prompt segment on devices with a segment path, else 1
  int max_step_sequences = 0;  // 0: no limit; 1: they take turns
};

// What one sequence computes in a step: its tokens from num_computed on.
struct ScheduledRows {
  Sequence *sequence = nullptr;
  int num_tokens = 0;
  bool wants_token = false;  // the last row is the last token there is: choose the next one
};

// One block's content goes into another before the rows are computed, in this order.
struct BlockCopy {
  int32_t from = -1;
  int32_t to = -1;
};

struct Schedule {
  std::vector<ScheduledRows> rows;  // senior to junior
  std::vector<BlockCopy> copies;
  std::vector<Sequence *>
      admitted;  // now running, of these some without a slot: the caller seats them
  std::vector<Sequence *> preempted;  // put back into the queue; they keep their slots
  std::vector<Sequence *> exhausted;  // no block left, and none to hope for: the caller ends them
  void clear();
};

// Not thread-safe: it belongs to the step loop's thread. Sequences are not owned; each is removed
// before it dies. The cache outlives the scheduler.
class Scheduler {
 public:
  Scheduler(const SchedulerConfig &config, PrefixCache *cache);

  // Into the queue. A pinned one, which has its seat, runs at once.
  void add(Sequence *sequence);
  // The rows of the next step; valid until the next call. num_free_slots: seats for admitted
  // sequences that have none. num_prefill_rows: at most, within prefill_chunk; -1: prefill_chunk.
  // Nobody is due any more afterwards.
  const Schedule &schedule(int num_free_slots, int num_prefill_rows = -1);
  // The step after the one in progress, whose tokens nobody knows yet: each running sequence ends
  // with a placeholder for its own. False where that step is not certain to be these very rows: one
  // waits or still computes its prompt, or a block would have to be taken or copied from another.
  bool schedule_ahead(std::vector<ScheduledRows> *rows);
  // These rows have been computed: publishes complete prompt blocks. To be called before the next
  // token is appended. Rows that it is not called for are computed again.
  void advance(const ScheduledRows &rows);
  // Out of queue or batch, its blocks go back; those of a pinned one stay with it, and it may be
  // added again. Harmless when repeated.
  void remove(Sequence *sequence);
  // A sequence that is with nobody becomes another one, also with nobody, that shares its blocks.
  void fork(const Sequence &from, Sequence *to);
  // Gives back the blocks beyond a sequence's tokens, of one that is with nobody.
  void trim(Sequence *sequence);

  bool has_work() const { return !waiting_.empty() || !running_.empty(); }
  const std::vector<Sequence *> &waiting() const { return waiting_; }
  const std::vector<Sequence *> &running() const { return running_; }
  uint64_t num_preemptions() const { return num_preemptions_; }

 private:
  void start_pinned(Sequence *sequence);
  void admit(int num_free_slots);
  bool add_rows(size_t index, int *budget);
  void schedule_turn(int *budget);
  bool try_to_place(Sequence *sequence);
  int max_cached(const Sequence &sequence) const;
  const Sequence *find(uint64_t id) const;
  int num_shared_tokens(const Sequence &leader, const Sequence &sequence) const;
  bool take_blocks(size_t index, int num_tokens);
  bool make_own(size_t index);
  bool preempt_junior_of(size_t index);
  void preempt(Sequence *sequence);
  void give_place(Sequence *sequence);

  SchedulerConfig config_;
  PrefixCache *cache_;
  std::vector<Sequence *> waiting_;  // senior to junior, both
  std::vector<Sequence *> running_;
  Schedule schedule_;
  uint64_t num_preemptions_ = 0;
  uint64_t turn_ = 0;
  // Of each priority, the place of the last one admitted; and the last one given to each tenant
  // that is not behind that.
  std::map<int32_t, uint64_t> place_;
  std::map<std::pair<int32_t, uint64_t>, uint64_t> last_place_;
};

}  // namespace xllm
