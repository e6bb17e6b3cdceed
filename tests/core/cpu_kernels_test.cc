// The arithmetic of the CPU backend: products of every type against float64, instruction sets
// against each other byte by byte, and the row functions against their definitions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "backend/cpu/act_pack.h"
#include "backend/cpu/activations.h"
#include "backend/cpu/choose_kernels.h"
#include "backend/cpu/dequant.h"
#include "backend/cpu/hadamard.h"
#include "backend/cpu/host_memory.h"
#include "backend/cpu/interleave.h"
#include "backend/cpu/kernels.h"
#include "base/error.h"
#include "quant_samples.h"

namespace xllm {
namespace {

using cpu::Activations;
using cpu::ActRow;
using cpu::HostAllocator;
using cpu::is_fine_layer;
using cpu::Kernels;
using cpu::Precision;
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

// Activations of num_tokens rows, filled and quantised. Row t of a batch equals row 0 of a batch
// seeded the same with that row.
class ActBatch {
 public:
  ActBatch(const Kernels &kernels, int num_tokens, int cols, uint64_t seed) : allocator_(0) {
    act_.reserve(&allocator_, WeightForm::kRaw, num_tokens, cols);
    Random random(seed);
    for (int t = 0; t < num_tokens; ++t) {
      // Rows of different size, one of them large, one with blocks of zeros.
      const float amplitude = t % 5 == 3 ? 4000.0f : 0.5f + static_cast<float>(t);
      for (int i = 0; i < cols; ++i)
        act_.f(t)[i] = t % 7 == 2 && i / 32 % 2 == 0 ? 0.0f : amplitude * random.normal();
      act_.quantize(kernels, Precision::kFine, t);
    }
  }
  ActRow row(int t, int plane = 0) const { return act_.row(t, plane); }

 private:
  HostAllocator allocator_;
  Activations act_;
};

std::vector<float> dot_all(const Kernels &kernels, DType dtype, const std::vector<uint8_t> &weights,
                           int rows, int cols, const ActBatch &batch, int first, int count) {
  std::vector<ActRow> acts;
  for (int t = first; t < first + count; ++t) acts.push_back(batch.row(t));
  std::vector<float> out(static_cast<size_t>(rows * count), NAN);
  kernels.dots[static_cast<int>(dtype)](weights.data(),
                                        dtype_bytes(dtype, static_cast<uint64_t>(cols)), rows,
                                        acts.data(), count, cols, out.data(), rows);
  return out;
}

bool same_bytes(const std::vector<float> &a, const std::vector<float> &b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

uint64_t fnv1a(const std::vector<float> &values) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const float value : values) {
    uint32_t bits = float_bits(value);
    for (int i = 0; i < 4; ++i, bits >>= 8) hash = (hash ^ (bits & 0xff)) * 0x100000001b3u;
  }
  return hash;
}

class DotTest : public ::testing::TestWithParam<DType> {};

// The error of a product is that of f32 additions only: the integer part is exact. Bound: 4
// roundings per block or element, each at most 2^-24 of the sum of magnitudes.
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
          cpu::dequantize_row(dtype,
                              weights.data() + static_cast<size_t>(r) *
                                                   dtype_bytes(dtype, static_cast<uint64_t>(cols)),
                              cols, w.data());
          for (int t = 0; t < 4; ++t) {
            const ActRow a = batch.row(t);
            double expected = 0, magnitude = 0;
            for (int i = 0; i < cols; ++i) {
              const double x =
                  testing::is_plain_float(dtype) ? double{a.f[i]} : double{a.d[i / 32]} * a.q[i];
              expected += w[static_cast<size_t>(i)] * x;
              magnitude += std::fabs(w[static_cast<size_t>(i)] * x);
            }
            const double bound = magnitude * 4 * 0x1p-24 * (16 + cols / 32) + 1e-37;
            ASSERT_NEAR(out[static_cast<size_t>(t * rows + r)], expected, bound)
                << kernels->name << " sample " << static_cast<int>(sample) << " row " << r
                << " token " << t;
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
        const std::vector<float> truth =
            dot_all(*kernels[0], dtype, weights, rows, cols, batch, 0, count);
        for (const Kernels *other : kernels) {
          ASSERT_TRUE(
              same_bytes(truth, dot_all(*other, dtype, weights, rows, cols, batch, 0, count)))
              << other->name << " sample " << static_cast<int>(sample) << " rows " << rows
              << " tokens " << count;
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
      const std::vector<float> together =
          dot_all(*kernels, dtype, weights, rows, cols, batch, 0, count);
      for (int t = 0; t < count; ++t) {
        const std::vector<float> alone = dot_all(*kernels, dtype, weights, rows, cols, batch, t, 1);
        ASSERT_EQ(
            0, std::memcmp(alone.data(), together.data() + t * rows, alone.size() * sizeof(float)))
            << kernels->name << " token " << t << " of " << count;
      }
    }
  }
}

