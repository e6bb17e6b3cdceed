// The arithmetic of the CPU backend: products of every type against float64, instruction sets against each other byte by byte, and
// the row functions against their definitions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "backend/cpu/activations.h"
#include "backend/cpu/choose_kernels.h"
#include "backend/cpu/dequant.h"
#include "backend/cpu/host_memory.h"
#include "backend/cpu/kernels.h"
#include "base/error.h"
#include "quant_samples.h"

namespace xllm {
namespace {

using cpu::ActRow;
using cpu::Activations;
using cpu::HostAllocator;
using cpu::Kernels;
using testing::all_dtypes;
using testing::all_samples;
using testing::make_rows;
using testing::Random;
using testing::Sample;

// Every instruction set that this machine can run, the portable one first.
std::vector<const Kernels *> all_kernels() {
  std::vector<const Kernels *> out;
  for (const char *name : {"scalar", "avx2", "avx512", "neon"}) {
    try {
      out.push_back(&cpu::choose_kernels(name));
    } catch (const Error &) {
      continue;
    }
  }
  return out;
}

// Activations of num_tokens rows, filled and quantised. Row t of a batch equals row 0 of a batch seeded the same with that row.
class ActBatch {
 public:
  ActBatch(const Kernels &kernels, int num_tokens, int cols, uint64_t seed) : allocator_(0) {
    act_.reserve(&allocator_, num_tokens, cols);
    Random random(seed);
    for (int t = 0; t < num_tokens; ++t) {
      // Rows of different size, one of them large, one with blocks of zeros.
      const float amplitude = t % 5 == 3 ? 4000.0f : 0.5f + static_cast<float>(t);
      for (int i = 0; i < cols; ++i) act_.f(t)[i] = t % 7 == 2 && i / 32 % 2 == 0 ? 0.0f : amplitude * random.normal();
      act_.quantize(kernels, t);
    }
  }
  ActRow row(int t) const { return act_.row(t); }

