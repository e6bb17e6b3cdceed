#include "engine/scheduler.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace xllm {
namespace {

void insert_by_seniority(std::vector<Sequence *> *list, Sequence *sequence) {
  const auto place =
      std::upper_bound(list->begin(), list->end(), sequence,
                       [](const Sequence *a, const Sequence *b) { return is_senior(*a, *b); });
  list->insert(place, sequence);
}

void erase(std::vector<Sequence *> *list, const Sequence *sequence) {
  list->erase(std::remove(list->begin(), list->end(), sequence), list->end());
}

}  // namespace

void Schedule::clear() {
  rows.clear();
  copies.clear();
  admitted.clear();
  preempted.clear();
  exhausted.clear();
}

Scheduler::Scheduler(const SchedulerConfig &config, PrefixCache *cache)
    : config_(config), cache_(cache) {
  XLLM_DCHECK(config.max_running >= 1 && config.prefill_chunk >= 1 && config.segment_size >= 1);
}

// Tokens of its prompt that may come from the cache.
int Scheduler::max_cached(const Sequence &sequence) const {
  if (sequence.bypasses_cache) return 0;
  return max_cached_tokens(sequence.num_prompt, cache_->block_size(), config_.segment_size);
}

void Scheduler::add(Sequence *sequence) {
  XLLM_DCHECK(sequence->state == SequenceState::kNew);
  sequence->last_turn = std::max(sequence->last_turn, turn_);
  if (sequence->is_pinned) {
    start_pinned(sequence);
    return;
  }
  sequence->state = SequenceState::kWaiting;
  give_place(sequence);
  insert_by_seniority(&waiting_, sequence);
}

// Behind its tenant's last one, or where the queue is now.
void Scheduler::give_place(Sequence *sequence) {
  uint64_t &last = last_place_[{sequence->priority, sequence->tenant}];
  last = sequence->place = std::max(last + 1, place_[sequence->priority]);
}

void Scheduler::start_pinned(Sequence *sequence) {
  // A slot's first prompt begins with what the cache has of it.
  if (sequence->prompt_start == 0 && sequence->num_computed == 0 &&
      sequence->blocks.num_blocks() == 0) {
    sequence->cursor = cache_->start(sequence->cache_salt);
    sequence->num_cached = cache_->match(sequence->tokens, max_cached(*sequence), &sequence->cursor,
                                         &sequence->blocks);
    sequence->num_computed = sequence->num_cached;
  }
  sequence->state = SequenceState::kRunning;
  insert_by_seniority(&running_, sequence);
}

const Schedule &Scheduler::schedule(int num_free_slots, int num_prefill_rows) {
  schedule_.clear();
  admit(num_free_slots);
  int budget = config_.prefill_chunk;
  if (num_prefill_rows >= 0) budget = std::min(budget, num_prefill_rows);
  if (config_.max_step_sequences == 1) {
    schedule_turn(&budget);
  } else {
    // note: a preemption takes from the end of running_, so indices up to i stay what they are.
    for (size_t i = 0; i < running_.size(); ++i) add_rows(i, &budget);
  }
  for (Sequence *sequence : schedule_.exhausted) remove(sequence);
  for (Sequence *sequence : running_) sequence->is_due = false;
  return schedule_;
}

bool Scheduler::schedule_ahead(std::vector<ScheduledRows> *rows) {
  rows->clear();
  if (!waiting_.empty() || config_.max_step_sequences == 1) return false;
  for (const Sequence *sequence : running_) {
    if (sequence->is_pinned || !sequence->is_decoding()) return false;
  }
  for (Sequence *sequence : running_) {
    if (!cache_->extend(&sequence->blocks, int64_t{sequence->num_computed} + 1)) return false;
    const int place = sequence->num_computed / cache_->block_size();
    if (!cache_->is_own(sequence->blocks, place)) return false;
  }
  for (Sequence *sequence : running_) rows->push_back({sequence, 1, true});
  return true;
}

