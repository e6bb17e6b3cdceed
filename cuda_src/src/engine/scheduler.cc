#include "engine/scheduler.h"

#include <algorithm>

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
  admitted.clear();
  preempted.clear();
  exhausted.clear();
}

Scheduler::Scheduler(const SchedulerConfig &config, PrefixCache *cache)
    : config_(config), cache_(cache) {
  XLLM_DCHECK(config.max_running >= 1 && config.prefill_chunk >= 1 && config.segment_size >= 1);
}

bool Scheduler::can_ever_fit(int num_prompt) const {
  const int64_t capacity = static_cast<int64_t>(cache_->num_blocks()) * cache_->block_size();
  return static_cast<int64_t>(num_prompt) + 1 <= capacity;
}

void Scheduler::add(Sequence *sequence) {
  XLLM_DCHECK(sequence->state == SequenceState::kNew);
  sequence->state = SequenceState::kWaiting;
  insert_by_seniority(&waiting_, sequence);
}

const Schedule &Scheduler::schedule(int num_free_slots) {
  schedule_.clear();
  admit(num_free_slots);
  int budget = config_.prefill_chunk;
  // note: a preemption takes from the end of running_, so indices up to i stay what they are.
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence *sequence = running_[i];
    const bool is_decoding = sequence->is_decoding();
    const int num_tokens = is_decoding ? 1 : std::min(sequence->num_pending(), budget);
    if (num_tokens == 0) continue;
    if (!take_blocks(i, num_tokens)) {
      const bool has_all = sequence->blocks.num_blocks() == cache_->num_blocks();
      if (has_all) schedule_.exhausted.push_back(sequence);
      continue;
    }
    if (!is_decoding) budget -= num_tokens;
    schedule_.rows.push_back({sequence, num_tokens, num_tokens == sequence->num_pending()});
  }
  for (Sequence *sequence : schedule_.exhausted) remove(sequence);
  return schedule_;
}

void Scheduler::admit(int num_free_slots) {
  for (size_t i = 0; i < waiting_.size();) {
    if (static_cast<int>(running_.size()) >= config_.max_running) return;
    Sequence *sequence = waiting_[i];
    if (sequence->slot < 0 && num_free_slots == 0) {
      ++i;  // one behind it may have kept its slot through a preemption
      continue;
    }
    if (!try_to_place(sequence)) return;
    if (sequence->slot < 0) --num_free_slots;
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    insert_by_seniority(&running_, sequence);
    sequence->state = SequenceState::kRunning;
    schedule_.admitted.push_back(sequence);
  }
}

// Takes the cached blocks of its prompt if the pool has room for the rest of its tokens.
bool Scheduler::try_to_place(Sequence *sequence) {
  int64_t num_reserved = 0;
  for (const Sequence *other : running_) {
    num_reserved += other->blocks.num_missing(other->num_tokens()) + 1;
  }
  const int max_cached =
      max_cached_tokens(sequence->num_prompt, cache_->block_size(), config_.segment_size);
  const int num_needed = sequence->blocks.num_missing(sequence->num_tokens());
  const int num_needed_at_least = num_needed - max_cached / cache_->block_size();
  if (num_needed_at_least + num_reserved > cache_->num_available()) return false;

  sequence->cursor = cache_->start("");
  const int num_cached =
      cache_->match(sequence->tokens, max_cached, &sequence->cursor, &sequence->blocks);
  const int num_missing = sequence->blocks.num_missing(sequence->num_tokens());
  if (num_missing + num_reserved > cache_->num_available()) {
    cache_->release_all(&sequence->blocks);
    return false;
  }
  sequence->num_computed = num_cached;
  if (sequence->slot < 0) sequence->num_cached = num_cached;  // first admission
  return true;
}

// Blocks for num_tokens more rows of running_[index], from juniors if need be.
bool Scheduler::take_blocks(size_t index, int num_tokens) {
  Sequence *sequence = running_[index];
  const int64_t end = static_cast<int64_t>(sequence->num_computed) + num_tokens;
  while (!cache_->extend(&sequence->blocks, end)) {
    if (index + 1 == running_.size()) return false;
    preempt(running_.back());
  }
  return true;
}

void Scheduler::preempt(Sequence *sequence) {
  cache_->release_all(&sequence->blocks);
  sequence->num_computed = 0;
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
  const int num_published =
      max_published_tokens(sequence->num_prompt, cache_->block_size(), config_.segment_size);
  cache_->insert(sequence->tokens, std::min(sequence->num_computed, num_published),
                 sequence->blocks, &sequence->cursor);
}

void Scheduler::remove(Sequence *sequence) {
  if (sequence->state == SequenceState::kWaiting) erase(&waiting_, sequence);
  if (sequence->state == SequenceState::kRunning) erase(&running_, sequence);
  cache_->release_all(&sequence->blocks);
  sequence->state = SequenceState::kDone;
}

}  // namespace xllm