// The same product of interleaved rows, every sixteen in their tiles.
std::vector<float> dot_interleaved(const Kernels &kernels, DType dtype,
                                   const std::vector<uint8_t> &weights, int rows, int cols,
                                   const std::vector<ActRow> &acts, int num_planes = 1) {
  const uint64_t row_bytes = dtype_bytes(dtype, static_cast<uint64_t>(cols));
  std::vector<uint8_t> tiles(cpu::interleaved_bytes(rows, row_bytes), 0xee);
  for (int r = 0; r < rows; r += cpu::kInterleavedRows) {
    cpu::interleave_rows(dtype, weights.data() + static_cast<size_t>(r) * row_bytes, row_bytes,
                         std::min(cpu::kInterleavedRows, rows - r), cols,
                         tiles.data() + static_cast<size_t>(r) * row_bytes);
  }
  const int num_acts = static_cast<int>(acts.size()), num_tokens = num_acts / num_planes;
  std::vector<float> out(static_cast<size_t>(rows * num_tokens), NAN);
  std::vector<uint8_t> packed(
      (acts.size() + cpu::kPackedSpareRows) * static_cast<size_t>(cols / 32 * cpu::kPackedRowBytes),
      0xee);
  for (int i = 0; i < num_acts; ++i) {
    for (const int first : {0, cols / 2 / 32 * 32}) {  // as stages do it, a piece after the other
      pack_activations(acts[static_cast<size_t>(i)], i, num_acts, kernels.tile_rows, cols, first,
                       first == 0 ? cols / 2 / 32 * 32 : cols - first, packed.data());
    }
  }
  kernels.tiles[static_cast<int>(dtype)](tiles.data(), row_bytes, rows, packed.data(), num_tokens,
                                         num_planes, cols, out.data(), rows);
  return out;
}

TEST_P(DotTest, InterleavedRowsGiveTheBytesOfTheScalarOne) {
  const DType dtype = GetParam();
  const std::vector<const Kernels *> kernels = all_kernels();
  EXPECT_EQ(kernels[0]->tiles[static_cast<int>(dtype)], nullptr);
  for (const Kernels *other : kernels) {
    if (other == kernels[0]) continue;
    EXPECT_EQ(other->tiles[static_cast<int>(dtype)] != nullptr, cpu::can_interleave(dtype));
    if (!cpu::can_interleave(dtype)) continue;
    for (const Sample sample : all_samples()) {
      for (const int rows : {1, 7, 8, 9, 16, 40}) {
        const int cols = rows == 40 ? 1536 : 768;  // an even and an odd number of blocks
        const std::vector<uint8_t> weights = make_rows(dtype, rows, cols, sample, 3);
        const ActBatch batch(*kernels[0], 21, cols, 17);
        for (const int count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 21}) {
          std::vector<ActRow> acts;
          for (int t = 0; t < count; ++t) acts.push_back(batch.row(t));
          const std::vector<float> found =
              dot_interleaved(*other, dtype, weights, rows, cols, acts);
          for (int t = 0; t < count; ++t) {
            const std::vector<float> truth =
                dot_all(*kernels[0], dtype, weights, rows, cols, batch, t, 1);
            ASSERT_EQ(
                0, std::memcmp(truth.data(), found.data() + t * rows, truth.size() * sizeof(float)))
                << other->name << " sample " << static_cast<int>(sample) << " rows " << rows
                << " token " << t << " of " << count;
          }
        }
      }
    }
  }
}

// So many that a set may unpack the weights first, in pieces, and take the activations in turns.
TEST_P(DotTest, ManyActivationsGiveTheBytesOfTheScalarOne) {
  const DType dtype = GetParam();
  if (!cpu::can_interleave(dtype)) return;
  const std::vector<const Kernels *> kernels = all_kernels();
  const int rows = 19, most = 261;
  for (const Sample sample : {Sample::kRandom, Sample::kMaxCodes}) {
    for (const int cols : {256, 768, 1536}) {
      const std::vector<uint8_t> weights = make_rows(dtype, rows, cols, sample, 3);
      const ActBatch batch(*kernels[0], most, cols, 17);
      std::vector<std::vector<float>> truth;
      for (int t = 0; t < most; ++t)
        truth.push_back(dot_all(*kernels[0], dtype, weights, rows, cols, batch, t, 1));
      for (const Kernels *other : kernels) {
        if (other->tiles[static_cast<int>(dtype)] == nullptr) continue;
        for (const int count : {63, 64, 66, 70, 127, 128, 129, 134, most}) {
          std::vector<ActRow> acts;
          for (int t = 0; t < count; ++t) acts.push_back(batch.row(t));
          const std::vector<float> found =
              dot_interleaved(*other, dtype, weights, rows, cols, acts);
          for (int t = 0; t < count; ++t) {
            const std::vector<float> &expected = truth[static_cast<size_t>(t)];
            ASSERT_EQ(0, std::memcmp(expected.data(), found.data() + t * rows,
                                     expected.size() * sizeof(float)))
                << other->name << " sample " << static_cast<int>(sample) << " columns " << cols
                << " token " << t << " of " << count;
          }
        }
      }
    }
  }
}

