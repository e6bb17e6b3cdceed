#include "sampling/sampler.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/half.h"
#include "base/rng.h"
#include "sampling/exp_log.h"
#include "sampling/weight.h"

namespace xllm {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr int32_t kLowestKey = std::numeric_limits<int32_t>::min();
constexpr int32_t kWordIds = 32;  // of a mask's word
constexpr int32_t kRun = 1024;    // ids among which the largest is looked for again

bool all_finite(const float *logits, int32_t n) {
  uint32_t is_bad = 0;
  for (int32_t i = 0; i < n; ++i) {
    is_bad |= static_cast<uint32_t>((float_bits(logits[i]) & 0x7f800000u) == 0x7f800000u);
  }
  return is_bad == 0;
}

// An integer that orders like the float (-0 and 0 equal), because compilers vectorise integer
// maxima.
int32_t order_key(float value) {
  const int32_t bits = static_cast<int32_t>(float_bits(value + 0.0f));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The lowest id of the largest logit.
int32_t argmax(const float *logits, int32_t n) {
  int32_t best = kLowestKey;
  for (int32_t i = 0; i < n; ++i) best = std::max(best, order_key(logits[i]));
  for (int32_t i = 0; i < n; ++i) {
    if (order_key(logits[i]) == best) return i;
  }
  return -1;
}

// The bits of a mask's word, beside the ids that they stand for: compilers vectorise a comparison
// with a table, but no shift by a lane's number.
struct WordBits {
  uint32_t bit[kWordIds];
};

constexpr WordBits word_bits() {
  WordBits out = {};
  for (int i = 0; i < kWordIds; ++i) out.bit[i] = uint32_t{1} << i;
  return out;
}

constexpr WordBits kBits = word_bits();

// largest[i] becomes the key of a word's i-th id where that is larger, of those that it allows.
void raise_to(const float *logits, uint32_t allowed, int32_t count, int32_t *largest) {
  for (int32_t i = 0; i < count; ++i) {
    const int32_t key = order_key(logits[i]);
    largest[i] = std::max(largest[i], (allowed & kBits.bit[i]) != 0 ? key : kLowestKey);
  }
}

// Forbids those of a word's ids that it does not allow.
void keep_allowed(float *logits, uint32_t allowed, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    const float logit = logits[i];
    logits[i] = (allowed & kBits.bit[i]) != 0 ? logit : kForbidden;
  }
}

// argmax within a mask, [ceil(n / 32)] words; -1: it allows none.
int32_t argmax_within(const uint32_t *mask, const float *logits, int32_t n) {
  int32_t best = kLowestKey;
  int32_t best_start = -1;  // of the first run of ids that has it
  for (int32_t start = 0; start < n; start += kRun) {
    // A place for each bit of a word, so that whole vectors are compared.
    int32_t largest[kWordIds];
    std::fill_n(largest, kWordIds, kLowestKey);
    const int32_t end = std::min(n, start + kRun);
    for (int32_t first = start; first < end; first += kWordIds) {
      const uint32_t allowed = mask[first / kWordIds];
      if (allowed == 0) continue;
      if (end - first >= kWordIds) {
        raise_to(logits + first, allowed, kWordIds, largest);
      } else {
        raise_to(logits + first, allowed, end - first, largest);
      }
    }
    const int32_t key = *std::max_element(largest, largest + kWordIds);
    if (key <= best) continue;
    best = key;
    best_start = start;
  }
  if (best_start < 0) return -1;
  int32_t id = best_start;
  while ((mask[id / kWordIds] & kBits.bit[id % kWordIds]) == 0 || order_key(logits[id]) != best)
    ++id;
  return id;
}

// Whether a goes before b where the best come first.
bool is_better(float logit_a, int32_t id_a, float logit_b, int32_t id_b) {
  return logit_a > logit_b || (logit_a == logit_b && id_a < id_b);
}

uint32_t rank(const float *logits, int32_t n, int32_t id) {
  const float own = logits[id];
  uint32_t num_before = 0;
  for (int32_t i = 0; i < n; ++i) num_before += static_cast<uint32_t>(logits[i] > own);
  for (int32_t i = 0; i < id; ++i) num_before += static_cast<uint32_t>(logits[i] == own);
  return num_before + 1;
}

// Keeps what is finite finite: a bias or penalty can carry a logit past the end of the type, where
// -infinity would mean forbidden and +infinity breaks the softmax.
float clamp(float value) {
  constexpr float kMax = std::numeric_limits<float>::max();
  return std::min(std::max(value, -kMax), kMax);
}

}  // namespace