 private:
  HostAllocator allocator_;
  Activations act_;
};

std::vector<float> dot_all(const Kernels &kernels, DType dtype, const std::vector<uint8_t> &weights, int rows, int cols,
                           const ActBatch &batch, int first, int count) {
  std::vector<ActRow> acts;
  for (int t = first; t < first + count; ++t) acts.push_back(batch.row(t));
  std::vector<float> out(static_cast<size_t>(rows * count), NAN);
  kernels.dots[static_cast<int>(dtype)](weights.data(), dtype_bytes(dtype, static_cast<uint64_t>(cols)), rows, acts.data(),
                                        count, cols, out.data(), rows);
  return out;
}

bool same_bytes(const std::vector<float> &a, const std::vector<float> &b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class DotTest : public ::testing::TestWithParam<DType> {};

// The error of a product is that of f32 additions only: the integer part is exact. Bound: 4 roundings per block or element, each at
// most 2^-24 of the sum of magnitudes.
TEST_P(DotTest, MatchesFloat64OfTheDequantisedValues) {
  const DType dtype = GetParam();
  const int rows = 19;
  for (const Kernels *kernels : all_kernels()) {
    for (const int cols : {256, 1536}) {
      for (const Sample sample : all_samples()) {
        const std::vector<uint8_t> weights = make_rows(dtype, rows, cols, sample, 11);
        const ActBatch batch(*kernels, 4, cols, 5);
        const std::vector<float> out = dot_all(*kernels, dtype, weights, rows, cols, batch, 0, 4);
        std::vector<float> w(static_cast<size_t>(cols));
        for (int r = 0; r < rows; ++r) {
          cpu::dequantize_row(dtype, weights.data() + static_cast<size_t>(r) * dtype_bytes(dtype, static_cast<uint64_t>(cols)),
                              cols, w.data());
          for (int t = 0; t < 4; ++t) {
            const ActRow a = batch.row(t);
            double expected = 0, magnitude = 0;
            for (int i = 0; i < cols; ++i) {
              const double x = testing::is_plain_float(dtype) ? double{a.f[i]} : double{a.d[i / 32]} * a.q[i];
              expected += w[static_cast<size_t>(i)] * x;
              magnitude += std::fabs(w[static_cast<size_t>(i)] * x);
            }
            const double bound = magnitude * 4 * 0x1p-24 * (16 + cols / 32) + 1e-37;
            ASSERT_NEAR(out[static_cast<size_t>(t * rows + r)], expected, bound)
                << kernels->name << " sample " << static_cast<int>(sample) << " row " << r << " token " << t;
          }
        }
      }
    }
  }
}

TEST_P(DotTest, EveryInstructionSetGivesTheBytesOfTheScalarOne) {
  const DType dtype = GetParam();
  const std::vector<const Kernels *> kernels = all_kernels();
  for (const Sample sample : all_samples()) {
    for (const int rows : {1, 7, 8, 9, 40}) {
      const int cols = 768;
      const std::vector<uint8_t> weights = make_rows(dtype, rows, cols, sample, 3);
      const ActBatch batch(*kernels[0], cpu::kTokenTile, cols, 17);
      for (int count = 1; count <= cpu::kTokenTile; ++count) {
        const std::vector<float> truth = dot_all(*kernels[0], dtype, weights, rows, cols, batch, 0, count);
        for (const Kernels *other : kernels) {
          ASSERT_TRUE(same_bytes(truth, dot_all(*other, dtype, weights, rows, cols, batch, 0, count)))
              << other->name << " sample " << static_cast<int>(sample) << " rows " << rows << " tokens " << count;
        }
      }
    }
  }
}

TEST_P(DotTest, ARowDoesNotDependOnItsNeighbours) {
  const DType dtype = GetParam();
  const int rows = 13, cols = 512;
  for (const Kernels *kernels : all_kernels()) {
    const std::vector<uint8_t> weights = make_rows(dtype, rows, cols, Sample::kRandom, 23);
    const ActBatch batch(*kernels, cpu::kTokenTile, cols, 29);
    for (int count = 2; count <= cpu::kTokenTile; ++count) {
      const std::vector<float> together = dot_all(*kernels, dtype, weights, rows, cols, batch, 0, count);
      for (int t = 0; t < count; ++t) {
        const std::vector<float> alone = dot_all(*kernels, dtype, weights, rows, cols, batch, t, 1);
        ASSERT_EQ(0, std::memcmp(alone.data(), together.data() + t * rows, alone.size() * sizeof(float)))
            << kernels->name << " token " << t << " of " << count;
      }
    }
  }
}

// The least and the greatest codes against activations of +-127: sums at the edge of every intermediate type.
TEST_P(DotTest, ExtremeCodesDoNotOverflow) {
  const DType dtype = GetParam();
  if (testing::is_plain_float(dtype)) GTEST_SKIP() << "not a quantised type";
  const std::vector<const Kernels *> kernels = all_kernels();
  const int cols = 512, rows = 9;
  for (const int pattern : {0, 1, 2, 3}) {
    std::vector<uint8_t> weights = make_rows(dtype, rows, cols, pattern % 2 == 0 ? Sample::kMaxCodes : Sample::kZeroCodes, 1);
    if (dtype == DType::kQ8_0 && pattern % 2 == 1) {
      for (size_t i = 0; i < weights.size(); ++i) weights[i] = i % 34 < 2 ? weights[i] : 0x80;  // -128
    }
    HostAllocator allocator(0);
    Activations act;
    act.reserve(&allocator, 1, cols);
    for (int i = 0; i < cols; ++i) act.f(0)[i] = pattern < 2 ? 1.0f : i % 2 == 0 ? -1.0f : 1.0f;
    act.quantize(*kernels[0], 0);
    const ActRow row = act.row(0);
    std::vector<float> truth(static_cast<size_t>(rows)), other(static_cast<size_t>(rows));
    const uint64_t row_bytes = dtype_bytes(dtype, static_cast<uint64_t>(cols));
    for (const Kernels *k : kernels) {
      std::vector<float> &out = k == kernels[0] ? truth : other;
      k->dots[static_cast<int>(dtype)](weights.data(), row_bytes, rows, &row, 1, cols, out.data(), rows);
      if (k == kernels[0]) continue;
      ASSERT_TRUE(same_bytes(truth, other)) << k->name << " pattern " << pattern;
    }
  }
}

std::string dtype_name(const ::testing::TestParamInfo<DType> &info) { return dtype_info(info.param).name; }
INSTANTIATE_TEST_SUITE_P(AllTypes, DotTest, ::testing::ValuesIn(all_dtypes()), dtype_name);

}  // namespace
}  // namespace xllm
