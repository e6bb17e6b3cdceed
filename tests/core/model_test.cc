// Keys and tensors of a file become a model or a refusal that names them; rotation, batches and
// plans.

#include "model/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/half.h"
#include "gguf_builder.h"
#include "model/batch.h"
#include "model/kv_precision.h"
#include "model/plan.h"
#include "model/rope.h"
#include "model/transformer.h"
#include "noting_backend.h"

namespace xllm {
namespace {

// A small model whose keys and tensors a test changes before it is built.
struct Fixture {
  std::string arch = "llama";
  int width = 32, inner = 64, heads = 4, kv_heads = 2, head_dim = 8, vocab = 48, layers = 2;
  std::vector<std::string> without;          // keys (bare) and tensors to leave out
  std::function<void(GgufBuilder *)> extra;  // keys and tensors to add

  GgufBuilder build() const {
    GgufBuilder file;
    const auto is_kept = [&](const std::string &name) {
      return std::find(without.begin(), without.end(), name) == without.end();
    };
    const auto key = [&](const std::string &name, uint32_t value) {
      if (is_kept(name)) file.key(arch + "." + name, value);
    };
    file.key("general.architecture", arch.c_str());
    key("block_count", static_cast<uint32_t>(layers));
    key("context_length", 512);
    key("embedding_length", static_cast<uint32_t>(width));
    key("feed_forward_length", static_cast<uint32_t>(inner));
    key("attention.head_count", static_cast<uint32_t>(heads));
    key("attention.head_count_kv", static_cast<uint32_t>(kv_heads));
    if (is_kept("attention.layer_norm_rms_epsilon")) {
      file.key(arch + ".attention.layer_norm_rms_epsilon", 1e-5f);
    }
    const auto tensor = [&](const std::string &name, int cols, int rows) {
      if (!is_kept(name)) return;
      std::vector<uint64_t> dims = {static_cast<uint64_t>(cols)};
      if (rows > 0) dims.push_back(static_cast<uint64_t>(rows));
      file.tensor(name, dims, static_cast<uint32_t>(DType::kF32),
                  static_cast<uint64_t>(cols) * static_cast<uint64_t>(std::max(rows, 1)) * 4);
    };
    tensor("token_embd.weight", width, vocab);
    tensor("output_norm.weight", width, 0);
    for (int layer = 0; layer < layers; ++layer) {
      const std::string at = "blk." + std::to_string(layer) + ".";
      tensor(at + "attn_norm.weight", width, 0);
      tensor(at + "ffn_norm.weight", width, 0);
      tensor(at + "attn_q.weight", width, heads * head_dim);
      tensor(at + "attn_k.weight", width, kv_heads * head_dim);
      tensor(at + "attn_v.weight", width, kv_heads * head_dim);
      if (arch == "qwen2") {
        tensor(at + "attn_q.bias", heads * head_dim, 0);
        tensor(at + "attn_k.bias", kv_heads * head_dim, 0);
        tensor(at + "attn_v.bias", kv_heads * head_dim, 0);
      }
      if (arch == "qwen3") {
        tensor(at + "attn_q_norm.weight", head_dim, 0);
        tensor(at + "attn_k_norm.weight", head_dim, 0);
      }
      tensor(at + "attn_output.weight", heads * head_dim, width);
      tensor(at + "ffn_gate.weight", width, inner);
      tensor(at + "ffn_up.weight", width, inner);
      tensor(at + "ffn_down.weight", inner, width);
    }
    if (extra) extra(&file);
    return file;
  }

  Model open(const ModelOverrides &overrides = {}) const {
    return Model::open(folder().write("model.gguf", build().build()), overrides);
  }