Sampled Sampler::sample(const float *logits, const SampleRow &row) {
  const int32_t n = row.num_choosable;
  Sampled out;
  if (!all_finite(logits, n)) {
    out.outcome = SampleOutcome::kNotFinite;
    return out;
  }
  const bool is_adjusted = !row.biases.empty() || !row.counts.empty();
  int32_t best = -1;
  if (!is_adjusted && row.mask != nullptr && row.temperature == 0 && row.num_logprobs == 0) {
    best = argmax_within(row.mask, logits, n);  // nothing else is asked of the others
  } else {
    if (is_adjusted || row.mask != nullptr) {
      adjust(logits, row);
      logits = adjusted_.data();
    }
    best = argmax(logits, n);
  }
  const float largest = best < 0 ? kForbidden : logits[best];
  if (largest == kForbidden) {
    out.outcome = SampleOutcome::kAllForbidden;
    return out;
  }
  out.token_id = row.temperature == 0 ? best : draw(logits, row, largest);
  if (row.num_logprobs > 0) add_logprobs(logits, row, largest, &out);
  return out;
}

void Sampler::adjust(const float *logits, const SampleRow &row) {
  const int32_t n = row.num_choosable;
  adjusted_.assign(logits, logits + n);
  for (const TokenBias &bias : row.biases) {
    if (bias.token_id >= n) continue;
    float &logit = adjusted_[static_cast<size_t>(bias.token_id)];
    logit = bias.bias == kForbidden ? kForbidden : clamp(logit + bias.bias);
  }
  if (row.mask != nullptr) forbid(row.mask, n);
  for (const TokenCount &count : row.counts) {
    if (count.token_id >= n) continue;
    float &logit = adjusted_[static_cast<size_t>(count.token_id)];
    if (logit == kForbidden) continue;
    const float penalty = row.repetition_penalty;
    float value = logit > 0 ? logit / penalty : logit * penalty;
    if (count.num_generated > 0) {
      value -= row.frequency_penalty * static_cast<float>(count.num_generated);
      value -= row.presence_penalty;
    }
    logit = clamp(value);
  }
}

// A word at a time: many of a mask's words allow all their ids or none.
void Sampler::forbid(const uint32_t *mask, int32_t n) {
  for (int32_t first = 0; first < n; first += kWordIds) {
    const uint32_t allowed = mask[first / kWordIds];
    if (allowed == ~uint32_t{0}) continue;
    float *logits = adjusted_.data() + first;
    const int32_t count = std::min(kWordIds, n - first);
    if (allowed == 0) {
      std::fill_n(logits, count, kForbidden);
    } else if (count == kWordIds) {  // a constant count: whole vectors
      keep_allowed(logits, allowed, kWordIds);
    } else {
      keep_allowed(logits, allowed, count);
    }
  }
}

// The k largest, in no particular order: a heap of k with the worst on top, so one comparison
// settles almost every id.
void Sampler::keep_largest(const float *logits, int32_t n, int32_t k) {
  const auto heap_order = [](const Weighted &a, const Weighted &b) {
    return is_better(a.logit, a.id, b.logit, b.id);
  };
  kept_.clear();
  for (int32_t i = 0; i < n; ++i) {
    const float logit = logits[i];
    if (static_cast<int32_t>(kept_.size()) < k) {
      if (logit == kForbidden) continue;
      kept_.push_back({i, logit, 0});
      std::push_heap(kept_.begin(), kept_.end(), heap_order);
    } else if (logit > kept_.front().logit) {  // on a tie the lower id, already in, stays
      std::pop_heap(kept_.begin(), kept_.end(), heap_order);
      kept_.back() = {i, logit, 0};
      std::push_heap(kept_.begin(), kept_.end(), heap_order);
    }
  }
}

// Fills weights_ and returns their sum.
uint64_t Sampler::weigh(const float *logits, int32_t n, float largest, double temperature) {
  weights_.resize(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) {
    weights_[static_cast<size_t>(i)] = weight_of(logits[i], largest, temperature);
  }
  uint64_t total = 0;
  for (const uint64_t weight : weights_) total += weight;
  return total;
}

