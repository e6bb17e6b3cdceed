// The CPU backend as a whole: both forms of weights against float64, and the promise that a row's
// bytes depend on nothing but the row.
#include "backend/backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/factory.h"
#include "base/error.h"
#include "tiny_model.h"

// Every allocation from the heap counts, so that a test can see that a step makes none. Not
// inlined: the compiler would take the pair of new and free for a mistake.
static std::atomic<int64_t> num_allocations{0};
__attribute__((noinline)) void *operator new(size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  void *memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
__attribute__((noinline)) void operator delete(void *memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void *memory, size_t /*size*/) noexcept {
  std::free(memory);
}

namespace xllm {
namespace {

using testing::Random;
using testing::TinyModel;
using testing::TinyOptions;

struct RunOptions {
  int num_threads = 2;
  std::string instruction_set;
  WeightForm form = WeightForm::kRaw;
  KvType kv_type = KvType::kF16;
  int block_size = 16;
  int chunk = 1 << 20;      // prompt tokens per step
  bool is_together = true;  // all sequences in the same steps, or one after the other
  uint64_t table_seed = 1;  // order of the block ids
  uint8_t fill = 0xff;      // bytes that the pool holds before (NaN in every type)
};

// Runs sequences through one backend and collects the logits of all their tokens.
class Runner {
 public:
  Runner(const TinyModel &model, const RunOptions &run) : model_(model), run_(run) {
    BackendOptions options;
    options.num_threads = run.num_threads;
    options.instruction_set = run.instruction_set;
    backend_ = make_backend(BackendKind::kCpu, options);
    weights_ = backend_->load_weights(model.dims, model.tensors, run.form, nullptr);
    workspace_ = backend_->make_workspace(*weights_, 8);
    layout_.type = run.kv_type;
    layout_.num_layers = model.dims.num_layers;
    layout_.num_kv_heads = model.dims.num_kv_heads;
    layout_.head_dim = model.dims.head_dim;
    layout_.block_size = run.block_size;
  }

  std::vector<std::vector<float>> logits(const std::vector<std::vector<int32_t>> &prompts) {
    size_t longest = 0;
    for (const auto &prompt : prompts) longest = std::max(longest, prompt.size());
    max_blocks_ = static_cast<int>(longest) / run_.block_size + 1;
    const int num_blocks = max_blocks_ * static_cast<int>(prompts.size());
    pool_ =
        Buffer(&backend_->allocator(), layout_.block_bytes() * static_cast<uint64_t>(num_blocks));
    std::memset(pool_.data(), run_.fill, pool_.size_bytes());
    kv_ = {layout_, pool_.data<uint8_t>(), num_blocks};
    Random random(run_.table_seed);
    ids_.resize(static_cast<size_t>(num_blocks));
    for (size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<int32_t>(i);
    for (size_t i = ids_.size(); i > 1; --i)
      std::swap(ids_[i - 1], ids_[static_cast<size_t>(random.below(static_cast<int>(i)))]);

    std::vector<std::vector<float>> out(prompts.size());
    std::vector<size_t> done(prompts.size(), 0);
    for (;;) {
      ForwardBatch batch = new_batch();
      std::vector<size_t> owners;
      for (size_t s = 0; s < prompts.size(); ++s) {
        const size_t count = std::min(prompts[s].size() - done[s], static_cast<size_t>(run_.chunk));
        if (count == 0 || (!run_.is_together && !owners.empty())) continue;
        add(&batch, prompts[s], s, done[s], count);
        owners.insert(owners.end(), count, s);
        done[s] += count;
      }
      if (owners.empty()) return out;
      step(batch);
      const float *row = backend_->host_logits(*workspace_);
      for (const size_t s : owners) {
        out[s].insert(out[s].end(), row, row + model_.dims.vocab_size);
        row += model_.dims.vocab_size;
      }
    }
  }

  ForwardBatch new_batch() const {
    ForwardBatch batch;
    batch.max_blocks = max_blocks_;
    batch.query_start.push_back(0);
    return batch;
  }

  void add(ForwardBatch *batch, const std::vector<int32_t> &prompt, size_t seq, size_t first,
           size_t count) const {
    const int32_t *table = ids_.data() + seq * static_cast<size_t>(max_blocks_);
    for (size_t i = first; i < first + count; ++i) {
      const auto position = static_cast<int>(i);
      batch->logit_rows.push_back(batch->num_tokens());
      batch->token_ids.push_back(prompt[i]);
      batch->positions.push_back(position);
      batch->seq_index.push_back(batch->num_seqs());
      batch->kv_indices.push_back(int64_t{table[position / run_.block_size]} * run_.block_size +
                                  position % run_.block_size);
      batch->paths.push_back(TokenPath::kInteger);
    }
    batch->query_start.push_back(batch->num_tokens());
    batch->context_len.push_back(static_cast<int32_t>(first + count));
    batch->sampler_row.push_back(batch->num_seqs() - 1);
    for (int b = 0; b < max_blocks_; ++b) batch->block_tables.push_back(table[b]);
  }

  void step(const ForwardBatch &batch) {
    check_batch(batch, model_.dims, kv_);
    backend_->embed(*workspace_, *weights_, batch);
    for (int layer = 0; layer < model_.dims.num_layers; ++layer) {
      backend_->qkv(*workspace_, *weights_, layer, kv_, batch);
      backend_->attention(*workspace_, *weights_, layer, kv_, batch);
      backend_->o_proj(*workspace_, *weights_, layer, batch);
      backend_->ffn(*workspace_, *weights_, layer, batch);
    }
    backend_->head(*workspace_, *weights_, batch);
  }

  Backend &backend() { return *backend_; }
  Workspace &workspace() { return *workspace_; }
  const WeightSet &weights() const { return *weights_; }
  const KvView &kv() const { return kv_; }

 private:
  const TinyModel &model_;
  RunOptions run_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<WeightSet> weights_;
  std::unique_ptr<Workspace> workspace_;
  KvLayout layout_;
  Buffer pool_;
  KvView kv_;
  int max_blocks_ = 0;
  std::vector<int32_t> ids_;
};

// |a - b| / |b| over whole vectors.
double relative_error(const std::vector<float> &a, const std::vector<double> &b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(difference / size);
}

bool same_bytes(const std::vector<float> &a, const std::vector<float> &b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Kind {
  const char *name;
  TinyOptions options;
};

std::vector<Kind> kinds() {
  std::vector<Kind> out;
  TinyOptions o;
  out.push_back({"llama", o});
  o.is_neighbor = false;
  o.has_bias = true;
  out.push_back({"qwen2", o});
  o.has_bias = false;
  o.has_head_norm = true;
  out.push_back({"qwen3", o});
  o = TinyOptions();
  o.hidden_size = 40;  // no multiple of 32; heads wider than the model; part of a head rotates
  o.num_heads = 4;
  o.head_dim = 16;
  o.rotary_dim = 12;
  o.intermediate_size = 72;
  out.push_back({"wide_heads", o});
  o = TinyOptions();
  o.num_heads = 6;
  o.head_dim = 8;
  o.rotary_dim = 8;
  out.push_back({"small_heads", o});
  o = TinyOptions();
  o.sliding_window = 37;
  out.push_back({"window", o});
  o = TinyOptions();
  o.num_kv_heads = 6;
  o.head_dim = 64;
  o.rotary_dim = 64;
  out.push_back({"mha", o});
  return out;
}

class KindTest : public ::testing::TestWithParam<Kind> {};

// The accuracy that the per-slot form promises: 1e-5 of the logits' length.
TEST_P(KindTest, DequantizedFormMatchesFloat64) {
  const TinyModel model(GetParam().options);
  const std::vector<int32_t> prompt = model.prompt(80, 3);
  RunOptions run;
  run.form = WeightForm::kDequantized;
  run.kv_type = KvType::kF32;
  Runner runner(model, run);
  EXPECT_LT(relative_error(runner.logits({prompt})[0], model.reference(prompt)), 1e-5);
}

// With f32 weights the raw form differs by its f16 cache alone.
TEST_P(KindTest, RawFormWithFloatWeightsMatchesFloat64) {
  const TinyModel model(GetParam().options);
  const std::vector<int32_t> prompt = model.prompt(80, 4);
  Runner runner(model, RunOptions());
  EXPECT_LT(relative_error(runner.logits({prompt})[0], model.reference(prompt)), 2e-3);
}

// The other convention must not pass for this one.
TEST_P(KindTest, TheOtherRopeConventionFails) {
  TinyOptions other = GetParam().options;
  other.is_neighbor = !other.is_neighbor;
  const TinyModel model(GetParam().options), wrong(other);
  const std::vector<int32_t> prompt = model.prompt(41, 5);
  Runner runner(wrong, RunOptions());
  EXPECT_GT(relative_error(runner.logits({prompt})[0], model.reference(prompt)), 2e-2);
}

std::string kind_name(const ::testing::TestParamInfo<Kind> &info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Kinds, KindTest, ::testing::ValuesIn(kinds()), kind_name);

// Every tensor type through the whole model. Activations of 8 bits cost about 1 % of the logits'
// length.
class TypeTest : public ::testing::TestWithParam<DType> {};

TinyOptions options_of(DType dtype) {
  TinyOptions o;
  o.dtype = dtype;
  const bool is_super = dtype_info(dtype).block_elems == 256;
  o.hidden_size = is_super ? 256 : 64;
  o.intermediate_size = is_super ? 512 : 96;
  o.num_heads = is_super ? 8 : 6;
  return o;
}

TEST_P(TypeTest, BothFormsMatchFloat64) {
  const TinyModel model(options_of(GetParam()));
  const std::vector<int32_t> prompt = model.prompt(20, 6);
  const std::vector<double> expected = model.reference(prompt);
  Runner raw(model, RunOptions());
  EXPECT_LT(relative_error(raw.logits({prompt})[0], expected),
            testing::is_plain_float(GetParam()) ? 2e-3 : 2e-2);
  RunOptions run;
  run.form = WeightForm::kDequantized;
  run.kv_type = KvType::kF32;
  Runner dequantized(model, run);
  EXPECT_LT(relative_error(dequantized.logits({prompt})[0], expected), 1e-5);
}

std::string dtype_name(const ::testing::TestParamInfo<DType> &info) {
  return dtype_info(info.param).name;
}
INSTANTIATE_TEST_SUITE_P(Types, TypeTest, ::testing::ValuesIn(testing::all_dtypes()), dtype_name);

// ---- invariance ----

struct Invariance {
  DType dtype;
  KvType kv_type;
  WeightForm form;
  bool has_window;
};

class InvarianceTest : public ::testing::TestWithParam<Invariance> {};

TEST_P(InvarianceTest, BytesDependOnTheRowAlone) {
  TinyOptions options = options_of(GetParam().dtype);
  if (GetParam().has_window) options.sliding_window = 29;
  const TinyModel model(options);
  const std::vector<std::vector<int32_t>> prompts = {model.prompt(70, 7), model.prompt(1, 8),
                                                     model.prompt(33, 9), model.prompt(100, 10)};
  RunOptions base;
  base.kv_type = GetParam().kv_type;
  base.form = GetParam().form;
  base.num_threads = 1;
  base.instruction_set = "scalar";
  base.is_together = false;
  const std::vector<std::vector<float>> expected = Runner(model, base).logits(prompts);
  const auto expect_same = [&](const RunOptions &run, const std::string &what) {
    const std::vector<std::vector<float>> found = Runner(model, run).logits(prompts);
    for (size_t s = 0; s < prompts.size(); ++s) {
      EXPECT_TRUE(same_bytes(expected[s], found[s])) << what << ", sequence " << s;
    }
  };
  RunOptions run = base;
  run.instruction_set = "";
  expect_same(run, "the best instruction set");
  for (const int threads : {2, 3, 8}) {
    run.num_threads = threads;
    expect_same(run, std::to_string(threads) + " threads");
  }
  run.num_threads = 2;
  run.is_together = true;
  expect_same(run, "together");
  for (const int chunk : {1, 7, 64}) {
    run.chunk = chunk;
    expect_same(run, "chunks of " + std::to_string(chunk));
  }
  run.table_seed = 99;
  expect_same(run, "other blocks");
  run.fill = 0;
  expect_same(run, "a pool of zeros");
  run.block_size = 64;
  expect_same(run, "blocks of 64");
  run.block_size = 8;
  expect_same(run, "blocks of 8");
}

std::string invariance_name(const ::testing::TestParamInfo<Invariance> &info) {
  const char *const kKv[] = {"f16", "int8", "int4", "f32"};
  return std::string(dtype_info(info.param.dtype).name) + "_" +
         kKv[static_cast<int>(info.param.kv_type)] +
         (info.param.form == WeightForm::kDequantized ? "_dequantized" : "") +
         (info.param.has_window ? "_window" : "");
}
INSTANTIATE_TEST_SUITE_P(
    Forms, InvarianceTest,
    ::testing::Values(Invariance{DType::kQ4_1, KvType::kF16, WeightForm::kRaw, false},
                      Invariance{DType::kQ8_0, KvType::kInt8, WeightForm::kRaw, false},
                      Invariance{DType::kF16, KvType::kF16, WeightForm::kRaw, true},
                      Invariance{DType::kQ4_K, KvType::kInt4, WeightForm::kRaw, true},
                      Invariance{DType::kQ6_K, KvType::kF16, WeightForm::kRaw, false},
                      Invariance{DType::kQ4_1, KvType::kF32, WeightForm::kDequantized, false}),
    invariance_name);

// Contexts of several splits: one thread takes a row's splits in turn, eight share them.
class LongContextTest : public ::testing::TestWithParam<int> {};

TEST_P(LongContextTest, SplitsOnManyThreadsGiveTheBytesOfOne) {
  TinyOptions options;
  options.num_heads = 2;
  options.num_kv_heads = 1;
  options.num_layers = 1;
  options.sliding_window = GetParam();
  const TinyModel model(options);
  const std::vector<std::vector<int32_t>> prompts = {model.prompt(700, 16), model.prompt(2, 17),
                                                     model.prompt(258, 18)};
  RunOptions run;
  run.num_threads = 1;
  run.is_together = false;
  const std::vector<std::vector<float>> expected = Runner(model, run).logits(prompts);
  for (const int chunk : {1, 3, 700}) {
    for (const bool is_together : {false, true}) {
      run.num_threads = 8;
      run.chunk = chunk;
      run.is_together = is_together;
      const std::vector<std::vector<float>> found = Runner(model, run).logits(prompts);
      for (size_t s = 0; s < prompts.size(); ++s) {
        EXPECT_TRUE(same_bytes(expected[s], found[s]))
            << "chunks of " << chunk << ", sequence " << s;
      }
    }
  }
  run.form = WeightForm::kDequantized;
  run.kv_type = KvType::kF32;
  EXPECT_LT(relative_error(Runner(model, run).logits({prompts[0]})[0], model.reference(prompts[0])),
            1e-5);
}

INSTANTIATE_TEST_SUITE_P(Windows, LongContextTest, ::testing::Values(0, 300, 600));

// ---- cases from the field ----

// Dot products of 3e7 and block sums of 128,000: everything between stays f32.
TEST(FieldTest, HugeBiasesStayFinite) {
  TinyOptions o;
  o.head_dim = 128;
  o.rotary_dim = 128;
  o.is_neighbor = false;
  o.has_bias = true;
  o.q_bias = 300;
  o.k_bias = 900;
  for (const DType dtype : {DType::kF32, DType::kQ8_0}) {
    o.dtype = dtype;
    const TinyModel model(o);
    const std::vector<int32_t> prompt = model.prompt(70, 11);
    for (const KvType kv : {KvType::kF16, KvType::kInt8, KvType::kInt4}) {
      RunOptions run;
      run.kv_type = kv;
      const std::vector<std::vector<float>> logits = Runner(model, run).logits({prompt});
      for (const float logit : logits[0]) ASSERT_TRUE(std::isfinite(logit));
    }
    RunOptions run;
    run.form = WeightForm::kDequantized;
    run.kv_type = KvType::kF32;
    const std::vector<std::vector<float>> logits = Runner(model, run).logits({prompt});
    for (const float logit : logits[0]) ASSERT_TRUE(std::isfinite(logit));
  }
}

// ---- memory ----

TEST(MemoryTest, AStepNoLargerThanTheLastAllocatesNothing) {
  const TinyModel model(options_of(DType::kQ4_1));
  RunOptions run;
  run.num_threads = 3;
  Runner runner(model, run);
  const std::vector<int32_t> prompt = model.prompt(40, 12);
  runner.logits({prompt});
  const uint64_t workspace_bytes = runner.workspace().size_bytes();
  ForwardBatch batch = runner.new_batch();
  runner.add(&batch, prompt, 0, 0, 40);
  runner.step(batch);
  const int64_t before = num_allocations.load();
  runner.step(batch);
  EXPECT_EQ(num_allocations.load(), before);
  EXPECT_EQ(runner.workspace().size_bytes(), workspace_bytes);
}

TEST(MemoryTest, ThePlanIsWhatIsTaken) {
  for (const WeightForm form : {WeightForm::kRaw, WeightForm::kDequantized}) {
    const TinyModel model(options_of(DType::kQ4_1));
    RunOptions run;
    run.form = form;
    run.kv_type = form == WeightForm::kRaw ? KvType::kF16 : KvType::kF32;
    Runner runner(model, run);
    const BackendPlan plan = runner.backend().plan(model.dims, model.tensors, form, 40, 40);
    EXPECT_EQ(plan.weight_bytes, runner.weights().size_bytes());
    runner.logits({model.prompt(40, 13)});
    EXPECT_EQ(plan.scratch_bytes, runner.workspace().size_bytes());
  }
}

TEST(MemoryTest, TheLimitIsKeptAndNamed) {
  BackendOptions options;
  options.num_threads = 1;
  options.memory_limit = 1 << 20;
  const std::unique_ptr<Backend> backend = make_backend(BackendKind::kCpu, options);
  EXPECT_EQ(backend->memory().total_bytes, uint64_t{1} << 20);
  const Buffer half(&backend->allocator(), 1 << 19);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(half.data()) % 256, 0u);
  EXPECT_EQ(backend->memory().free_bytes, uint64_t{1} << 19);
  try {
    const Buffer more(&backend->allocator(), (1 << 19) + 1);
    FAIL();
  } catch (const Error &error) {
    EXPECT_EQ(error.status(), Status::kMemory);
    EXPECT_EQ(error.details().at(0).second, std::to_string((1 << 19) + 1));
    EXPECT_EQ(error.details().at(1).second, std::to_string(1 << 19));
  }
}

TEST(MemoryTest, CopiedBlocksHoldTheSameBytes) {
  const TinyModel model(options_of(DType::kQ4_1));
  Runner runner(model, RunOptions());
  runner.logits({model.prompt(40, 14)});
  const uint64_t size = runner.kv().layout.block_bytes();
  std::memset(runner.kv().base + 2 * size, 0x11, size);
  const std::vector<int32_t> src = {0}, dst = {2};
  runner.backend().copy_blocks(runner.kv(), src, dst);
  EXPECT_EQ(std::memcmp(runner.kv().base, runner.kv().base + 2 * size, size), 0);
}

// ---- checks ----

void expect_refused(const ModelDims &dims, const ModelTensors &tensors, Status status,
                    const std::string &part) {
  try {
    check_tensors(dims, tensors);
    FAIL() << "accepted: " << part;
  } catch (const Error &error) {
    EXPECT_EQ(error.status(), status);
    EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
  }
}

TEST(CheckTensorsTest, NamesTheTensorWhatWasExpectedAndWhatWasFound) {
  const TinyModel model{TinyOptions()};
  check_tensors(model.dims, model.tensors);
  ModelTensors tensors = model.tensors;
  tensors.layers[1].k = {};
  expect_refused(model.dims, tensors, Status::kModelMalformed,
                 "blk.1.attn_k.weight: missing, expected [64, 64]");
  tensors = model.tensors;
  tensors.layers[0].q.rows = 5;
  expect_refused(model.dims, tensors, Status::kModelMalformed,
                 "blk.0.attn_q.weight: expected [192, 64], found f32 [5, 64]");
  tensors = model.tensors;
  tensors.layers[0].ffn_norm.dtype = DType::kQ8_0;
  expect_refused(model.dims, tensors, Status::kModelUnsupported,
                 "blk.0.ffn_norm.weight: expected f32, f16 or bf16, found q8_0");
  tensors = model.tensors;
  tensors.head.dtype = static_cast<DType>(16);
  expect_refused(model.dims, tensors, Status::kModelUnsupported, "output.weight");
  tensors = model.tensors;
  tensors.layers[0].down.dtype = DType::kQ4_K;
  expect_refused(model.dims, tensors, Status::kModelMalformed,
                 "blk.0.ffn_down.weight: q4_k rows are whole blocks of 256");
  tensors = model.tensors;
  tensors.layers[0].q_bias = model.tensors.layers[0].attn_norm;
  expect_refused(model.dims, tensors, Status::kModelMalformed,
                 "blk.0.attn_q.bias: expected [1, 192]");
  ModelDims dims = model.dims;
  dims.num_kv_heads = 4;
  expect_refused(dims, model.tensors, Status::kModelMalformed, "num_heads");
  dims = model.dims;
  dims.rope.fine.pop_back();
  expect_refused(dims, model.tensors, Status::kModelMalformed, "rope");
}

TEST(CheckBatchTest, EveryBrokenInvariantIsCaught) {
  const TinyModel model{TinyOptions()};
  Runner runner(model, RunOptions());
  const std::vector<int32_t> prompt = model.prompt(20, 15);
  runner.logits({prompt, prompt});
  ForwardBatch good = runner.new_batch();
  runner.add(&good, prompt, 0, 4, 10);
  runner.add(&good, prompt, 1, 19, 1);
  check_batch(good, model.dims, runner.kv());
  const auto expect_caught = [&](const char *what, void (*damage)(ForwardBatch *)) {
    ForwardBatch bad = good;
    damage(&bad);
    EXPECT_THROW(check_batch(bad, model.dims, runner.kv()), Error) << what;
  };
  expect_caught("token", [](ForwardBatch *b) { b->token_ids[3] = 100; });
  expect_caught("position", [](ForwardBatch *b) { b->positions[3] += 1; });
  expect_caught("sequence", [](ForwardBatch *b) { b->seq_index[3] = 1; });
  expect_caught("kv index", [](ForwardBatch *b) { b->kv_indices[3] += 1; });
  expect_caught("starts", [](ForwardBatch *b) { b->query_start[1] = 0; });
  expect_caught("context", [](ForwardBatch *b) { b->context_len[1] = 0; });
  expect_caught("long context", [](ForwardBatch *b) { b->context_len[1] = 1000; });
  expect_caught("table", [](ForwardBatch *b) { b->block_tables[0] = -1; });
  expect_caught("table size", [](ForwardBatch *b) { b->block_tables.pop_back(); });
  expect_caught("logit order",
                [](ForwardBatch *b) { std::swap(b->logit_rows[0], b->logit_rows[1]); });
  expect_caught("logit range", [](ForwardBatch *b) { b->logit_rows.back() = 11; });
  expect_caught("paths", [](ForwardBatch *b) { b->paths.clear(); });
}

// ---- making one ----

TEST(FactoryTest, CpuSaysWhatItIs) {
  BackendOptions options;
  options.num_threads = 3;
  const std::unique_ptr<Backend> backend = make_backend(BackendKind::kCpu, options);
  EXPECT_EQ(backend->info().kind, "cpu");
  EXPECT_EQ(backend->info().num_threads, 3);
  EXPECT_EQ(backend->info().threads_limit, "flag");
  EXPECT_FALSE(backend->info().kernels.empty());
  EXPECT_GT(backend->memory().free_bytes, 0u);
  EXPECT_LE(backend->memory().free_bytes, backend->memory().total_bytes);
  options.num_threads = 0;
  EXPECT_NE(make_backend(BackendKind::kCpu, options)->info().threads_limit, "flag");
}

// Where there is a GPU and the library, auto takes it; elsewhere it says in one line why not.
TEST(FactoryTest, AutoAlwaysGivesABackend) {
  std::vector<std::string> lines;
  BackendOptions options;
  options.num_threads = 1;
  options.log = [&](const std::string &line) { lines.push_back(line); };
  const std::unique_ptr<Backend> backend = make_backend(BackendKind::kAuto, options);
  if (backend->info().kind == "cpu") {
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_EQ(lines[0].rfind("backend: CPU (", 0), 0u) << lines[0];
    EXPECT_THROW(make_backend(BackendKind::kCuda, options), Error);
  }
}

// A set that is loaded beside running streams lets a step in between two pieces, however large the
// tensor: a head of a real vocabulary takes seconds.
TEST(CpuBackend, TellsOfALoadPieceByPiece) {
  const TinyModel model(TinyOptions{});
  ModelDims dims = model.dims;
  dims.vocab_size = 100'000;
  const std::vector<uint16_t> head(100'000 * static_cast<size_t>(dims.hidden_size), 0x3c00);
  ModelTensors tensors = model.tensors;
  tensors.head = {head.data(), DType::kF16, dims.vocab_size, dims.hidden_size, "output.weight"};
  tensors.embedding = tensors.head;
  BackendOptions options;
  options.num_threads = 2;
  const auto backend = make_backend(BackendKind::kCpu, options);
  uint64_t last = 0, largest = 0, whole = 0;
  const auto weights = backend->load_weights(dims, tensors, WeightForm::kDequantized,
                                             [&](uint64_t done, uint64_t total) {
                                               largest = std::max(largest, done - last);
                                               last = done;
                                               whole = total;
                                             });
  EXPECT_EQ(last, whole);
  EXPECT_LE(largest, uint64_t{4} << 20);
}

}  // namespace
}  // namespace xllm