  static TempFolder &folder() {
    static TempFolder folder;
    return folder;
  }
};

// A fixture with one more thing.
Fixture with(const std::function<void(GgufBuilder *)> &extra, const char *arch = "llama") {
  Fixture fixture;
  fixture.arch = arch;
  fixture.extra = extra;
  return fixture;
}

void expect_refused(const Fixture &fixture, Status status, const std::string &named) {
  try {
    fixture.open();
    ADD_FAILURE() << "opened, though " << named;
  } catch (const Error &error) {
    EXPECT_EQ(static_cast<int>(error.status()), static_cast<int>(status)) << error.message();
    EXPECT_NE(error.message().find(named), std::string::npos) << error.message();
  }
}

std::string fact(const Model &model, const std::string &name) {
  for (const Fact &fact : model.facts()) {
    if (fact.name == name) return fact.value;
  }
  return "";
}

// ---- keys ----

TEST(ModelConfig, ReadsTheShapeAndSaysWhatItInferred) {
  const Model model = Fixture().open();
  const ModelDims &dims = model.dims();
  EXPECT_EQ(dims.num_layers, 2);
  EXPECT_EQ(dims.hidden_size, 32);
  EXPECT_EQ(dims.intermediate_size, 64);
  EXPECT_EQ(dims.num_heads, 4);
  EXPECT_EQ(dims.num_kv_heads, 2);
  EXPECT_EQ(dims.head_dim, 8);
  EXPECT_EQ(dims.vocab_size, 48);
  EXPECT_FLOAT_EQ(dims.attention_scale, 1 / std::sqrt(8.0f));
  EXPECT_EQ(dims.rope.rotary_dim, 8);
  EXPECT_TRUE(dims.rope.is_neighbor);
  EXPECT_EQ(fact(model, "head_dim"), "8");
  EXPECT_EQ(fact(model, "rope_freq_base"), "10000");
  EXPECT_EQ(fact(model, "head"), "token_embd.weight");
  EXPECT_EQ(fact(model, "context_length"), "512");
}

TEST(ModelConfig, FamiliesDifferInHowTheyRotate) {
  for (const char *arch : {"qwen2", "qwen3"}) {
    Fixture fixture;
    fixture.arch = arch;
    EXPECT_FALSE(fixture.open().dims().rope.is_neighbor) << arch;
  }
}

TEST(ModelConfig, HeadSizeIsTheKeyLengthWhereOneIsGiven) {
  Fixture fixture = with([](GgufBuilder *file) {
    file->key("llama.attention.key_length", uint32_t{16});
    file->key("llama.attention.value_length", uint32_t{16});
    file->key("llama.rope.dimension_count", uint32_t{12});
  });
  fixture.width = 40;
  fixture.head_dim = 16;
  const Model model = fixture.open();
  EXPECT_EQ(model.dims().head_dim, 16);
  EXPECT_FLOAT_EQ(model.dims().attention_scale, 0.25f);
  EXPECT_EQ(model.dims().rope.rotary_dim, 12);
  EXPECT_EQ(model.tensors().layers[0].q.rows, 64);
}

TEST(ModelConfig, AnArrayOfOneValueIsThatValue) {
  Fixture fixture = with([](GgufBuilder *file) {
    file->array("llama.attention.head_count", std::vector<int32_t>{4, 4});
    file->array("llama.attention.head_count_kv", std::vector<int32_t>{2, 2});
    file->array("llama.feed_forward_length", std::vector<uint32_t>{64, 64});
    file->array("llama.rope.freq_base", std::vector<float>{500, 500});
    file->array("llama.attention.sliding_window", std::vector<uint32_t>{16, 16});
  });
  fixture.without = {"attention.head_count", "attention.head_count_kv", "feed_forward_length"};
  const Model model = fixture.open();
  EXPECT_EQ(model.dims().num_kv_heads, 2);
  EXPECT_EQ(model.dims().sliding_window, 16);
  EXPECT_EQ(model.config().rope.freq_base, 500);
}

TEST(ModelConfig, AnArrayOfDifferentValuesIsRefusedByName) {
  for (const char *name :
       {"attention.head_count", "attention.head_count_kv", "feed_forward_length"}) {
    Fixture fixture = with([&](GgufBuilder *file) {
      file->array(std::string("llama.") + name, std::vector<int32_t>{4, 2});
    });
    fixture.without = {name};
    expect_refused(fixture, Status::kModelUnsupported, std::string("llama.") + name);
  }
}

TEST(ModelConfig, RequiredKeysAreNamedWhenMissing) {
  for (const char *name :
       {"block_count", "context_length", "embedding_length", "feed_forward_length",
        "attention.head_count", "attention.layer_norm_rms_epsilon"}) {
    Fixture fixture;
    fixture.without = {name};
    expect_refused(fixture, Status::kModelMalformed, std::string("llama.") + name);
  }
}

TEST(ModelConfig, LayerCountsThatCannotBeAreRefused) {
  const auto add = [](auto value) {
    Fixture fixture = with([=](GgufBuilder *file) { file->key("llama.block_count", value); });
    fixture.without = {"block_count"};
    return fixture;
  };
  expect_refused(add(uint32_t{0}), Status::kModelMalformed, "llama.block_count");
  expect_refused(add(uint32_t{1000000000}), Status::kModelMalformed, "llama.block_count");
  expect_refused(add(int32_t{-2}), Status::kModelMalformed, "llama.block_count");
  expect_refused(add(2.0f), Status::kModelMalformed, "llama.block_count");
}

TEST(ModelConfig, KeysThatWouldChangeNumbersAreRefusedByName) {
  expect_refused(with([](GgufBuilder *f) { f->key("llama.expert_count", uint32_t{8}); }),
                 Status::kModelUnsupported, "llama.expert_count");
  expect_refused(with([](GgufBuilder *f) { f->key("llama.logit_scale", 0.5f); }),
                 Status::kModelUnsupported, "llama.logit_scale");
  expect_refused(with([](GgufBuilder *f) { f->key("llama.attention.causal", false); }),
                 Status::kModelUnsupported, "llama.attention.causal");
  expect_refused(with([](GgufBuilder *f) { f->key("llama.final_logit_softcapping", 30.0f); }),
                 Status::kModelUnsupported, "llama.final_logit_softcapping");
  expect_refused(with([](GgufBuilder *f) { f->key("llama.attention.novelty", uint32_t{1}); }),
                 Status::kModelUnsupported, "llama.attention.novelty");
  expect_refused(with([](GgufBuilder *f) { f->key("llama.attention.value_length", uint32_t{16}); }),
                 Status::kModelUnsupported, "llama.attention.value_length");
  expect_refused(with([](GgufBuilder *f) { f->key("llama.rope.scaling.type", "longrope"); }),
                 Status::kModelUnsupported, "llama.rope.scaling.type");
  expect_refused(with([](GgufBuilder *f) { f->key("llama.tensor_data_layout", "shuffled"); }),
                 Status::kModelUnsupported, "llama.tensor_data_layout");
  expect_refused(with([](GgufBuilder *f) { f->key("general.type", "adapter"); }),
                 Status::kModelUnsupported, "general.type");
}

TEST(ModelConfig, NeutralValuesOfThoseKeysAreAccepted) {
  EXPECT_NO_THROW(with([](GgufBuilder *file) {
                    file->key("llama.expert_count", uint32_t{0});
                    file->key("llama.logit_scale", 1.0f);
                    file->key("llama.attention.causal", true);
                    file->key("llama.rope.scaling.finetuned", true);
                    file->key("llama.tensor_data_layout", "Meta AI original pth");
                    file->key("llama.vocab_size", uint32_t{48});
                    file->key("another.expert_count", uint32_t{8});  // not this architecture's
                  }).open());
}

TEST(ModelConfig, AnUnknownArchitectureIsRefusedByName) {
  Fixture fixture;
  fixture.arch = "mamba";
  expect_refused(fixture, Status::kModelUnsupported, "mamba");
}

TEST(ModelConfig, RotationsThatDoNotFitTheHeadAreRefused) {
  for (const uint32_t dim : {7u, 10u}) {
    expect_refused(with([=](GgufBuilder *f) { f->key("llama.rope.dimension_count", dim); }),
                   Status::kModelMalformed, "llama.rope.dimension_count");
  }
  expect_refused(with([](GgufBuilder *f) { f->key("llama.rope.scaling.type", "yarn"); }),
                 Status::kModelMalformed, "llama.rope.scaling.factor");
}

TEST(ModelConfig, AFlagReplacesAKey) {
  ModelOverrides overrides;
  overrides.rope_freq_base = 1234;
  overrides.context_length = 2048;
  const Model model = Fixture().open(overrides);
  EXPECT_EQ(model.config().rope.freq_base, 1234);
  EXPECT_EQ(model.config().context_length, 2048);
}

TEST(ModelConfig, MaxSeqLenBeyondTheContextNeedsAFlag) {
  ModelConfig config;
  config.context_length = 512;
  EXPECT_EQ(resolve_max_seq_len(config, 0, false), 512);
  EXPECT_EQ(resolve_max_seq_len(config, 100, false), 100);
  EXPECT_EQ(resolve_max_seq_len(config, 513, true), 513);
  for (const int wrong : {513, -1, kMaxRopePositions + 1}) {
    EXPECT_THROW(resolve_max_seq_len(config, wrong, false), Error) << wrong;
  }
  EXPECT_THROW(resolve_max_seq_len(config, kMaxRopePositions + 1, true), Error);
}

// ---- tensors ----

constexpr auto kF32 = static_cast<uint32_t>(DType::kF32);

TEST(Weights, EveryRequiredTensorIsNamedWhenMissing) {
  for (const char *arch : {"llama", "qwen2", "qwen3"}) {
    std::vector<std::string> names = {"token_embd.weight", "output_norm.weight",
                                      "blk.1.attn_k.weight", "blk.0.ffn_down.weight"};
    if (std::string(arch) == "qwen2") names.emplace_back("blk.1.attn_v.bias");
    if (std::string(arch) == "qwen3") names.emplace_back("blk.0.attn_k_norm.weight");
    for (const std::string &name : names) {
      Fixture fixture;
      fixture.arch = arch;
      fixture.without = {name};
      expect_refused(fixture, Status::kModelMalformed, name);
    }
  }
}

TEST(Weights, ATensorWithoutAPlaceIsRefusedByName) {
  for (const char *name :
       {"blk.0.attn_extra.weight", "blk.2.attn_norm.weight", "blk.00.attn_q.bias",
        "blk.0.attn_q_norm.weight", "output.bias", "blk..attn_q.bias", "blk.0."}) {
    expect_refused(with([&](GgufBuilder *file) { file->tensor(name, {32}, kF32, 128); }),
                   Status::kModelUnsupported, name);
  }
}

TEST(Weights, BiasesAreTakenWhereverPresent) {
  const Model model = with([](GgufBuilder *file) {
                        file->tensor("blk.1.attn_k.bias", {16}, kF32, 64);
                        file->tensor("blk.0.attn_output.bias", {32}, kF32, 128);
                      }).open();
  EXPECT_TRUE(model.tensors().layers[1].k_bias);
  EXPECT_FALSE(model.tensors().layers[0].k_bias);
  EXPECT_TRUE(model.tensors().layers[0].o_bias);
}

TEST(Weights, AHeadOfItsOwnIsUsed) {
  const Model tied = Fixture().open();
  EXPECT_TRUE(tied.has_tied_head());
  EXPECT_EQ(tied.tensors().head.data, tied.tensors().embedding.data);
  const Model untied = with([](GgufBuilder *file) {
                         file->tensor("output.weight", {32, 48}, kF32, 32 * 48 * 4);
                       }).open();
  EXPECT_FALSE(untied.has_tied_head());
  EXPECT_NE(untied.tensors().head.data, untied.tensors().embedding.data);
}

TEST(Weights, RopeDivisorsMustFitAndBePositive) {
  // The builder's byte pattern is no positive float for every element; the size is wrong as well.
  expect_refused(with([](GgufBuilder *file) { file->tensor("rope_freqs.weight", {8}, kF32, 32); }),
                 Status::kModelMalformed, "rope_freqs.weight");
}

TEST(Weights, MoreTokensThanRowsAreRefused) {
  expect_refused(with([](GgufBuilder *file) {
                   file->array("tokenizer.ggml.tokens", std::vector<std::string>(49, "x"));
                 }),
                 Status::kModelMalformed, "tokenizer.ggml.tokens");
}

TEST(Weights, AShapeThatContradictsTheKeysIsRefusedByTensor) {
  Fixture fixture;
  fixture.without = {"blk.1.attn_q.weight"};
  fixture.extra = [](GgufBuilder *file) {
    file->tensor("blk.1.attn_q.weight", {32, 24}, kF32, 32 * 24 * 4);
  };
  expect_refused(fixture, Status::kModelMalformed, "blk.1.attn_q.weight");
}

TEST(Model, CountsItsParametersAndTypes) {
  const Model model = Fixture().open();
  ASSERT_EQ(model.tensor_types().size(), 1u);
  EXPECT_EQ(model.tensor_types()[0].num_tensors, 20);
  EXPECT_EQ(model.num_parameters(),
            48u * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32));
}

// ---- rotation ----

RopeParams rope_params(int dim, double base) {
  RopeParams params;
  params.rotary_dim = dim;
  params.freq_base = base;
  return params;
}

TEST(Rope, FrequenciesFollowThePapers) {
  RopeParams params = rope_params(8, 10000);
  std::vector<double> plain = rope_frequencies(params);
  const double expected[] = {1, 0.1, 0.01, 0.001};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(plain[static_cast<size_t>(i)], expected[i], 1e-15);

  params.divisors = {1, 2, 4, 8};
  EXPECT_NEAR(rope_frequencies(params)[3], 0.001 / 8, 1e-15);
  params.scaling = RopeScaling::kLinear;
  params.factor = 4;
  EXPECT_NEAR(rope_frequencies(params)[0], 0.25, 1e-15);
  EXPECT_EQ(rope_magnitude(params), 1);
}

TEST(Rope, YarnKeepsFastPairsAndInterpolatesSlowOnes) {
  RopeParams params = rope_params(64, 10000);
  const std::vector<double> plain = rope_frequencies(params);
  params.scaling = RopeScaling::kYarn;
  params.factor = 8;
  params.original_context = 2048;
  const std::vector<double> scaled = rope_frequencies(params);
  // 2048 positions hold 32 turns at pair 8.04 and 1 turn at pair 20.08: kept up to 8, interpolated
  // from 21.
  EXPECT_EQ(scaled[0], plain[0]);
  EXPECT_EQ(scaled[8], plain[8]);
  EXPECT_LT(scaled[9], plain[9]);
  EXPECT_GT(scaled[20], plain[20] / 8);
  EXPECT_DOUBLE_EQ(scaled[21], plain[21] / 8);
  EXPECT_DOUBLE_EQ(scaled[31], plain[31] / 8);
  EXPECT_DOUBLE_EQ(rope_magnitude(params), 1 + 0.1 * std::log(8.0));
}

TEST(Rope, TheProductOfTheTablesIsTheRotationAtEveryPosition) {
  RopeParams params = rope_params(64, 1e6);
  params.attention_factor = 1.25;
  const RopeTables tables = make_rope_tables(params, kMaxRopePositions);
  const std::vector<double> frequencies = rope_frequencies(params);
  for (const int position : {0, 1, 511, 512, 513, 40000, 131071, kMaxRopePositions - 1}) {
    for (size_t pair = 0; pair < 32; ++pair) {
      const float *coarse = &tables.coarse[(static_cast<size_t>(position / 512) * 32 + pair) * 2];
      const float *fine = &tables.fine[(static_cast<size_t>(position % 512) * 32 + pair) * 2];
      const double angle = position * frequencies[pair];
      EXPECT_NEAR(coarse[0] * fine[0] - coarse[1] * fine[1], 1.25 * std::cos(angle), 4e-7);
      EXPECT_NEAR(coarse[1] * fine[0] + coarse[0] * fine[1], 1.25 * std::sin(angle), 4e-7);
    }
  }
}

TEST(Rope, TablesGrowWithPositionsAndStopAtAQuarterMegabyte) {
  const RopeParams params = rope_params(64, 1e4);
  EXPECT_EQ(make_rope_tables(params, 1).coarse.size(), 64u);
  EXPECT_EQ(make_rope_tables(params, 513).coarse.size(), 128u);
  const RopeTables all = make_rope_tables(params, kMaxRopePositions);
  EXPECT_EQ(all.coarse.size() * sizeof(float), 512u * 64 * 4);
  const RopeTables some = make_rope_tables(params, 2000);
  EXPECT_TRUE(std::equal(some.coarse.begin(), some.coarse.end(), all.coarse.begin()));
}

// ---- batches ----

TEST(TokenPath, OnlyCompleteSegmentsOfThePromptTakeTheirOwnPath) {
  EXPECT_EQ(token_path(0, 0, 127), TokenPath::kInteger);
  EXPECT_EQ(token_path(0, 0, 128), TokenPath::kSegment);
  EXPECT_EQ(token_path(127, 0, 130), TokenPath::kSegment);
  EXPECT_EQ(token_path(128, 0, 130), TokenPath::kInteger);  // the tail
  EXPECT_EQ(token_path(300, 0, 130), TokenPath::kInteger);  // generated
  EXPECT_EQ(token_path(50, 50, 128), TokenPath::kSegment);  // appended to a slot
  EXPECT_EQ(token_path(178, 50, 128), TokenPath::kInteger);
  EXPECT_EQ(token_path(49, 50, 128), TokenPath::kInteger);
}

TEST(BatchBuilder, LaysSequencesOutOneAfterAnother) {
  BlockTable a(4);
  for (const int32_t block : {5, 2, 9}) a.append(block);
  BlockTable b(4);
  b.append(1);
  const std::vector<int32_t> prompt = {10, 11, 12};
  const std::vector<int32_t> token = {ForwardBatch::kSampledOnDevice};
  SequenceStep first;
  first.token_ids = prompt;
  first.first_position = 3;
  first.prompt_len = 6;
  first.blocks = &a;
  first.sampler_row = 7;
  first.num_logits = 2;
  SequenceStep second;
  second.token_ids = token;
  second.first_position = 2;
  second.blocks = &b;
  second.num_logits = 1;

  BatchBuilder builder;
  for (int round = 0; round < 2; ++round) {  // a builder is used again and again
    builder.clear();
    EXPECT_EQ(builder.add(first), 0);
    EXPECT_EQ(builder.add(second), 2);
    const ForwardBatch &batch = builder.finish();
    using Ints = std::vector<int32_t>;
    EXPECT_EQ(batch.token_ids, (Ints{10, 11, 12, -1}));
    EXPECT_EQ(batch.positions, (Ints{3, 4, 5, 2}));
    EXPECT_EQ(batch.seq_index, (Ints{0, 0, 0, 1}));
    EXPECT_EQ(batch.kv_indices, (std::vector<int64_t>{23, 8, 9, 6}));
    EXPECT_EQ(batch.query_start, (Ints{0, 3, 4}));
    EXPECT_EQ(batch.context_len, (Ints{6, 3}));
    EXPECT_EQ(batch.sampler_row, (Ints{7, 0}));
    EXPECT_EQ(batch.max_blocks, 2);  // block 9 lies beyond this context
    EXPECT_EQ(batch.block_tables, (Ints{5, 2, 1, -1}));
    EXPECT_EQ(batch.logit_rows, (Ints{1, 2, 3}));
  }
}

// ---- plan and forward, on a device that only takes notes ----

TEST(Plan, SumsWhatCreationNeeds) {
  const Model model = Fixture().open();
  NotingBackend device;
  device.needs = {1000, 5000, 200, 30};
  device.bytes = {1 << 20, 1 << 20};
  PlanOptions options;
  options.kv_memory = 100000;
  options.max_slots = 4;
  options.prefill_chunk_tokens = 96;
  const MemoryPlan plan = make_plan(device, model.dims(), model.tensors(), options);
  ASSERT_EQ(plan.sets.size(), 1u);
  const WeightSetPlan &set = plan.sets[0];
  EXPECT_EQ(device.planned_tokens, 100);
  EXPECT_EQ(device.planned_seqs, 4);
  EXPECT_EQ(set.kv_bytes_per_token, 2u * 2 * 2 * 8 * 2);  // layers, K and V, heads, channels, f16
  EXPECT_EQ(set.num_blocks, 12);                          // of 8192 bytes
  EXPECT_EQ(set.pool_bytes, 12u * 8192);
  EXPECT_EQ(plan.bytes_needed, 1000u + 200 + 30 + 12 * 8192);
  EXPECT_TRUE(plan.fits);
  EXPECT_NO_THROW(check_plan(plan));
}

TEST(Plan, AutoTakesAQuarterOnTheCpuAndWhatIsLeftOfNineTenthsOnAGpu) {
  const Model model = Fixture().open();
  NotingBackend device;
  device.needs = {100000, 0, 20000, 3000};
  device.bytes = {10000000, 9500000};
  PlanOptions options;
  MemoryPlan plan = make_plan(device, model.dims(), model.tensors(), options);
  EXPECT_EQ(plan.sets[0].num_blocks, 2500000 / 8192);
  device.note.kind = "cuda";
  plan = make_plan(device, model.dims(), model.tensors(), options);
  EXPECT_EQ(plan.sets[0].num_blocks, (9000000 - 123000) / 8192);
  // A second set, should it ever be asked for, is no part of what creation needs.
  options.dequantized_later = true;
  const uint64_t needed = plan.bytes_needed;
  plan = make_plan(device, model.dims(), model.tensors(), options);
  EXPECT_EQ(plan.bytes_needed, needed);
  EXPECT_EQ(plan.find(WeightForm::kDequantized)->kv_layout.type, KvType::kF32);
  EXPECT_EQ(plan.find(WeightForm::kDequantized)->kv_bytes_per_token, 2u * 2 * 2 * 8 * 4);
}

TEST(Plan, WhatDoesNotFitSaysWhatItNeedsAndWhatToChange) {
  const Model model = Fixture().open();
  NotingBackend device;
  device.needs = {100000, 0, 0, 0};
  device.bytes = {200000, 150000};
  PlanOptions options;
  options.kv_memory = 80000;
  const MemoryPlan plan = make_plan(device, model.dims(), model.tensors(), options);
  EXPECT_FALSE(plan.fits);
  try {
    check_plan(plan);
    FAIL();
  } catch (const Error &error) {
    EXPECT_EQ(error.status(), Status::kMemory);
    EXPECT_EQ(error.details()[0].second, std::to_string(100000 + 9 * 8192));
    EXPECT_EQ(error.details()[1].second, "150000");
    EXPECT_NE(error.details()[2].second.find("kv_memory to at most 50000"), std::string::npos);
  }
  options.kv_memory = 100;
  EXPECT_THROW(make_plan(device, model.dims(), model.tensors(), options), Error);
  options.kv_memory = 80000;
  options.kv_type = KvType::kInt8;  // head size 8
  EXPECT_THROW(make_plan(device, model.dims(), model.tensors(), options), Error);
}

// Two layers of two KV heads of four channels; the second layer has a K bias of this type.
struct BiasedLayers {
  explicit BiasedLayers(DType dtype, std::vector<float> values) : bias(std::move(values)) {
    dims.num_layers = 2;
    dims.num_kv_heads = 2;
    dims.head_dim = 4;
    tensors.layers.resize(2);
    MatrixView &view = tensors.layers[1].k_bias;
    for (const float value : bias) {
      halves.push_back(dtype == DType::kF16 ? float_to_half(value) : float_to_bfloat16(value));
    }
    view.dtype = dtype;
    view.data = dtype == DType::kF32 ? static_cast<const void *>(bias.data()) : halves.data();
    view.rows = 1;
    view.cols = 8;
    view.name = "blk.1.attn_k.bias";
  }
  std::vector<float> bias;
  std::vector<uint16_t> halves;
  ModelDims dims;
  ModelTensors tensors;
};

TEST(KvPrecision, TheLargestBiasIsThatOfAHead) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const BiasedLayers layers(dtype, {1, 1, 1, 1, 0, -16, 0, 0});
    const KBias bias = largest_k_bias(layers.dims, layers.tensors);
    EXPECT_EQ(bias.rms, 8.0f);
    EXPECT_EQ(bias.tensor, "blk.1.attn_k.bias");
    EXPECT_EQ(bias.kv_head, 1);
  }
}

