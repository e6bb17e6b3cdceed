#include "engine/pace.h"

#include <algorithm>

namespace xllm {
namespace {

constexpr double kAim = 0.75;      // of the bound: steps vary
constexpr double kLeast = 0.25;    // of the bound, for prefill, whatever decode takes
constexpr int kFewestRows = 8;     // or a long prompt would never be done
constexpr int kFirstRows = 8;      // while nothing is known
constexpr double kNewest = 0.3;    // weight of the newest figure in an average
constexpr int kTellingRows = 64;   // a step of fewer takes about as long as one of as many
constexpr double kLifeS = 10;      // of a measured rate or interval
constexpr int kFastestGrowth = 2;  // from step to step: an estimate may be wrong

double average(double old, double newest) {
  return old == 0 ? newest : old + kNewest * (newest - old);
}

}  // namespace

int Pace::prefill_rows(double decode_s) const {
  if (decode_s < 0 || max_gap_s_ == 0) return max_rows_;
  if (row_s_ == 0) return std::min(kFirstRows, max_rows_);
  const double left_s = std::max(kAim * max_gap_s_ - decode_s - decode_s_, kLeast * max_gap_s_);
  const double rows = std::min(left_s / row_s_, static_cast<double>(max_rows_));
  const int most = std::max(kFirstRows, kFastestGrowth * last_rows_);
  return std::clamp(static_cast<int>(rows), std::min(kFewestRows, max_rows_),
                    std::min(most, max_rows_));
}

bool Pace::record(bool has_decode, int num_prefill_rows, double step_s) {
  if (num_prefill_rows == 0) {
    if (has_decode) decode_s_ = average(decode_s_, step_s);
    return false;
  }
  const double prefill_s = std::max(step_s - (has_decode ? decode_s_ : 0), 0.02 * step_s);
  const double row_s = prefill_s / num_prefill_rows;
  // What has become dearer counts at once: a prompt's later rows attend to more.
  row_s_ = std::max(row_s, average(row_s_, row_s));
  last_rows_ = num_prefill_rows;
  if (num_prefill_rows < std::min(kTellingRows, max_rows_)) return false;
  rate_ = average(rate_, num_prefill_rows / step_s);
  return true;
}

double estimate_wait_s(const Backlog &backlog, int num_prompt) {
  if (backlog.prefill_rate == 0 || backlog.age_s > kLifeS) return 0;
  const double own_s = num_prompt / backlog.prefill_rate;
  const double before_s = static_cast<double>(backlog.num_rows) / backlog.prefill_rate;
  const int num_seats_missing = backlog.num_waiting + 1 - backlog.num_free_slots;
  const bool knows_seats = num_seats_missing > 0 && backlog.seat_age_s <= kLifeS;
  const double seat_s = knows_seats ? num_seats_missing * backlog.seat_interval_s : 0;
  return std::max(before_s, seat_s) + own_s;
}

}  // namespace xllm