// Rows of running_[index], if it gets their blocks. *budget: rows of prefill left in this step.
bool Scheduler::add_rows(size_t index, int *budget) {
  Sequence *sequence = running_[index];
  const bool is_decoding = sequence->is_decoding();
  int num_tokens =
      is_decoding ? sequence->num_to_compute() : std::min(sequence->num_to_compute(), *budget);
  // A slot's history ends with a token of another prompt, on the path of that prompt.
  const bool is_behind = sequence->num_computed < sequence->prompt_start;
  if (is_behind && config_.segment_size > 1) {
    num_tokens = std::min(num_tokens, sequence->prompt_start - sequence->num_computed);
  }
  if (num_tokens == 0) return false;
  if (!take_blocks(index, num_tokens)) {
    const bool has_all = sequence->blocks.num_blocks() == cache_->num_blocks();
    if ((has_all || sequence->is_pinned) && !sequence->may_drop_out()) {
      schedule_.exhausted.push_back(sequence);
    }
    return false;
  }
  if (!is_decoding) *budget -= num_tokens;
  schedule_.rows.push_back({sequence, num_tokens, num_tokens == sequence->num_pending()});
  return true;
}

// The one sequence whose turn it is, or the next one that gets on.
void Scheduler::schedule_turn(int *budget) {
  std::vector<Sequence *> order = running_;
  std::stable_sort(order.begin(), order.end(), [](const Sequence *a, const Sequence *b) {
    return a->last_turn < b->last_turn;
  });
  for (Sequence *sequence : order) {
    const auto place = std::find(running_.begin(), running_.end(), sequence);
    if (place == running_.end()) continue;  // preempted by one before it
    if (!add_rows(static_cast<size_t>(place - running_.begin()), budget)) continue;
    sequence->last_turn = ++turn_;
    return;
  }
}

void Scheduler::admit(int num_free_slots) {
  auto num_running = std::count_if(running_.begin(), running_.end(),
                                   [](const Sequence *sequence) { return !sequence->is_pinned; });
  for (size_t i = 0; i < waiting_.size();) {
    if (num_running >= config_.max_running) return;
    Sequence *sequence = waiting_[i];
    const Sequence *leader = sequence->leader_id != 0 ? find(sequence->leader_id) : nullptr;
    const bool waits_for_leader = leader != nullptr && num_shared_tokens(*leader, *sequence) < 0;
    if (waits_for_leader || (sequence->slot < 0 && num_free_slots == 0)) {
      ++i;  // one behind it may have kept its slot through a preemption
      continue;
    }
    if (!try_to_place(sequence)) return;
    if (sequence->slot < 0) --num_free_slots;
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    insert_by_seniority(&running_, sequence);
    sequence->state = SequenceState::kRunning;
    schedule_.admitted.push_back(sequence);
    ++num_running;
    uint64_t &place = place_[sequence->priority];
    place = std::max(place, sequence->place);
    // Tenants that the queue has passed begin anew.
    for (auto entry = last_place_.begin(); entry != last_place_.end();) {
      const bool is_passed = entry->first.first == sequence->priority && entry->second < place;
      entry = is_passed ? last_place_.erase(entry) : std::next(entry);
    }
  }
}

// Null for one that is not here, or no more.
const Sequence *Scheduler::find(uint64_t id) const {
  for (const auto *list : {&running_, &waiting_}) {
    for (const Sequence *sequence : *list) {
      if (sequence->id == id) return sequence;
    }
  }
  return nullptr;
}

// Tokens whose blocks it can have from its leader, all but the last one of their prompt; -1 while
// that one has not computed them.
int Scheduler::num_shared_tokens(const Sequence &leader, const Sequence &sequence) const {
  const int num_tokens = sequence.num_prompt - 1;
  const bool is_there =
      leader.state == SequenceState::kRunning && leader.num_computed >= num_tokens;
  return is_there ? num_tokens : -1;
}

// Takes the cached blocks of its prompt if the pool has room for the rest of its tokens.
bool Scheduler::try_to_place(Sequence *sequence) {
  int64_t num_reserved = 0;
  for (const Sequence *other : running_) {
    num_reserved += other->blocks.num_missing(other->num_tokens()) + 1;
  }
  // One whose leader has ended goes by the cache alone.
  const Sequence *leader = sequence->leader_id != 0 ? find(sequence->leader_id) : nullptr;
  if (leader != nullptr) {
    const int num_shared = num_shared_tokens(*leader, *sequence);
    cache_->share(leader->blocks, num_shared, &sequence->blocks);
    // One more than its tokens lack: the block that is partly filled becomes its own.
    if (sequence->blocks.num_missing(sequence->num_tokens()) + 1 + num_reserved >
        cache_->num_available()) {
      cache_->release_all(&sequence->blocks);
      return false;
    }
    sequence->cursor = cache_->start(sequence->cache_salt);
    sequence->num_computed = sequence->num_cached = num_shared;
    sequence->leader_id = 0;
    return true;
  }
  const int num_needed = sequence->blocks.num_missing(sequence->num_tokens());
  const int num_needed_at_least = num_needed - max_cached(*sequence) / cache_->block_size();
  if (num_needed_at_least + num_reserved > cache_->num_available()) return false;

  sequence->cursor = cache_->start(sequence->cache_salt);
  const int num_cached =
      cache_->match(sequence->tokens, max_cached(*sequence), &sequence->cursor, &sequence->blocks);
  const int num_missing = sequence->blocks.num_missing(sequence->num_tokens());
  if (num_missing + num_reserved > cache_->num_available()) {
    cache_->release_all(&sequence->blocks);
    return false;
  }
  sequence->num_computed = num_cached;
  if (sequence->slot < 0) sequence->num_cached = num_cached;  // first admission
  return true;
}