TEST(KvPrecision, Int4IsRefusedWhereABiasTakesItsRange) {
  const KBias large = {2.5f, "blk.1.attn_k.bias", 1};
  EXPECT_NO_THROW(check_kv_precision(KvType::kF16, large));
  EXPECT_NO_THROW(check_kv_precision(KvType::kInt8, large));
  EXPECT_NO_THROW(check_kv_precision(KvType::kInt4, {2.0f, "blk.1.attn_k.bias", 1}));
  EXPECT_NO_THROW(check_kv_precision(KvType::kInt4, {}));
  try {
    check_kv_precision(KvType::kInt4, large);
    FAIL();
  } catch (const Error &error) {
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
    EXPECT_NE(error.message().find("blk.1.attn_k.bias"), std::string::npos);
    EXPECT_NE(error.message().find("int8"), std::string::npos);
    EXPECT_EQ(error.details()[0].second, "kv_type");
  }
}

TEST(KvPrecision, ThePlanRefusesForTheWeightsThatUseTheType) {
  const BiasedLayers layers(DType::kF32, std::vector<float>(8, 5.0f));
  NotingBackend device;
  device.bytes = {1 << 30, 1 << 30};
  ModelDims dims = layers.dims;
  dims.head_dim = 32;
  ModelTensors tensors = layers.tensors;
  const std::vector<float> wide(64, 5.0f);
  tensors.layers[1].k_bias.data = wide.data();
  PlanOptions options;
  options.kv_type = KvType::kInt4;
  EXPECT_THROW(make_plan(device, dims, tensors, options), Error);
  options.kv_type = KvType::kInt8;
  EXPECT_NO_THROW(make_plan(device, dims, tensors, options));
  // The per-slot way keeps f32, whatever was asked for.
  options.kv_type = KvType::kInt4;
  options.raw_at_creation = false;
  options.dequantized_at_creation = true;
  EXPECT_NO_THROW(make_plan(device, dims, tensors, options));
}

