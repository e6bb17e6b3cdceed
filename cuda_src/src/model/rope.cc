#include "model/rope.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "base/error.h"

namespace xllm {
namespace {

constexpr double kPi = 3.14159265358979323846;

// The pair index (not an integer) that makes `turns` full turns over the original context.
double pair_of_turns(const RopeParams &params, double turns) {
  return params.rotary_dim * std::log(params.original_context / (turns * 2 * kPi)) /
         (2 * std::log(params.freq_base));
}

// 1 where yarn keeps a pair's frequency, 0 where it interpolates, linear between.
double yarn_kept_share(const RopeParams &params, int pair) {
  const double low = std::max(0.0, std::floor(pair_of_turns(params, params.beta_fast)));
  const double high =
      std::min(params.rotary_dim - 1.0, std::ceil(pair_of_turns(params, params.beta_slow)));
  const double ramp = (pair - low) / std::max(0.001, high - low);
  return params.extrapolation_factor * (1 - std::min(1.0, std::max(0.0, ramp)));
}

// cos and sin of `angle` at num_rows rows, each `stride` positions after the one before it.
std::vector<float> make_table(const std::vector<double> &frequencies, int num_rows, int stride,
                              double magnitude) {
  std::vector<float> table;
  table.reserve(static_cast<size_t>(num_rows) * frequencies.size() * 2);
  for (int row = 0; row < num_rows; ++row) {
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(row) * stride * frequency;
      table.push_back(static_cast<float>(std::cos(angle) * magnitude));
      table.push_back(static_cast<float>(std::sin(angle) * magnitude));
    }
  }
  return table;
}

}  // namespace

std::vector<double> rope_frequencies(const RopeParams &params) {
  const int num_pairs = params.rotary_dim / 2;
  XLLM_DCHECK(params.divisors.empty() || static_cast<int>(params.divisors.size()) == num_pairs);
  std::vector<double> frequencies(static_cast<size_t>(num_pairs));
  for (int i = 0; i < num_pairs; ++i) {
    double frequency = std::pow(params.freq_base, -2.0 * i / params.rotary_dim);
    if (!params.divisors.empty()) frequency /= params.divisors[static_cast<size_t>(i)];
    if (params.scaling == RopeScaling::kLinear) frequency /= params.factor;
    if (params.scaling == RopeScaling::kYarn) {
      const double kept = yarn_kept_share(params, i);
      frequency = frequency / params.factor * (1 - kept) + frequency * kept;
    }
    frequencies[static_cast<size_t>(i)] = frequency;
  }
  return frequencies;
}

double rope_magnitude(const RopeParams &params) {
  const bool is_scaled = params.scaling == RopeScaling::kYarn && params.extrapolation_factor != 0;
  return params.attention_factor * (is_scaled ? 1 + 0.1 * std::log(params.factor) : 1);
}

RopeTables make_rope_tables(const RopeParams &params, int num_positions) {
  XLLM_DCHECK(num_positions > 0 && num_positions <= kMaxRopePositions);
  const std::vector<double> frequencies = rope_frequencies(params);
  RopeTables tables;
  tables.rotary_dim = params.rotary_dim;
  tables.is_neighbor = params.is_neighbor;
  const auto num_coarse =
      static_cast<int>(ceil_div(static_cast<uint64_t>(num_positions), RopeTables::kFine));
  // The product of the two takes the magnitude once.
  tables.coarse = make_table(frequencies, num_coarse, RopeTables::kFine, rope_magnitude(params));
  tables.fine = make_table(frequencies, RopeTables::kFine, 1, 1);
  return tables;
}

}  // namespace xllm
