// How long steps take, as measured, and what follows from it: how much prefill a step may hold
// beside rows of decode, and how long a request that comes now would wait. Figures only: no clock,
// no device, no request.
//
// A step takes about d + c x rows of prefill. The gap between two tokens of a stream is the step
// between them, so while others decode the rows are what fits into the bound after d. Where d alone
// fills most of the bound, a quarter of the bound is left to prefill all the same, or it would
// never end. How a prompt is cut changes no byte of any answer.
#pragma once

#include <cstdint>

namespace xllm {

class Pace {
 public:
  // max_gap_s: the bound, 0: none. max_rows: of prefill in any step.
  Pace(double max_gap_s, int max_rows) : max_gap_s_(max_gap_s), max_rows_(max_rows) {}

  // Rows of prefill for the next step. decode_s: what the decoding streams wait for besides, such
  // as the steps of others whose turn comes before theirs; < 0: nobody decodes.
  int prefill_rows(double decode_s) const;
  // A step that took step_s. decode_s: the part of it that its rows of decode would have taken
  // alone.
  // True where it has told how fast long prompts go: with enough rows, or with whole chunks.
  bool record(bool has_decode, int num_prefill_rows, double step_s);

  // What a step of decode alone takes; 0 while none was measured.
  double decode_s() const { return decode_s_; }
  // Rows of prefill per second of steps that tell; 0 while none was measured.
  double prefill_rate() const { return rate_; }

 private:
  double max_gap_s_;
  int max_rows_;
  double decode_s_ = 0;
  double row_s_ = 0;  // what a further row of prefill adds to a step; 0 while unknown
  double rate_ = 0;
  int last_rows_ = 0;  // of the last step that held some
};

// What lies before a request that comes now.
struct Backlog {
  int num_free_slots = 0;
  int num_waiting = 0;         // served before it
  int64_t num_rows = 0;        // of prompts that are computed before its own
  double prefill_rate = 0;     // rows per second
  double seat_interval_s = 0;  // between two seats becoming free while all are taken; 0: unknown
  double age_s = 0;            // since the rate was measured
  double seat_age_s = 0;       // since the interval was
};

// Seconds until its prompt of so many tokens would be computed; 0 where nothing is known, or no
// more: who is turned away measures nothing, so one bad figure must not turn everybody away.
double estimate_wait_s(const Backlog &backlog, int num_prompt);

}  // namespace xllm