TEST_P(DotTest, TheTwoPlanesOfATokenAreAdded) {
  const DType dtype = GetParam();
  if (!cpu::can_interleave(dtype)) return;
  const std::vector<const Kernels *> kernels = all_kernels();
  const int rows = 23, cols = 768;
  const std::vector<uint8_t> weights = make_rows(dtype, rows, cols, Sample::kRandom, 3);
  const ActBatch batch(*kernels[0], 67, cols, 17);
  const auto product_of = [&](ActRow act) {
    std::vector<float> out(static_cast<size_t>(rows));
    kernels[0]->dots[static_cast<int>(dtype)](weights.data(),
                                              dtype_bytes(dtype, static_cast<uint64_t>(cols)), rows,
                                              &act, 1, cols, out.data(), rows);
    return out;
  };
  for (const Kernels *other : kernels) {
    if (other->tiles[static_cast<int>(dtype)] == nullptr) continue;
    for (const int count : {1, 2, 3, 4, 5, 7, 8, 11, 32, 67}) {
      std::vector<ActRow> acts;
      for (int t = 0; t < count; ++t) {
        for (const int plane : {0, 1}) acts.push_back(batch.row(t, plane));
      }
      const std::vector<float> found = dot_interleaved(*other, dtype, weights, rows, cols, acts, 2);
      for (int t = 0; t < count; ++t) {
        std::vector<float> truth = product_of(batch.row(t));
        const std::vector<float> second = product_of(batch.row(t, 1));
        kernels[0]->add(truth.data(), second.data(), rows);
        ASSERT_EQ(0,
                  std::memcmp(truth.data(), found.data() + t * rows, truth.size() * sizeof(float)))
            << other->name << " token " << t << " of " << count;
      }
    }
  }
}

// The least and the greatest codes against activations of +-127: sums at the edge of every
// intermediate type.
TEST_P(DotTest, ExtremeCodesDoNotOverflow) {
  const DType dtype = GetParam();
  if (testing::is_plain_float(dtype)) return;  // no codes
  const std::vector<const Kernels *> kernels = all_kernels();
  const int cols = 512, rows = 9;
  for (const int pattern : {0, 1, 2, 3}) {
    std::vector<uint8_t> weights =
        make_rows(dtype, rows, cols, pattern % 2 == 0 ? Sample::kMaxCodes : Sample::kZeroCodes, 1);
    if (dtype == DType::kQ8_0 && pattern % 2 == 1) {
      for (size_t i = 0; i < weights.size(); ++i)
        weights[i] = i % 34 < 2 ? weights[i] : 0x80;  // -128
    }
    HostAllocator allocator(0);
    Activations act;
    act.reserve(&allocator, WeightForm::kRaw, 1, cols);
    for (int i = 0; i < cols; ++i) act.f(0)[i] = pattern < 2 ? 1.0f : i % 2 == 0 ? -1.0f : 1.0f;
    act.quantize(*kernels[0], Precision::kInt8, 0);
    const ActRow row = act.row(0);
    std::vector<float> truth(static_cast<size_t>(rows)), other(static_cast<size_t>(rows));
    const uint64_t row_bytes = dtype_bytes(dtype, static_cast<uint64_t>(cols));
    for (const Kernels *k : kernels) {
      std::vector<float> &out = k == kernels[0] ? truth : other;
      k->dots[static_cast<int>(dtype)](weights.data(), row_bytes, rows, &row, 1, cols, out.data(),
                                       rows);
      if (k == kernels[0]) continue;
      ASSERT_TRUE(same_bytes(truth, other)) << k->name << " pattern " << pattern;
      if (!cpu::can_interleave(dtype)) continue;
      ASSERT_TRUE(same_bytes(truth, dot_interleaved(*k, dtype, weights, rows, cols, {row})))
          << k->name << " interleaved, pattern " << pattern;
    }
  }
}

std::string dtype_name(const ::testing::TestParamInfo<DType> &info) {
  return dtype_info(info.param).name;
}
INSTANTIATE_TEST_SUITE_P(AllTypes, DotTest, ::testing::ValuesIn(all_dtypes()), dtype_name);

// ---- dequantising ----

