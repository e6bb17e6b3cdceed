// Chooses a token from one row of logits on the host.
//
// The order of steps, with their neutral values in params.h:
//   1. bias, mask        logit + bias; -infinity and masked ids are forbidden; ids >= num_choosable
//   do
//                        not exist: they are never chosen, listed or counted in any sum
//   2. penalties         repetition, then frequency and presence
//      -> logprobs are those of the distribution at this point
//   3. temperature 0     the largest logit, the lowest id on a tie; nothing random
//      else              weight w = exp((logit - largest) / temperature)
//   4. top_k             the k largest logits, lower ids first on a tie
//   5. top_p             of those, in that order, the fewest whose weights reach top_p of their sum
//   6. min_p             of those, w >= min_p (the best has w = 1)
//   7. draw              u in [0, 1) from philox(seed, position); the first kept id, ascending,
//   whose
//                        running sum of weights exceeds u times the whole sum
// Weights are integers (weight.h), so sums are exact: a row's token is a function of its logits and
// its SampleRow alone, on every device. What weighs less than 3e-14 of the best is never drawn.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"

namespace xllm {

struct Candidate {
  int32_t token_id = -1;
  float logprob = 0;
};

enum class SampleOutcome {
  kChosen,
  kNotFinite,    // the model's logits hold NaN or infinity
  kAllForbidden  // bias and mask leave no token
};

struct Sampled {
  SampleOutcome outcome = SampleOutcome::kChosen;
  int32_t token_id = -1;
  float logprob = 0;                  // of token_id; where logprobs were asked for
  uint32_t rank = 0;                  // its place among all, from 1, lowest id first on a tie
  std::vector<Candidate> candidates;  // best first, lowest id on a tie; forbidden ids are left out
};

// Holds scratch of one row, so one object per thread; keeps nothing between calls.
class Sampler {
 public:
  // logits [vocab_size] f32, vocab_size >= row.num_choosable >= 1.
  // row.num_logprobs: 0: none; n: the chosen token's logprob and n - 1 candidates.
  Sampled sample(const float *logits, const SampleRow &row);

 private:
  struct Weighted {
    int32_t id;
    float logit;
    uint64_t weight;
  };

  void adjust(const float *logits, const SampleRow &row);
  void forbid(const uint32_t *mask, int32_t n);
  int32_t draw(const float *logits, const SampleRow &row, float largest);
  uint64_t weigh(const float *logits, int32_t n, float largest, double temperature);
  void keep_largest(const float *logits, int32_t n, int32_t k);
  void keep_top_p(double top_p, uint64_t total);
  void add_logprobs(const float *logits, const SampleRow &row, float largest, Sampled *out);

  std::vector<float> adjusted_;    // [num_choosable] after bias, mask and penalties
  std::vector<uint64_t> weights_;  // [num_choosable]
  std::vector<Weighted> kept_;
};

}  // namespace xllm