TEST(Transformer, RunsTheStagesInOrder) {
  const Model model = Fixture().open();
  NotingBackend device;
  const NotingBackend::NoWeights weights;
  const Transformer transformer(&device, model.dims(), &weights);
  KvView kv;
  kv.layout.num_layers = 2;
  kv.layout.num_kv_heads = 2;
  kv.layout.head_dim = 8;
  kv.layout.block_size = 4;
  kv.num_blocks = 1;
  uint8_t unused = 0;
  kv.base = &unused;
  BlockTable blocks(4);
  blocks.append(0);
  const std::vector<int32_t> ids = {1, 2};
  SequenceStep step;
  step.token_ids = ids;
  step.blocks = &blocks;
  BatchBuilder builder;
  NotingBackend::NoWorkspace workspace;
  for (const bool wants_logits : {true, false}) {
    device.calls.clear();
    builder.clear();
    step.num_logits = wants_logits ? 1 : 0;
    builder.add(step);
    transformer.forward(&workspace, kv, builder.finish());
    EXPECT_EQ(device.calls,
              std::string("step(embed qkv0 attention0 o_proj0 ffn0 qkv1 attention1 o_proj1 ffn1 ") +
                  (wants_logits ? "head )" : ")"));
  }
}

}  // namespace
}  // namespace xllm