// Seeded rows through FNV-1a. The hashes are those of the `gguf` Python package's dequantiser on
// the same bytes.
TEST(DequantTest, GivesTheBytesOfTheReference) {
  const struct {
    DType dtype;
    uint64_t hash;
  } kExpected[] = {
      {DType::kF32, 0xb167c2865c331635u},    {DType::kF16, 0xa502e5cc5310435eu},
      {DType::kBF16, 0x366973bcf478798du},   {DType::kQ4_0, 0x89e0a827a5b73c9eu},
      {DType::kQ4_1, 0x8f7e586f40b80421u},   {DType::kQ5_0, 0x8b2681fcf914aa74u},
      {DType::kQ5_1, 0xdb8b86094f3715a7u},   {DType::kQ8_0, 0x6356e98add308716u},
      {DType::kQ2_K, 0xa134ef773e6787cbu},   {DType::kQ3_K, 0xdfb435751ea43e09u},
      {DType::kQ4_K, 0x856ad7e552bfc7b1u},   {DType::kQ5_K, 0x81a76eb39667c3d2u},
      {DType::kQ6_K, 0xe706957a7953a6ffu},   {DType::kIQ4_NL, 0x5a87616bac49e1f8u},
      {DType::kIQ4_XS, 0x984f4c5a602ffa32u},
  };
  for (const auto &expected : kExpected) {
    const int cols = 2048;
    const std::vector<uint8_t> row = make_rows(expected.dtype, 1, cols, Sample::kRandom, 42);
    std::vector<float> values(static_cast<size_t>(cols));
    cpu::dequantize_row(expected.dtype, row.data(), cols, values.data());
    EXPECT_EQ(fnv1a(values), expected.hash) << dtype_info(expected.dtype).name;
  }
}

// ---- activations ----

// What the second plane leaves is a 254th of what the first one leaves, in every set alike.
TEST(ActivationsTest, TheSecondPlaneHoldsWhatTheFirstLeft) {
  const int cols = 576, tokens = 8;
  const std::vector<const Kernels *> kernels = all_kernels();
  const ActBatch truth(*kernels[0], tokens, cols, 31);
  for (const Kernels *k : kernels) {
    const ActBatch batch(*k, tokens, cols, 31);
    for (int t = 0; t < tokens; ++t) {
      const ActRow high = batch.row(t), low = batch.row(t, 1);
      for (int i = 0; i < cols; ++i) {
        const int b = i / 32;
        ASSERT_EQ(low.q[i], truth.row(t, 1).q[i]) << k->name;
        ASSERT_EQ(float_bits(low.d[b]), float_bits(truth.row(t, 1).d[b])) << k->name;
        const double first = double{high.f[i]} - double{high.d[b]} * high.q[i];
        const double second = first - double{low.d[b]} * low.q[i];
        ASSERT_LE(std::fabs(first), 0.501 * high.d[b]);
        ASSERT_LE(std::fabs(second), 0.502 / 254 * high.d[b]);
      }
    }
  }
}

TEST(ActivationsTest, FirstAndLastEighthOfTheLayersAreFine) {
  std::vector<int> fine;
  for (int layer = 0; layer < 28; ++layer) {
    if (is_fine_layer(layer, 28)) fine.push_back(layer);
  }
  EXPECT_EQ(fine, (std::vector<int>{0, 1, 2, 25, 26, 27}));
  EXPECT_TRUE(is_fine_layer(0, 1));
  EXPECT_FALSE(is_fine_layer(1, 3));
}

// ---- row functions ----

std::vector<float> random_row(int n, float amplitude, uint64_t seed) {
  Random random(seed);
  std::vector<float> row(static_cast<size_t>(n));
  for (float &x : row) x = amplitude * random.normal();
  return row;
}

constexpr int kOddSizes[] = {1, 7, 8, 15, 16, 17, 40, 64, 96, 576};

TEST(RowTest, RmsNormMatchesItsDefinitionInEverySet) {
  for (const int n : kOddSizes) {
    const std::vector<float> x = random_row(n, 3, 1), weight = random_row(n, 1, 2);
    double squares = 0;
    for (const float v : x) squares += double{v} * v;
    const double inverse = 1 / std::sqrt(squares / n + 1e-5);
    std::vector<float> first;
    for (const Kernels *kernels : all_kernels()) {
      std::vector<float> out(static_cast<size_t>(n));
      kernels->rms_norm(x.data(), weight.data(), n, 1e-5f, out.data());
      for (size_t i = 0; i < out.size(); ++i) {
        EXPECT_NEAR(out[i], x[i] * inverse * weight[i],
                    1e-6 * std::fabs(x[i] * inverse * weight[i]))
            << n;
      }
      if (first.empty()) first = out;
      EXPECT_TRUE(same_bytes(first, out)) << kernels->name << " " << n;
      std::vector<float> in_place = x;
      kernels->rms_norm(in_place.data(), weight.data(), n, 1e-5f, in_place.data());
      EXPECT_TRUE(same_bytes(first, in_place));
    }
  }
}

