// One lane's step: who takes part, the rows on their way to the device, the tokens back from it,
// and the events that they make.
#include <algorithm>
#include <new>
#include <utility>

#include "base/error.h"
#include "engine/clock.h"
#include "engine/engine.h"
#include "model/batch.h"

namespace xllm {
// One batch. False when there was nothing to compute.
bool Engine::run_lane(Lane *lane) {
  if (!lane->in_flight && !start_step(lane)) return false;
  if (!lane->in_flight) return true;  // there was no memory for it
  StepInFlight step = std::exchange(lane->in_flight, {});
  if (!step.is_chosen && !choose(lane, &step)) return true;
  // Requests that have ended since, or whose mask has not come, take no part any more: what was
  // computed for them is dropped.
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
  // Beside a load steps take longer, which is no news about the next ones.
  if (!is_loading_ && lane->pace.record(step.has_decode, step.num_prefill_rows, step_s)) {
    lane->measured_s = end_s;
  }
  complete(lane, live, places);
  return true;
}

// The next step: who takes part, and its rows on their way. False when there is nothing to compute.
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
    step.ids.push_back(rows.sequence->id);
  }
  step.rows = schedule.rows;
  if (compute(step, [&] { lane->runner.forward(schedule.copies, schedule.rows); })) {
    lane->in_flight = std::move(step);
  }
  return true;
}

// Has the tokens of a step chosen, whose rows are computed or on their way: on the device, where it
// can, and then they are on their way as well. Masks that are due are waited for before it. False
// when there was no memory for it, and the step is as if it had not been.
bool Engine::choose(Lane *lane, StepInFlight *step) {
  wait_for_masks(lane, step);
  step->is_chosen = compute(*step, [&] {
    const std::vector<SampleRow> wishes = sample_rows(*step);
    lane->is_on_device = lane->runner.start_sample(wishes);
    if (!lane->is_on_device) lane->chosen = lane->runner.sample(wishes);
    totals_.workspace_bytes = std::max(totals_.workspace_bytes, lane->runner.workspace_bytes());
  });
  return step->is_chosen;
}

// Starts the step after `step`, whose tokens are not known yet, so that the device goes on while
// the host reads and publishes them. Where the known token has a say in how the next one is chosen,
// as by a mask, the rows alone are started. Nothing where that step is not certain; a request that
// ends with its token has been computed for once too often, which nobody sees.
StepInFlight Engine::start_ahead(Lane *lane, const StepInFlight &step) {
  if (step.rows.size() != lane->scheduler.running().size()) return {};
  if (has_work_elsewhere(lane)) return {};
  bool is_choice_known = true;
  for (const ScheduledRows &rows : step.rows) {
    const Request &request = *requests_.at(rows.sequence->id);
    if (!rows.wants_token || !request.can_go_ahead()) return {};
    is_choice_known &= !request.chooses_by_tokens();
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
  for (const ScheduledRows &rows : ahead.rows) ahead.ids.push_back(rows.sequence->id);
  try {
    lane->runner.forward({}, ahead.rows);
    if (is_choice_known && !lane->runner.start_sample(sample_rows(ahead))) return {};
  } catch (const Error &error) {
    if (error.status() != Status::kMemory) throw;
    return {};  // it is computed again in its turn, and fails there if it must
  }
  ahead.is_chosen = is_choice_known;
  return ahead;
}

// Whether another lane waits for its turn.
bool Engine::has_work_elsewhere(const Lane *lane) const {
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const std::unique_ptr<Lane> &other) {
    return other.get() != lane && other->scheduler.has_work();
  });
}

// Of a row that has dropped out, or whose request has ended, the most likely token is chosen, which
// takes nothing but a look at its logits, and nobody sees it.
std::vector<SampleRow> Engine::sample_rows(const StepInFlight &step) {
  std::vector<SampleRow> out;
  for (size_t i = 0; i < step.rows.size(); ++i) {
    if (!step.rows[i].wants_token) continue;
    SampleRow dropped;
    dropped.num_choosable = vocabulary_.num_choosable();
    const auto found = requests_.find(step.ids[i]);
    out.push_back(found == requests_.end() ? dropped : found->second->sample_row());
  }
  return out;
}

// What streams that decode wait for besides the next step of this lane; -1 where nobody decodes.
double Engine::decode_wait_s(const Lane &lane) const {
  double wait_s = 0;
  bool has_any = false;
  for (const std::unique_ptr<Lane> &other : lanes_) {
    int num_decoding = 0;
    for (const Sequence *sequence : other->scheduler.running()) {
      num_decoding += sequence->is_decoding() && !sequence->sits_out() ? 1 : 0;
    }
    has_any |= num_decoding > 0;
    // A lane that takes turns has each of them in a step of its own.
    const int num_steps = other->takes_turns ? num_decoding : std::min(num_decoding, 1);
    const int num_others = other.get() == &lane ? std::max(0, num_steps - 1) : num_steps;
    wait_s += num_others * other->pace.decode_s();
  }
  if (is_loading_) wait_s += slice_s();
  return has_any ? wait_s : -1;
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

// Does a part of a step. False when there was no memory for its scratch: the request that asked for
// most of it has ended, and nothing else has changed.
bool Engine::compute(const StepInFlight &step, const std::function<void()> &part) {
  Error problem(Status::kMemory, "");
  try {
    part();
    return true;
  } catch (const Error &error) {
    if (error.status() != Status::kMemory) throw;
    problem = error;
  } catch (const std::bad_alloc &) {
    problem = Error(Status::kMemory, "out of memory for a step; lower prefill_chunk or max_slots");
  }
  uint64_t largest = 0;  // the most junior one of several
  int num_tokens = 0;
  for (size_t i = 0; i < step.rows.size(); ++i) {
    if (step.rows[i].num_tokens < num_tokens || requests_.count(step.ids[i]) == 0) continue;
    largest = step.ids[i];
    num_tokens = step.rows[i].num_tokens;
  }
  if (largest != 0) finish(largest, problem.status(), problem.message(), problem.details());
  return false;
}

// What a step has computed becomes events. places: in what was chosen, of each of its rows that
// wants a token.
void Engine::complete(Lane *lane, const StepInFlight &step, const std::vector<size_t> &places) {
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
      const size_t place = places[next++];
      if (request.options().wants_logits) logits = lane->runner.logits(place);
      handle_token(rows, lane->chosen[place], std::move(logits), now);
    } else if (rows.sequence->is_prefill_only && rows.sequence->num_to_compute() == 0) {
      requests_.at(rows.sequence->id)->complete_prefill();
      finish(rows.sequence->id, Status::kOk, "");
    }
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
  note_gap(requests_.at(id).get(), event.wants_mask, now);
  event.logits = std::move(logits);
  new_events_.push_back(std::move(event));
  if (is_last) finish(id, Status::kOk, "");
}

void Engine::note_gap(Request *request, bool wants_mask, double now) {
  if (request->last_token_s >= 0) {
    totals_.token_gap_max_s = std::max(totals_.token_gap_max_s, now - request->last_token_s);
  }
  request->last_token_s = wants_mask ? -1 : now;
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

}  // namespace xllm