int32_t Sampler::draw(const float *logits, const SampleRow &row, float largest) {
  const int32_t n = row.num_choosable;
  const double temperature = row.temperature;
  const auto by_id = [](const Weighted &a, const Weighted &b) { return a.id < b.id; };
  uint64_t total = 0;
  if (row.top_k > 0 && row.top_k < n) {
    keep_largest(logits, n, row.top_k);
    std::sort(kept_.begin(), kept_.end(), by_id);
    for (Weighted &w : kept_) {
      w.weight = weight_of(w.logit, largest, temperature);
      total += w.weight;
    }
  } else {
    total = weigh(logits, n, largest, temperature);
    // Weights below `floor` sum to less than 1 - top_p of the total, so the others reach top_p
    // without them: what is sorted is a small part of the vocabulary. The factor covers the
    // rounding of the products.
    const double floor =
        (1 - static_cast<double>(row.top_p)) * static_cast<double>(total) / n * (1 - 1e-6);
    kept_.clear();
    for (int32_t i = 0; i < n; ++i) {
      const uint64_t weight = weights_[static_cast<size_t>(i)];
      if (weight > 0 && static_cast<double>(weight) >= floor)
        kept_.push_back({i, logits[i], weight});
    }
  }
  if (row.top_p < 1) {
    keep_top_p(row.top_p, total);
    std::sort(kept_.begin(), kept_.end(), by_id);
  }
  if (row.min_p > 0) {
    const uint64_t min_weight = fixed_weight(static_cast<double>(row.min_p));
    // The second half: weights of nearly tied logits may round to 1.
    const auto is_dropped = [&](const Weighted &w) {
      return w.weight < min_weight || (row.min_p == 1 && w.logit != largest);
    };
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), is_dropped), kept_.end());
  }

  total = 0;
  for (const Weighted &w : kept_) total += w.weight;
  const Philox random = philox(row.seed, row.position);
  const uint64_t target = scaled(uint64_t{random.value[0]} << 32 | random.value[1], total);
  uint64_t sum = 0;
  for (const Weighted &w : kept_) {
    sum += w.weight;
    if (sum > target) return w.id;
  }
  XLLM_DCHECK(false);  // the best token's weight is not 0, so total > target
  return kept_.back().id;
}

// Sorts no further than it has to: the best 64 first, then four times as many at a time.
void Sampler::keep_top_p(double top_p, uint64_t total) {
  const auto best_first = [](const Weighted &a, const Weighted &b) {
    return is_better(a.logit, a.id, b.logit, b.id);
  };
  const auto needed = static_cast<uint64_t>(top_p * static_cast<double>(total));
  uint64_t sum = 0;
  size_t num_kept = 0;
  for (size_t count = 64; num_kept < kept_.size(); count *= 4) {
    const size_t end = std::min(num_kept + count, kept_.size());
    const auto first = kept_.begin() + static_cast<std::ptrdiff_t>(num_kept);
    const auto last = kept_.begin() + static_cast<std::ptrdiff_t>(end);
    if (end < kept_.size()) std::nth_element(first, last, kept_.end(), best_first);
    std::sort(first, last, best_first);
    while (num_kept < end) {
      sum += kept_[num_kept++].weight;
      if (sum >= needed) {
        kept_.resize(num_kept);
        return;
      }
    }
  }
}

void Sampler::add_logprobs(const float *logits, const SampleRow &row, float largest, Sampled *out) {
  const uint64_t total = weigh(logits, row.num_choosable, largest, 1);
  const double log_sum = largest + log_pos(static_cast<double>(total) / kUnitWeight);
  const auto logprob = [&](float logit) { return static_cast<float>(logit - log_sum); };
  out->logprob = logprob(logits[out->token_id]);
  out->rank = rank(logits, row.num_choosable, out->token_id);
  const int32_t num_candidates = row.num_logprobs - 1;
  if (num_candidates == 0) return;
  keep_largest(logits, row.num_choosable, num_candidates);
  std::sort(kept_.begin(), kept_.end(), [](const Weighted &a, const Weighted &b) {
    return is_better(a.logit, a.id, b.logit, b.id);
  });
  for (const Weighted &w : kept_) out->candidates.push_back({w.id, logprob(w.logit)});
}

}  // namespace xllm