// silu(x) = x / (1 + e^-x) shows the error of our exponential over its whole range.
TEST(RowTest, SiluMatchesFloat64FromEndToEnd) {
  std::vector<float> gate;
  for (float x = -90; x <= 90; x += 0.0137f) gate.push_back(x);
  for (const float x : {0.0f, -0.0f, 1e-30f, -1e-30f, 1e30f, -1e30f, 88.5f, -88.5f, -87.3f})
    gate.push_back(x);
  const std::vector<float> up(gate.size(), 1.0f);
  std::vector<float> first;
  for (const Kernels *kernels : all_kernels()) {
    std::vector<float> out(gate.size());
    kernels->silu_mul(gate.data(), up.data(), static_cast<int>(gate.size()), out.data());
    for (size_t i = 0; i < gate.size(); ++i) {
      const double expected = gate[i] / (1 + std::exp(-double{gate[i]}));
      EXPECT_NEAR(out[i], expected, 3e-7 * std::fabs(expected) + 1e-35) << gate[i];
    }
    if (first.empty()) first = out;
    EXPECT_TRUE(same_bytes(first, out)) << kernels->name;
    const float nan = NAN;
    float result = 0;
    kernels->silu_mul(&nan, up.data(), 1, &result);
    EXPECT_TRUE(std::isnan(result));
  }
}

TEST(RowTest, QuantizerKeepsHalfAStepAndShowsWhatIsNotFinite) {
  const int cols = 320;
  std::vector<float> x = random_row(cols, 2, 9);
  for (int i = 32; i < 64; ++i) x[static_cast<size_t>(i)] = 0;
  for (int i = 64; i < 96; ++i) x[static_cast<size_t>(i)] *= 1e-40f;  // subnormal: becomes zeros
  for (int i = 96; i < 128; ++i) x[static_cast<size_t>(i)] = 4000;
  for (int i = 128; i < 160; ++i) x[static_cast<size_t>(i)] *= 1e37f;
  x[200] = NAN;
  x[230] = INFINITY;
  std::vector<int8_t> first_q;
  for (const Kernels *kernels : all_kernels()) {
    std::vector<int8_t> q(static_cast<size_t>(cols));
    std::vector<float> d(10), ds(10);
    std::vector<int16_t> sum(20);
    kernels->quantize(x.data(), cols, q.data(), d.data(), ds.data(), sum.data());
    for (int b = 0; b < 10; ++b) {
      const auto block = static_cast<size_t>(b);
      if (b == 6 || b == 7) {
        EXPECT_TRUE(std::isnan(d[block]) && std::isnan(ds[block]));
        continue;
      }
      EXPECT_EQ(float_bits(d[block]) & 3u, 0u);
      int sums[2] = {0, 0};
      for (int i = 0; i < 32; ++i) {
        const auto at = static_cast<size_t>(32 * b + i);
        EXPECT_LE(std::abs(int{q[at]}), 127);
        EXPECT_NEAR(double{d[block]} * q[at], x[at], 0.5001 * d[block] + 1e-36);
        sums[i / 16] += q[at];
      }
      EXPECT_EQ(sum[2 * block], sums[0]);
      EXPECT_EQ(sum[2 * block + 1], sums[1]);
      EXPECT_EQ(ds[block], d[block] * static_cast<float>(sums[0] + sums[1]));
    }
    if (first_q.empty()) first_q = q;
    EXPECT_EQ(first_q, q) << kernels->name;
  }
}

TEST(RowTest, RopeRotatesNeighboursOrHalvesAndPassesTheRest) {
  const int head_dim = 16, rotary_dim = 12;
  const std::vector<float> x = random_row(head_dim, 1, 4);
  std::vector<float> cos_sin;
  for (int i = 0; i < rotary_dim / 2; ++i) {
    cos_sin.push_back(std::cos(0.3f * static_cast<float>(i + 1)));
    cos_sin.push_back(std::sin(0.3f * static_cast<float>(i + 1)));
  }
  for (const bool is_neighbor : {true, false}) {
    std::vector<float> first;
    for (const Kernels *kernels : all_kernels()) {
      std::vector<float> out = x;
      kernels->rope(out.data(), cos_sin.data(), rotary_dim, is_neighbor);
      for (int i = 0; i < rotary_dim / 2; ++i) {
        const auto a = static_cast<size_t>(is_neighbor ? 2 * i : i);
        const auto b = static_cast<size_t>(is_neighbor ? 2 * i + 1 : i + rotary_dim / 2);
        const double c = cos_sin[static_cast<size_t>(2 * i)],
                     s = cos_sin[static_cast<size_t>(2 * i + 1)];
        EXPECT_NEAR(out[a], x[a] * c - x[b] * s, 1e-6);
        EXPECT_NEAR(out[b], x[a] * s + x[b] * c, 1e-6);
      }
      for (size_t i = rotary_dim; i < static_cast<size_t>(head_dim); ++i) EXPECT_EQ(out[i], x[i]);
      if (first.empty()) first = out;
      EXPECT_TRUE(same_bytes(first, out)) << kernels->name;
    }
  }
}

// ---- the KV cache ----

