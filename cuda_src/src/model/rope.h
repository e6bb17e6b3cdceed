// Rotary position embedding: the frequencies that a file asks for, and the tables that the devices
// read.
#pragma once

#include <vector>

#include "backend/backend.h"

namespace xllm {

enum class RopeScaling { kNone, kLinear, kYarn };

// Every number that shapes the rotation. The rotation of pair i at position p is p * frequency(i).
struct RopeParams {
  int rotary_dim = 0;
  bool is_neighbor = false;
  double freq_base = 10000;
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1;                // positions are stretched over factor times the trained context
  double original_context = 0;      // yarn: the context trained with, tokens
  double extrapolation_factor = 1;  // yarn: share of the unscaled frequencies where they are kept
  double attention_factor = 1;      // multiplies cos and sin, on top of what yarn computes
  double beta_fast =
      32;  // yarn: pairs with more turns than this over the original context keep their frequency
  double beta_slow = 1;         // yarn: pairs with fewer are interpolated
  std::vector<float> divisors;  // rope_freqs.weight, [rotary_dim / 2], or empty: frequencies are
                                // divided by these (Llama-3)
};

// The longest sequence that the tables can cover, in tokens.
constexpr int kMaxRopePositions = 512 * RopeTables::kFine;

// Angle per position of each pair, [rotary_dim / 2] (arXiv:2104.09864; yarn: arXiv:2309.00071
// section 3.2).
std::vector<double> rope_frequencies(const RopeParams &params);

// What cos and sin are multiplied by: the attention factor, with yarn times 1 + 0.1 ln(factor)
// (arXiv:2309.00071 section 3.4, sqrt(1/t)).
double rope_magnitude(const RopeParams &params);

// Tables for positions 0 .. num_positions - 1 (at most kMaxRopePositions), computed in double. A
// row's values do not depend on num_positions.
RopeTables make_rope_tables(const RopeParams &params, int num_positions);

}  // namespace xllm