// Blocks for num_tokens more rows of running_[index], from juniors if need be and it is sure to
// keep what it computes.
bool Scheduler::take_blocks(size_t index, int num_tokens) {
  Sequence *sequence = running_[index];
  const int64_t end = static_cast<int64_t>(sequence->num_computed) + num_tokens;
  while (!cache_->extend(&sequence->blocks, end)) {
    if (!preempt_junior_of(index)) return false;
  }
  return make_own(index);
}

// The block that running_[index] writes to next, if others use it; false where none is left.
bool Scheduler::make_own(size_t index) {
  Sequence *sequence = running_[index];
  const int place = sequence->num_computed / cache_->block_size();
  int32_t copied_from = kNoBlock;
  while (!cache_->make_own(&sequence->blocks, place, &copied_from)) {
    if (copied_from == kNoBlock) return true;
    if (!preempt_junior_of(index)) return false;
  }
  schedule_.copies.push_back({copied_from, sequence->blocks.ids()[static_cast<size_t>(place)]});
  return true;
}

// The most junior one; false where running_[index] may take from nobody.
bool Scheduler::preempt_junior_of(size_t index) {
  const bool is_last = index + 1 == running_.size();
  if (is_last || running_.back()->is_pinned || running_[index]->may_drop_out()) return false;
  preempt(running_.back());
  return true;
}

void Scheduler::preempt(Sequence *sequence) {
  cache_->release_all(&sequence->blocks);
  sequence->num_computed = 0;
  sequence->is_due = false;  // its mask will be there before its tokens are computed again, or late
  ++sequence->num_preemptions;
  ++num_preemptions_;
  sequence->state = SequenceState::kWaiting;
  erase(&running_, sequence);
  erase(&schedule_.admitted, sequence);
  insert_by_seniority(&waiting_, sequence);
  schedule_.preempted.push_back(sequence);
}

void Scheduler::advance(const ScheduledRows &rows) {
  Sequence *sequence = rows.sequence;
  sequence->num_computed += rows.num_tokens;
  // An appended prompt stays out of the cache.
  if (sequence->prompt_start > 0 || sequence->bypasses_cache) return;
  // A slot may compute its prompt's last token twice, so it keeps that one's block to itself.
  const auto max_tokens = sequence->is_pinned ? max_cached_tokens : max_published_tokens;
  const int num_published =
      max_tokens(sequence->num_prompt, cache_->block_size(), config_.segment_size);
  cache_->insert(sequence->tokens, std::min(sequence->num_computed, num_published),
                 sequence->blocks, &sequence->cursor);
}

void Scheduler::remove(Sequence *sequence) {
  if (sequence->state == SequenceState::kWaiting) erase(&waiting_, sequence);
  if (sequence->state == SequenceState::kRunning) erase(&running_, sequence);
  if (sequence->is_pinned) {
    sequence->state = SequenceState::kNew;
    return;
  }
  cache_->release_all(&sequence->blocks);
  sequence->state = SequenceState::kDone;
}

void Scheduler::fork(const Sequence &from, Sequence *to) {
  XLLM_DCHECK(from.state == SequenceState::kNew && to->blocks.num_blocks() == 0);
  *to = from;
  to->blocks.clear();
  cache_->share(from.blocks, from.num_computed, &to->blocks);
}

void Scheduler::trim(Sequence *sequence) {
  XLLM_DCHECK(sequence->state == SequenceState::kNew);
  std::vector<int32_t> &ids = sequence->blocks.ids();
  const int64_t capacity = sequence->num_tokens();
  while (sequence->blocks.num_blocks() > 0 &&
         sequence->blocks.capacity() - sequence->blocks.block_size() >= capacity) {
    cache_->release(ids.back());
    ids.pop_back();
  }
}

}  // namespace xllm