TEST(HadamardTest, SpreadsOneChannelEvenlyAndIsItsOwnInverse) {
  for (const int n : {32, 64, 96, 128, 256, 512}) {
    const int stretch = n == 96 ? 32 : std::min(n, 256);
    std::vector<float> one(static_cast<size_t>(n), 0.0f);
    one[5] = 900;
    cpu::hadamard(one.data(), n);
    for (int i = 0; i < n; ++i) {
      const double expected = i < stretch ? 900 / std::sqrt(double{1} * stretch) : 0;
      EXPECT_NEAR(std::fabs(one[static_cast<size_t>(i)]), expected, 1e-4) << n << " " << i;
    }
    const std::vector<float> q = random_row(n, 1, 1), k = random_row(n, 3, 2);
    std::vector<float> spread_q = q, spread_k = k;
    cpu::hadamard(spread_q.data(), n);
    cpu::hadamard(spread_k.data(), n);
    double dot = 0, spread_dot = 0;
    for (size_t i = 0; i < q.size(); ++i) {
      dot += double{q[i]} * k[i];
      spread_dot += double{spread_q[i]} * spread_k[i];
    }
    EXPECT_NEAR(spread_dot, dot, 1e-4 * n);
    cpu::hadamard(spread_k.data(), n);
    for (size_t i = 0; i < k.size(); ++i) EXPECT_NEAR(spread_k[i], k[i], 1e-5);
  }
}

class KvRowTest : public ::testing::TestWithParam<KvType> {};

TEST_P(KvRowTest, RowsComeBackWithinTheBoundOfTheirType) {
  KvLayout layout;
  layout.type = GetParam();
  layout.num_layers = layout.num_kv_heads = 1;
  layout.block_size = 4;
  for (const int head_dim : {32, 64, 96, 8, 20}) {
    if (layout.has_scales() && head_dim % kKvGroup != 0) continue;
    layout.head_dim = head_dim;
    std::vector<uint8_t> first_page;
    for (const Kernels *kernels : all_kernels()) {
      std::vector<uint8_t> page(static_cast<size_t>(layout.page_bytes()), 0xff);
      for (int offset = 0; offset < layout.block_size; ++offset) {
        std::vector<float> row =
            random_row(head_dim, offset == 2 ? 900.0f : 1.0f, static_cast<uint64_t>(offset + 1));
        if (offset == 3) std::fill(row.begin(), row.end(), 0.0f);
        kernels->store_kv(layout, row.data(), offset, page.data());
        std::vector<float> back(row.size());
        kernels->load_kv(layout, page.data(), offset, 1, back.data());
        for (size_t i = 0; i < row.size(); ++i) {
          const size_t group = i / kKvGroup * kKvGroup;
          float largest = 0;
          for (size_t j = group; j < std::min(group + kKvGroup, row.size()); ++j)
            largest = std::max(largest, std::fabs(row[j]));
          // Half a step of the rounded scale, and what the scale's rounding to f16 can clip at the
          // ends.
          const float bound =
              layout.type == KvType::kF32    ? 0.0f
              : layout.type == KvType::kF16  ? std::fabs(row[i]) * 0x1p-11f + 0x1p-25f
              : layout.type == KvType::kInt8 ? largest * (0.5f / 127 + 0x1p-11f) * 1.001f
                                             : largest * (0.5f / 7 + 0x1p-11f) * 1.001f;
          ASSERT_NEAR(back[i], row[i], bound)
              << kernels->name << " offset " << offset << " channel " << i;
        }
      }
      if (first_page.empty()) first_page = page;
      ASSERT_EQ(first_page, page) << kernels->name;
    }
  }
}

std::string kv_name(const ::testing::TestParamInfo<KvType> &info) {
  const char *const kNames[] = {"f16", "int8", "int4", "f32"};
  return kNames[static_cast<int>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(AllTypes, KvRowTest,
                         ::testing::Values(KvType::kF16, KvType::kInt8, KvType::kInt4,
                                           KvType::kF32),
                         kv_name);

// ---- attention ----

TEST(AttentionTest, TilesMatchFloat64AndEverySetGivesTheSameBytes) {
  for (const int head_dim : {64, 128, 80, 16, 8, 20}) {
    const int num_keys = 3 * cpu::kKeyTile + 5;
    const int first_key = 3;
    const std::vector<float> q = random_row(head_dim, 2, 1);
    std::vector<float> k = random_row(4 * cpu::kKeyTile * head_dim, 1, 2),
                       v = random_row(4 * cpu::kKeyTile * head_dim, 1, 3);
    // What lies outside the window must not be read as a number.
    for (int c = 0; c < head_dim; ++c) {
      for (const int outside : {0, first_key - 1, num_keys, num_keys + 7}) {
        k[static_cast<size_t>(outside * head_dim + c)] =
            v[static_cast<size_t>(outside * head_dim + c)] = NAN;
      }
    }
    const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
    std::vector<double> scores, expected(static_cast<size_t>(head_dim));
    double total = 0, max = -1e300;
    for (int j = first_key; j < num_keys; ++j) {
      double s = 0;
      for (int c = 0; c < head_dim; ++c)
        s += double{q[static_cast<size_t>(c)]} * k[static_cast<size_t>(j * head_dim + c)];
      scores.push_back(s * scale);
      max = std::max(max, s * scale);
    }
    for (size_t j = 0; j < scores.size(); ++j) {
      const double p = std::exp(scores[j] - max);
      total += p;
      for (size_t c = 0; c < expected.size(); ++c) {
        expected[c] += p * v[(j + first_key) * static_cast<size_t>(head_dim) + c];
      }
    }
    std::vector<float> first;
    for (const Kernels *kernels : all_kernels()) {
      std::vector<float> out(static_cast<size_t>(head_dim), 0.0f);
      cpu::AttentionState state = {-HUGE_VALF, 0, out.data()};
      for (int start = 0; start < num_keys; start += cpu::kKeyTile) {
        const int64_t at = int64_t{start} * head_dim;
        kernels->attend_tile(q.data(), 1, k.data() + at, v.data() + at, head_dim,
                             std::max(0, first_key - start),
                             std::min(cpu::kKeyTile, num_keys - start), scale, &state);
      }
      EXPECT_NEAR(state.denominator, total, 1e-5 * total);
      for (size_t c = 0; c < expected.size(); ++c) {
        ASSERT_NEAR(out[c] / state.denominator, expected[c] / total, 2e-6)
            << kernels->name << " " << head_dim;
      }
      out.push_back(state.denominator);
      if (first.empty()) first = out;
      ASSERT_TRUE(same_bytes(first, out)) << kernels->name << " " << head_dim;
    }
  }
}

// The queries of a group together give what each gives alone.
TEST(AttentionTest, AQueryDoesNotDependOnItsGroup) {
  for (const int head_dim : {64, 128, 80, 16, 20}) {
    const int most = 8;
    const std::vector<float> q = random_row(most * head_dim, 2, 1),
                             k = random_row(cpu::kKeyTile * head_dim, 1, 2),
                             v = random_row(cpu::kKeyTile * head_dim, 1, 3);
    for (const Kernels *kernels : all_kernels()) {
      std::vector<float> alone(q.size(), 0.5f);
      std::vector<cpu::AttentionState> states;
      for (int n = 0; n < most; ++n) {
        states.push_back({0.1f * static_cast<float>(n), 1, alone.data() + n * head_dim});
        all_kernels()[0]->attend_tile(q.data() + n * head_dim, 1, k.data(), v.data(), head_dim, 3,
                                      29, 0.2f, &states.back());
      }
      for (int count = 1; count <= most; ++count) {
        std::vector<float> together(q.size(), 0.5f);
        std::vector<cpu::AttentionState> group;
        for (int n = 0; n < count; ++n)
          group.push_back({0.1f * static_cast<float>(n), 1, together.data() + n * head_dim});
        kernels->attend_tile(q.data(), count, k.data(), v.data(), head_dim, 3, 29, 0.2f,
                             group.data());
        ASSERT_EQ(0, std::memcmp(alone.data(), together.data(),
                                 static_cast<size_t>(count * head_dim) * sizeof(float)))
            << kernels->name << " head_dim " << head_dim << " queries " << count;
        for (int n = 0; n < count; ++n) {
          const auto i = static_cast<size_t>(n);
          ASSERT_EQ(group[i].denominator, states[i].denominator);
          ASSERT_EQ(group[i].max, states[i].max);
        }
      }
    }
  }
}

// Keys and values that are taken as the cache has them give what the scalar set makes of the same
// numbers in f32, whatever lies in the rows beside them.
TEST(AttentionTest, HalvesInPlaceGiveTheBytesOfATile) {
  const struct {
    int lo, hi;
  } windows[] = {{0, 32}, {3, 29}, {0, 1}, {17, 32}, {5, 16}, {31, 32}, {0, 20}};
  const Kernels *scalar = all_kernels()[0];
  for (const Kernels *kernels : all_kernels()) {
    if (kernels->attend_halves == nullptr) continue;
    for (const int head_dim : {64, 128, 80, 16}) {
      for (const auto &window : windows) {
        const int most = 8, size = cpu::kKeyTile * head_dim;
        const KvLayout layout = {KvType::kF16, 1, 1, head_dim, cpu::kKeyTile};
        const std::vector<float> q = random_row(most * head_dim, 2, 1);
        std::vector<float> rows[2] = {random_row(size, 1, 2), random_row(size, 1, 3)};
        std::vector<uint16_t> pages[2];
        for (int i = 0; i < 2; ++i) {
          pages[i].resize(static_cast<size_t>(size));
          auto *page = reinterpret_cast<uint8_t *>(pages[i].data());
          for (int j = 0; j < cpu::kKeyTile; ++j)
            scalar->store_kv(layout, rows[i].data() + j * head_dim, j, page);
          scalar->load_kv(layout, page, 0, cpu::kKeyTile, rows[i].data());
          for (int j = 0; j < cpu::kKeyTile; ++j) {  // NaN outside
            if (j >= window.lo && j < window.hi) continue;
            std::fill_n(pages[i].begin() + j * head_dim, head_dim, uint16_t{0x7e00});
          }
        }
        cpu::HalfTile tile;
        for (int i = 0; i < cpu::kKeyTile / cpu::kTilePiece; ++i) {
          const int first = i * cpu::kTilePiece;
          if (first >= window.hi || first + cpu::kTilePiece <= window.lo) continue;
          tile.k[i] = pages[0].data() + first * head_dim;
          tile.v[i] = pages[1].data() + first * head_dim;
        }
        for (int count = 1; count <= most; ++count) {
          std::vector<float> expected(q.size(), 0.5f), found = expected;
          std::vector<cpu::AttentionState> one, other;
          for (int n = 0; n < count; ++n) {
            one.push_back({0.1f * static_cast<float>(n), 1, expected.data() + n * head_dim});
            other.push_back({0.1f * static_cast<float>(n), 1, found.data() + n * head_dim});
          }
          scalar->attend_tile(q.data(), count, rows[0].data(), rows[1].data(), head_dim, window.lo,
                              window.hi, 0.2f, one.data());
          kernels->attend_halves(q.data(), count, tile, count % 2 ? tile : cpu::HalfTile{},
                                 head_dim, window.lo, window.hi, 0.2f, other.data());
          ASSERT_TRUE(same_bytes(expected, found))
              << kernels->name << " head_dim " << head_dim << " queries " << count << " keys "
              << window.lo << " to " << window.hi;
          for (size_t n = 0; n < one.size(); ++n) {
            ASSERT_EQ(one[n].denominator, other[n].denominator);
            ASSERT_EQ(one[n].max, other[n].max);
          }
        }
      }
    }
  }
}

// Two parts merged are the whole: softmax over the union of their keys.
TEST(AttentionTest, MergedPartsAreTheSoftmaxOfTheirUnion) {
  for (const int head_dim : {64, 20}) {
    const int n = 2 * cpu::kKeyTile;
    const std::vector<float> q = random_row(head_dim, 1, 1), k = random_row(n * head_dim, 1, 2),
                             v = random_row(n * head_dim, 1, 3);
    std::vector<float> first;
    for (const Kernels *kernels : all_kernels()) {
      std::vector<float> whole(static_cast<size_t>(head_dim)), a = whole, b = whole;
      cpu::AttentionState one = {-HUGE_VALF, 0, whole.data()}, left = {-HUGE_VALF, 0, a.data()},
                          right = {-HUGE_VALF, 0, b.data()};
      const int64_t half = int64_t{cpu::kKeyTile} * head_dim;
      const auto attend = [&](int64_t at, cpu::AttentionState *state) {
        kernels->attend_tile(q.data(), 1, k.data() + at, v.data() + at, head_dim, 0, cpu::kKeyTile,
                             0.5f, state);
      };
      attend(0, &one);
      attend(half, &one);
      attend(0, &left);
      attend(half, &right);
      kernels->merge_attention(&left, right, head_dim);
      EXPECT_NEAR(left.denominator, one.denominator, 1e-5 * one.denominator);
      for (size_t c = 0; c < whole.size(); ++c) {
        EXPECT_NEAR(a[c] / left.denominator, whole[c] / one.denominator, 2e-6);
      }
      if (first.empty()) first = a;
      EXPECT_TRUE(same_bytes(first, a)) << kernels->name;
    }
  }
}

// ---- choosing ----

// Sets of this machine's kind, the best one first, and whether the CPU has what they need.
struct KnownSet {
  const char *name;
  bool is_there;
};
std::vector<KnownSet> known_sets() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return {{"avx512", __builtin_cpu_supports("avx512vnni") != 0},
          {"avx2", __builtin_cpu_supports("avx2") != 0}};
#elif defined(__aarch64__)
  return {{"neon", (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0}};
#else
  return {};
#endif
}

// Without this, a comparison of all sets would pass for want of them.
TEST(ChooseKernelsTest, SetsThatTheCpuHasAreFoundAndTheBestOneIsTheDefault) {
  std::string best = "scalar";
  for (const KnownSet &set : known_sets()) {
    if (set.is_there) {
      EXPECT_STREQ(cpu::choose_kernels(set.name).name, set.name);
      if (best == "scalar") best = set.name;
      continue;
    }
    try {
      cpu::choose_kernels(set.name);
      FAIL() << set.name;
    } catch (const Error &error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      EXPECT_NE(error.message().find("lacks"), std::string::npos) << error.message();
    }
  }
  EXPECT_EQ(cpu::choose_kernels("").name, best);
  EXPECT_STREQ(cpu::choose_kernels("scalar").name, "scalar");
}

TEST(ChooseKernelsTest, UnknownSetIsRefusedByName) {
  try {
    cpu::choose_kernels("sse9");
    FAIL();
  } catch (const Error &error) {
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
    EXPECT_NE(error.message().find("sse9"), std::string::npos);
  }
}

}  // namespace
}  // namespace xllm
