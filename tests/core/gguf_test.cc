// The GGUF reader: what it gives for good files, and what it says about bad ones.
#include "gguf/gguf.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "gguf/vocab_arrays.h"
#include "gguf_builder.h"
#include "gguf_exercise.h"

namespace {

// Bytes asked of operator new and not given back, and their highest value, for the tests that hold
// the reader to its memory. Tests here are single-threaded.
size_t live_bytes = 0;
size_t peak_bytes = 0;

}  // namespace

[[gnu::noinline]] void *operator new(size_t size) {
  void *memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  live_bytes += ::malloc_usable_size(memory);
  peak_bytes = std::max(peak_bytes, live_bytes);
  return memory;
}

[[gnu::noinline]] void operator delete(void *memory) noexcept {
  live_bytes -= ::malloc_usable_size(memory);
  std::free(memory);
}

[[gnu::noinline]] void operator delete(void *memory, size_t) noexcept { operator delete(memory); }

namespace xllm {
namespace {

constexpr uint32_t kF32 = 0;
constexpr uint32_t kF16 = 1;
constexpr uint32_t kQ4_1 = 3;
constexpr uint32_t kQ4_K = 12;
constexpr uint64_t kMinusOne = std::numeric_limits<uint64_t>::max();

// Most bytes that `action` held at once beyond what was held before.
template <typename Action>
size_t peak_of(Action action) {
  const size_t before = live_bytes;
  peak_bytes = before;
  action();
  return peak_bytes - before;
}

class GgufTest : public testing::Test {
 protected:
  GgufFile open(const std::string &bytes) { return GgufFile::open(folder_.write("m.gguf", bytes)); }
  GgufFile open(const GgufBuilder &builder) { return open(builder.build()); }

  // Opening `bytes` fails with `status` and a line that names the file, holds every one of `parts`
  // and takes little memory.
  void expect_refused(const std::string &bytes, Status status,
                      const std::vector<std::string> &parts = {}) {
    const std::string path = folder_.write("m.gguf", bytes);
    const size_t peak = peak_of([&] { expect_path_refused(path, status, parts); });
    EXPECT_LE(peak, 4 * bytes.size() + 64 * 1024);
  }
  void expect_refused(const GgufBuilder &builder, Status status,
                      const std::vector<std::string> &parts = {}) {
    expect_refused(builder.build(), status, parts);
  }
  void expect_path_refused(const std::string &path, Status status,
                           const std::vector<std::string> &parts) {
    try {
      GgufFile::open(path);
      ADD_FAILURE() << "opened; expected a refusal";
    } catch (const Error &error) {
      EXPECT_EQ(error.status(), status) << error.message();
      EXPECT_EQ(error.message().find('\n'), std::string::npos) << error.message();
      EXPECT_EQ(error.message().find(folder_.path("")), std::string::npos) << error.message();
      for (const std::string &part : parts) {
        EXPECT_NE(error.message().find(part), std::string::npos)
            << "expected \"" << part << "\" in: " << error.message();
      }
    }
  }

  TempFolder folder_;
};

// Calls `action` and expects Error(kModelMalformed) whose message holds `part`.
template <typename Action>
void expect_malformed(Action action, const std::string &part) {
  try {
    action();
    ADD_FAILURE() << "no error; expected one about " << part;
  } catch (const Error &error) {
    EXPECT_EQ(error.status(), Status::kModelMalformed) << error.message();
    EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
  }
}

GgufBuilder small_model() {
  GgufBuilder builder;
  builder.key("general.architecture", "llama")
      .key("llama.block_count", uint32_t{2})
      .key("llama.rope.freq_base", 10000.0f)
      .key("tokenizer.ggml.add_bos_token", true)
      .array("tokenizer.ggml.tokens", std::vector<std::string>{"a", "",
                                                               "\xc4\xa0"
                                                               "b"})
      .array("tokenizer.ggml.token_type", std::vector<int32_t>{1, 3, 4})
      .array("tokenizer.ggml.scores", std::vector<float>{0.0f, -1.5f, 2.0f})
      .tensor("token_embd.weight", {64, 3}, kQ4_1, 2 * 20 * 3)
      .tensor("output_norm.weight", {5}, kF32, 20)
      .tensor("blk.0.ffn_up.weight", {2, 3}, kF16, 12);
  return builder;
}

// --- good files ---------------------------------------------------------------------------------

TEST_F(GgufTest, reads_keys_and_tensors) {
  const GgufFile file = open(small_model());
  EXPECT_EQ(file.version(), 3u);
  EXPECT_EQ(file.num_shards(), 1u);
  EXPECT_EQ(file.get_string("general.architecture"), "llama");
  EXPECT_EQ(file.get_int("llama.block_count", 1, 100), 2);
  EXPECT_EQ(file.get_float("llama.rope.freq_base", 1, 1e9), 10000.0);
  EXPECT_TRUE(file.get_bool("tokenizer.ggml.add_bos_token", false));
  EXPECT_EQ(file.values().size(), 7u);
  EXPECT_EQ(file.values()[1].key(), "llama.block_count");
  EXPECT_EQ(file.find("llama.block"), nullptr);

  ASSERT_EQ(file.tensors().size(), 3u);
  const GgufTensor *embedding = file.find_tensor("token_embd.weight");
  ASSERT_NE(embedding, nullptr);
  EXPECT_EQ(embedding->dtype, DType::kQ4_1);
  EXPECT_EQ(embedding->size_bytes, 120u);
  EXPECT_EQ(embedding->num_elements(), 192u);
  EXPECT_EQ(static_cast<const uint8_t *>(embedding->data)[5], 16 + 5);
  const MatrixView matrix = embedding->matrix();
  EXPECT_EQ(matrix.rows, 3);
  EXPECT_EQ(matrix.cols, 64);
  EXPECT_EQ(matrix.name, "token_embd.weight");
  EXPECT_EQ(matrix.size_bytes(), 120u);
  const GgufTensor *norm = file.find_tensor("output_norm.weight");
  ASSERT_NE(norm, nullptr);
  EXPECT_EQ(norm->matrix().rows, 1);
  EXPECT_EQ(norm->matrix().cols, 5);
  EXPECT_EQ(static_cast<const uint8_t *>(norm->data)[0], 32);
  EXPECT_EQ(file.find_tensor("output_norm"), nullptr);
}

TEST_F(GgufTest, views_survive_a_move_of_the_file) {
  GgufFile file = open(small_model());
  const GgufValue *value = file.find("general.architecture");
  const GgufTensor *tensor = file.find_tensor("output_norm.weight");
  const GgufFile moved = std::move(file);
  EXPECT_EQ(moved.find("general.architecture"), value);
  EXPECT_EQ(value->as_string(), "llama");
  EXPECT_EQ(static_cast<const uint8_t *>(tensor->data)[0], 32);
}

TEST_F(GgufTest, reads_version_2_and_files_of_keys_alone) {
  GgufBuilder builder = small_model();
  builder.version = 2;
  EXPECT_EQ(open(builder).version(), 2u);
  const GgufFile keys = open(GgufBuilder().key("a", uint8_t{1}));
  EXPECT_EQ(keys.tensors().size(), 0u);
  EXPECT_EQ(keys.get_int("a", 0, 1), 1);
  EXPECT_EQ(open(GgufBuilder()).values().size(), 0u);
}

TEST_F(GgufTest, integers_of_every_type_answer_an_integer_question) {
  const GgufFile file = open(GgufBuilder()
                                 .key("u8", uint8_t{200})
                                 .key("i8", int8_t{-7})
                                 .key("u16", uint16_t{60000})
                                 .key("i16", int16_t{-300})
                                 .key("u32", uint32_t{4000000000})
                                 .key("i32", int32_t{-5})
                                 .key("u64", uint64_t{1} << 62)
                                 .key("i64", int64_t{-9})
                                 .key("huge", kMinusOne)
                                 .key("f32", 2.0f)
                                 .key("f64", 0.1)
                                 .key("bool", true)
                                 .key("str", "2")
                                 .array("one", std::vector<int32_t>{2}));
  EXPECT_EQ(file.find("u8")->as_int(), 200);
  EXPECT_EQ(file.find("i8")->as_int(), -7);
  EXPECT_EQ(file.find("u16")->as_int(), 60000);
  EXPECT_EQ(file.find("i16")->as_int(), -300);
  EXPECT_EQ(file.find("u32")->as_int(), 4000000000);
  EXPECT_EQ(file.find("i32")->as_int(), -5);
  EXPECT_EQ(file.find("u64")->as_int(), int64_t{1} << 62);
  EXPECT_EQ(file.find("i64")->as_int(), -9);
  for (const char *key : {"huge", "f32", "f64", "bool", "str", "one"}) {
    expect_malformed([&] { file.find(key)->as_int(); }, key);
  }
  expect_malformed([&] { file.get_int("u8", 0, 199); }, "[0, 199], found 200");
  expect_malformed([&] { file.get_int("i8", -6, 0); }, "found -7");
  expect_malformed([&] { file.get_int("huge", 0, 5); }, "18446744073709551615");
  expect_malformed([&] { file.get_int("absent", 0, 5); }, "m.gguf: absent: the key is missing");
  EXPECT_EQ(file.get_int("absent", 0, 5, 17), 17);
  expect_malformed([&] { file.get_int("f32", 0, 5, 1); }, "found f32 2");

  EXPECT_EQ(file.find("f64")->as_float(), 0.1);
  EXPECT_EQ(file.find("u16")->as_float(), 60000.0);
  expect_malformed([&] { file.find("str")->as_float(); }, "expected a number, found str \"2\"");
  expect_malformed([&] { file.find("u8")->as_bool(); }, "expected a bool");
  expect_malformed([&] { file.find("u8")->as_string(); }, "expected a string");
}

TEST_F(GgufTest, floats_must_be_finite_and_in_range) {
  const GgufFile file =
      open(GgufBuilder()
               .key("nan", std::numeric_limits<float>::quiet_NaN())
               .key("inf", std::numeric_limits<double>::infinity())
               .key("x", 0.5f)
               .array("nans", std::vector<float>{1, std::numeric_limits<float>::quiet_NaN()}));
  expect_malformed([&] { file.find("nan")->as_float(); }, "NaN");
  expect_malformed([&] { file.find("inf")->as_float(); }, "Infinity");
  expect_malformed([&] { file.get_float("x", 1, 2); }, "[1, 2], found 0.5");
  expect_malformed([&] { file.find("nans")->as_floats(); }, "element 1");
}

TEST_F(GgufTest, arrays_are_views_and_scalars_are_arrays_of_one) {
  const GgufFile file =
      open(GgufBuilder()
               .array("odd", std::vector<uint8_t>{1, 2, 3})
               .array("ints", std::vector<int64_t>{-1, 5, std::numeric_limits<int64_t>::max()})
               .array("wide", std::vector<uint64_t>{1, kMinusOne})
               .array("floats", std::vector<double>{0.25, -2})
               .array("none", std::vector<std::string>{})
               .key("five", uint16_t{5})
               .array("strings", std::vector<std::string>{"", std::string("a\0b", 3), "c"}));
  const GgufInts ints = file.find("ints")->as_ints(-1);
  ASSERT_EQ(ints.size(), 3u);
  EXPECT_EQ(ints[0], -1);
  EXPECT_EQ(ints[2], std::numeric_limits<int64_t>::max());
  expect_malformed([&] { file.find("ints")->as_ints(0); }, "element 0");
  expect_malformed([&] { file.find("wide")->as_ints(); }, "18446744073709551615");
  EXPECT_EQ(file.find("odd")->as_ints(1, 3)[2], 3);
  EXPECT_EQ(file.find("five")->as_ints()[0], 5);
  EXPECT_EQ(file.find("five")->as_ints().size(), 1u);
  EXPECT_EQ(file.find("floats")->as_floats()[1], -2.0);
  expect_malformed([&] { file.find("floats")->as_ints(); }, "found 2 x arr[f64]");
  expect_malformed([&] { file.find("ints")->as_floats(); }, "expected floats");
  const GgufStrings strings = file.find("strings")->as_strings();
  ASSERT_EQ(strings.size(), 3u);
  EXPECT_EQ(strings[0], "");
  EXPECT_EQ(strings[1], std::string_view("a\0b", 3));
  EXPECT_EQ(strings[2], "c");
  EXPECT_TRUE(file.find("none")->as_strings().empty());
  expect_malformed([&] { file.find("ints")->as_strings(); }, "expected an array of strings");
}

TEST_F(GgufTest, values_render_as_json) {
  const GgufFile file = open(GgufBuilder()
                                 .key("str", "q\"\\\n\x01\x7f\xc3\xa9\xff.")
                                 .key("f32", 0.1f)
                                 .key("big", kMinusOne)
                                 .key("no", false)
                                 .key("inf", -std::numeric_limits<float>::infinity())
                                 .array("many", std::vector<int8_t>{-1, 2, 3, 4})
                                 .array("names", std::vector<std::string>{"x", "y", "z"})
                                 .key_raw("nested", Bytes()
                                                        .type(GgufType::kArray)
                                                        .type(GgufType::kArray)
                                                        .u64(2)
                                                        .type(GgufType::kBool)
                                                        .u64(2)
                                                        .number(true)
                                                        .number(false)
                                                        .type(GgufType::kString)
                                                        .u64(1)
                                                        .string("s")
                                                        .text())
                                 .key("last", uint8_t{9}));
  EXPECT_EQ(file.find("str")->to_json(), "\"q\\\"\\\\\\n\\u0001\\u007f\xc3\xa9\xef\xbf\xbd.\"");
  EXPECT_EQ(file.find("str")->to_json(0, 7), "\"q\\\"\\\\\\n\\u0001\\u007f\xe2\x80\xa6\"");
  EXPECT_EQ(file.find("f32")->to_json(), "0.1");
  EXPECT_EQ(file.find("big")->to_json(), "18446744073709551615");
  EXPECT_EQ(file.find("no")->to_json(), "false");
  EXPECT_EQ(file.find("inf")->to_json(), "\"-Infinity\"");
  EXPECT_EQ(file.find("many")->to_json(2), "[-1, 2]");
  EXPECT_EQ(file.find("many")->num_elements(), 4u);
  EXPECT_EQ(file.find("many")->type_name(), "arr[i8]");
  EXPECT_EQ(file.find("names")->to_json(), "[\"x\", \"y\", \"z\"]");
  EXPECT_EQ(file.find("nested")->to_json(), "[[true, false], [\"s\"]]");
  EXPECT_EQ(file.find("nested")->to_json(1), "[[true]]");
  EXPECT_EQ(file.get_int("last", 0, 9), 9);
}

TEST_F(GgufTest, alignment_of_the_file_is_followed) {
  GgufBuilder builder;
  builder.alignment = 64;
  builder.key("general.alignment", uint32_t{64})
      .tensor("a", {1}, kF32, 4)
      .tensor("b", {1}, kF32, 4);
  const GgufFile file = open(builder);
  EXPECT_EQ(file.tensors()[1].byte_offset % 64, 0u);
  EXPECT_EQ(static_cast<const uint8_t *>(file.tensors()[1].data)[0], 32);
}

// --- files cut short, counts and lengths --------------------------------------------------------

TEST_F(GgufTest, every_prefix_is_truncated) {
  const std::string whole = small_model().build();
  EXPECT_NO_THROW(open(whole));
  for (size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE(size);
    expect_refused(whole.substr(0, size), Status::kModelTruncated, {"m.gguf: ", "(byte "});
  }
}

TEST_F(GgufTest, other_files_and_versions_are_refused_by_name) {
  expect_refused("GGML with something behind it", Status::kModelMalformed, {"GGML", "(byte 0)"});
  expect_refused("PK\n\x03", Status::kModelMalformed, {"PK\\x0a\\x03"});
  GgufBuilder builder = small_model();
  for (const uint32_t version : {0u, 1u, 4u, 77u}) {
    builder.version = version;
    expect_refused(builder, Status::kModelUnsupported,
                   {"version " + std::to_string(version), "(byte 4)"});
  }
  builder.version = 3u << 24;
  expect_refused(builder, Status::kModelUnsupported, {"big-endian"});
}

TEST_F(GgufTest, impossible_counts_are_refused_before_allocating) {
  for (const uint64_t count : {kMinusOne >> 1, kMinusOne, uint64_t{1} << 32}) {
    GgufBuilder tensors = small_model();
    tensors.num_tensors = count;
    expect_refused(tensors, Status::kModelMalformed, {std::to_string(count), "(byte 8)"});
    GgufBuilder keys = small_model();
    keys.num_keys = count;
    expect_refused(keys, Status::kModelMalformed, {std::to_string(count), "(byte 16)"});
  }
  // Possible as a number, but more than the file could hold.
  GgufBuilder tensors = small_model();
  tensors.num_tensors = 1u << 20;
  expect_refused(tensors, Status::kModelTruncated, {"tensor table"});
  GgufBuilder keys = small_model();
  keys.num_keys = 1u << 20;
  expect_refused(keys, Status::kModelTruncated, {"metadata"});
}

TEST_F(GgufTest, string_lengths_are_compared_with_the_rest_of_the_file) {
  for (const uint64_t length : {kMinusOne, kMinusOne - 7, uint64_t{1} << 63}) {
    const std::string bytes = Bytes().type(GgufType::kString).u64(length).raw("abc").text();
    expect_refused(GgufBuilder().key_raw("k.s", bytes), Status::kModelMalformed, {"k.s"});
  }
  const std::string longer = Bytes().type(GgufType::kString).u64(4).raw("abc").text();
  expect_refused(GgufBuilder().key_raw("k.s", longer), Status::kModelTruncated, {"k.s"});
  const std::string in_array =
      Bytes().type(GgufType::kArray).type(GgufType::kString).u64(1).u64(4).raw("abc").text();
  expect_refused(GgufBuilder().key_raw("k.a", in_array), Status::kModelTruncated, {"k.a"});
  // A key, and a tensor's name.
  expect_refused(Bytes().raw("GGUF").u32(3).u64(0).u64(1).u64(kMinusOne).raw("abcdefghi").text(),
                 Status::kModelMalformed);
  expect_refused(Bytes().raw("GGUF").u32(3).u64(1).u64(0).u64(40).raw(std::string(39, 'x')).text(),
                 Status::kModelTruncated);
}

TEST_F(GgufTest, array_counts_are_compared_with_the_rest_of_the_file) {
  for (const GgufType element : {GgufType::kUint8, GgufType::kBool, GgufType::kFloat64,
                                 GgufType::kString, GgufType::kArray}) {
    for (const uint64_t count : {kMinusOne, (kMinusOne >> 3) + 1, kMinusOne / 12 + 1}) {
      const std::string bytes =
          Bytes().type(GgufType::kArray).type(element).u64(count).raw("abcdefghijkl").text();
      const bool is_possible = count <= kMinusOne >> 1;
      expect_refused(GgufBuilder().key_raw("k.a", bytes),
                     is_possible ? Status::kModelTruncated : Status::kModelMalformed, {"k.a"});
    }
  }
}

TEST_F(GgufTest, names_have_a_length) {
  expect_refused(GgufBuilder().key("", uint8_t{1}).key("kk", uint8_t{1}), Status::kModelMalformed,
                 {"(byte 24)"});
  EXPECT_NO_THROW(open(GgufBuilder().key(std::string(65535, 'k'), uint8_t{1})));
  expect_refused(GgufBuilder().key(std::string(65536, 'k'), uint8_t{1}), Status::kModelMalformed);
  EXPECT_NO_THROW(open(GgufBuilder().tensor(std::string(64, 't'), {1}, kF32, 4)));
  expect_refused(GgufBuilder().tensor(std::string(65, 't'), {1}, kF32, 4), Status::kModelMalformed);
  expect_refused(GgufBuilder().tensor("", {1}, kF32, 4), Status::kModelMalformed);
}

TEST_F(GgufTest, messages_stay_on_one_line_whatever_the_key) {
  expect_refused(GgufBuilder().key_raw("a\nb\xff", Bytes().u32(99).text()),
                 Status::kModelUnsupported, {"a\\x0ab\\xff", "value type 99"});
}

TEST_F(GgufTest, memory_follows_the_metadata) {
  GgufBuilder keys;
  for (int i = 0; i < 100000; ++i) {
    char name[8];
    std::snprintf(name, sizeof name, "%x", i);
    keys.key(name, uint8_t{1});
  }
  GgufBuilder tensors;
  for (int i = 0; i < 50000; ++i) {
    char name[8];
    std::snprintf(name, sizeof name, "%x", i);
    tensors.tensor_raw(name, {1}, kF32, static_cast<uint64_t>(i) * 32);
  }
  tensors.num_keys = 0;
  const std::string data(50000 * 32, '\0');
  const std::string empty_strings = Bytes()
                                        .type(GgufType::kArray)
                                        .type(GgufType::kString)
                                        .u64(500000)
                                        .raw(std::string(500000 * 8, '\0'))
                                        .text();
  std::string with_data = tensors.build();
  with_data.resize((with_data.size() + 31) / 32 * 32);
  for (const std::string &bytes :
       {keys.build(), with_data + data, GgufBuilder().key_raw("s", empty_strings).build()}) {
    const std::string path = folder_.write("m.gguf", bytes);
    uint64_t metadata = 0;
    const size_t peak = peak_of([&] {
      const GgufFile file = GgufFile::open(path);
      metadata = file.metadata_bytes();
      if (const GgufValue *strings = file.find("s")) {
        EXPECT_EQ(strings->as_strings().size(), 500000u);
      }
    });
    EXPECT_GT(metadata, 1000000u);
    EXPECT_LE(peak, 4 * metadata);
  }
}

// --- tensors ------------------------------------------------------------------------------------

TEST_F(GgufTest, dimensions_that_wrap_round_are_refused) {
  const uint64_t big = (uint64_t{1} << 42) + 1;
  for (const std::vector<uint64_t> &dims : std::vector<std::vector<uint64_t>>{
           {big, uint64_t{1} << 22},
           {uint64_t{1} << 32, uint64_t{1} << 32},
           {uint64_t{1} << 16, uint64_t{1} << 16, uint64_t{1} << 16, uint64_t{1} << 16},
           {kMinusOne},
           {kMinusOne - 31, 2},
           {uint64_t{1} << 63},
           {4, kMinusOne},
           {0},
           {4, 0}}) {
    expect_refused(GgufBuilder().tensor("t.w", dims, kF32, 64), Status::kModelMalformed, {"t.w"});
  }
  // Elements fit 63 bits, bytes do not; and a product that fits but is not there.
  expect_refused(GgufBuilder().tensor("t.w", {uint64_t{1} << 62}, kF32, 64),
                 Status::kModelMalformed, {"t.w", "2^63"});
  expect_refused(GgufBuilder().tensor("t.w", {uint64_t{1} << 60}, kF32, 64),
                 Status::kModelTruncated, {"t.w"});
}

TEST_F(GgufTest, tensors_have_one_to_four_dimensions) {
  EXPECT_EQ(open(GgufBuilder().tensor("t", {1, 2, 1, 2}, kF32, 16)).tensors()[0].num_elements(),
            4u);
  expect_malformed(
      [&] { open(GgufBuilder().tensor("t", {1, 2, 3}, kF32, 24)).tensors()[0].matrix(); },
      "expected a matrix");
  expect_refused(GgufBuilder().tensor("t.w", {1, 1, 1, 1, 1}, kF32, 4), Status::kModelMalformed,
                 {"t.w", "found 5"});
  expect_refused(GgufBuilder().tensor("t.w", {}, kF32, 4), Status::kModelMalformed, {"t.w"});
  const std::string many =
      Bytes().raw("GGUF").u32(3).u64(1).u64(0).string("t.w").u32(0xffffffff).text();
  expect_refused(many + std::string(64, '\1'), Status::kModelMalformed, {"t.w", "4294967295"});
}

TEST_F(GgufTest, alignment_is_a_power_of_two) {
  for (const uint32_t alignment : {0u, 1u, 4u, 24u, 33u, 0x80000000u, 0xffffffffu}) {
    GgufBuilder builder;
    builder.key("general.alignment", alignment).tensor("t", {1}, kF32, 4);
    expect_refused(builder, Status::kModelMalformed,
                   {"general.alignment", std::to_string(alignment), "(byte 53)"});
  }
  GgufBuilder floats;
  floats.key("general.alignment", 32.0f).tensor("t", {1}, kF32, 4);
  expect_refused(floats, Status::kModelMalformed, {"general.alignment", "expected an integer"});
  // Checked also where no tensor needs it.
  expect_refused(GgufBuilder().key("general.alignment", uint32_t{0}), Status::kModelMalformed);
}

TEST_F(GgufTest, names_given_twice_are_refused) {
  expect_refused(GgufBuilder().key("k.x", uint8_t{1}).key("y", uint8_t{1}).key("k.x", uint8_t{1}),
                 Status::kModelMalformed, {"k.x", "twice", "(byte 69)"});
  expect_refused(GgufBuilder()
                     .tensor("t.w", {1}, kF32, 4)
                     .tensor("u", {1}, kF32, 4)
                     .tensor("t.w", {1}, kF32, 4),
                 Status::kModelMalformed, {"t.w", "twice"});
}

TEST_F(GgufTest, data_past_the_end_is_truncated) {
  GgufBuilder beside = small_model();
  beside.tensor_raw("t.w", {16}, kF32, 256);
  expect_refused(beside, Status::kModelTruncated, {"t.w"});
  for (const uint64_t offset : {kMinusOne - 31, uint64_t{1} << 63, (uint64_t{1} << 63) - 32}) {
    GgufBuilder builder = small_model();
    builder.tensor_raw("t.w", {16}, kF32, offset);
    expect_refused(builder, Status::kModelTruncated, {"t.w", std::to_string(offset)});
  }
}

TEST_F(GgufTest, tensors_off_the_alignment_or_overlapping_are_refused) {
  GgufBuilder builder;
  builder.tensor("a", {16}, kF32, 64).tensor_raw("t.w", {1}, kF32, 36);
  expect_refused(builder, Status::kModelMalformed, {"t.w", "multiple of 32"});
  GgufBuilder overlapping;
  overlapping.tensor("a", {16}, kF32, 64).tensor_raw("t.w", {1}, kF32, 32);
  expect_refused(overlapping, Status::kModelMalformed, {"t.w", "overlaps", "a (byte "});
  GgufBuilder same;
  same.tensor("a", {16}, kF32, 64).tensor_raw("t.w", {16}, kF32, 0);
  expect_refused(same, Status::kModelMalformed, {"overlaps"});
}

TEST_F(GgufTest, unknown_types_are_refused_by_name) {
  for (const uint32_t type : {13u, 255u, 0xffffffffu}) {
    expect_refused(GgufBuilder().key_raw("k.x", Bytes().u32(type).u64(0).text()),
                   Status::kModelUnsupported, {"k.x", "value type " + std::to_string(type)});
    const std::string array = Bytes().type(GgufType::kArray).u32(type).u64(0).text();
    expect_refused(GgufBuilder().key_raw("k.x", array), Status::kModelUnsupported, {"k.x"});
  }
  for (const uint32_t type : {4u, 99u, 0xffffffffu}) {
    expect_refused(GgufBuilder().tensor("t.w", {256}, type, 1024), Status::kModelUnsupported,
                   {"t.w", "tensor type " + std::to_string(type) + " is unknown"});
  }
  expect_refused(GgufBuilder().tensor("t.w", {256}, 16, 1024), Status::kModelUnsupported,
                 {"t.w", "iq2_xxs"});
}

TEST_F(GgufTest, rows_are_whole_quant_blocks) {
  expect_refused(GgufBuilder().tensor("t.w", {33, 32}, kQ4_1, 1024), Status::kModelMalformed,
                 {"t.w", "q4_1", "33"});
  expect_refused(GgufBuilder().tensor("t.w", {128, 2}, kQ4_K, 144), Status::kModelMalformed,
                 {"t.w", "q4_k", "256"});
}

// --- values -------------------------------------------------------------------------------------

TEST_F(GgufTest, a_bool_is_0_or_1) {
  const std::string two = Bytes().type(GgufType::kBool).number(uint8_t{2}).text();
  expect_refused(GgufBuilder().key_raw("k.b", two), Status::kModelMalformed, {"k.b", "found 2"});
  const std::string array =
      Bytes().type(GgufType::kArray).type(GgufType::kBool).u64(3).raw("\1\1\3").text();
  expect_refused(GgufBuilder().key_raw("k.b", array), Status::kModelMalformed, {"k.b", "found 3"});
}

TEST_F(GgufTest, arrays_nest_four_deep) {
  const auto nested = [](int depth) {
    Bytes bytes;
    bytes.type(GgufType::kArray);
    for (int i = 1; i < depth; ++i) bytes.type(GgufType::kArray).u64(1);
    return GgufBuilder().key_raw("k.n", bytes.type(GgufType::kUint8).u64(1).raw("\7").text());
  };
  EXPECT_EQ(open(nested(4)).find("k.n")->to_json(), "[[[[7]]]]");
  expect_refused(nested(5), Status::kModelMalformed, {"k.n", "nested"});
  expect_refused(nested(100000), Status::kModelMalformed, {"k.n", "nested"});
}

TEST_F(GgufTest, layer_counts_are_integers_in_range) {
  const auto count = [&](const GgufBuilder &builder) {
    return open(builder).get_int("llama.block_count", 1, 4096);
  };
  EXPECT_EQ(count(GgufBuilder().key("llama.block_count", int64_t{30})), 30);
  for (const uint32_t wrong : {0u, 1000000000u, 0xffffffffu}) {
    expect_malformed([&] { count(GgufBuilder().key("llama.block_count", wrong)); },
                     "llama.block_count (byte 53): expected an integer in [1, 4096], found " +
                         std::to_string(wrong));
  }
  expect_malformed([&] { count(GgufBuilder().key("llama.block_count", 2.0f)); },
                   "expected an integer, found f32 2");
  expect_malformed([&] { count(GgufBuilder()); }, "llama.block_count");
}

TEST_F(GgufTest, vocabulary_arrays_agree) {
  const VocabArrays arrays = read_vocab_arrays(open(small_model()));
  ASSERT_EQ(arrays.tokens.size(), 3u);
  EXPECT_EQ(arrays.types, (std::vector<int32_t>{1, 3, 4}));
  EXPECT_EQ(arrays.scores, (std::vector<float>{0.0f, -1.5f, 2.0f}));
  EXPECT_TRUE(arrays.merges.empty());
  EXPECT_TRUE(read_vocab_arrays(open(GgufBuilder())).tokens.empty());

  const std::vector<std::string> tokens{"a", "b", "c"};
  const auto expect_wrong = [&](GgufBuilder builder, const std::string &part) {
    expect_malformed([&] { read_vocab_arrays(open(builder)); }, part);
  };
  const auto with_tokens = [&] { return GgufBuilder().array("tokenizer.ggml.tokens", tokens); };
  const std::string types = "tokenizer.ggml.token_type";
  const std::string scores = "tokenizer.ggml.scores";
  expect_wrong(with_tokens().array(types, std::vector<uint8_t>{1, 1, 1}), types);
  expect_wrong(with_tokens().array(types, std::vector<int32_t>{1, 1}), "found 2 x arr[i32]");
  expect_wrong(with_tokens().array(types, std::vector<int32_t>{1, 1, 1, 1}), types);
  expect_wrong(with_tokens().array(scores, std::vector<uint8_t>{1, 1, 1}), scores);
  expect_wrong(with_tokens().array(scores, std::vector<float>{1, 1}), scores);
  expect_wrong(with_tokens().array(
                   scores, std::vector<float>{1, 1, std::numeric_limits<float>::quiet_NaN()}),
               scores);
  expect_wrong(with_tokens().key(types, int32_t{1}), types);
  expect_wrong(GgufBuilder().array("tokenizer.ggml.tokens", std::vector<int32_t>{1, 2, 3}),
               "expected an array of strings");
  expect_wrong(with_tokens().array("tokenizer.ggml.merges", std::vector<uint8_t>{1}), "merges");
  expect_wrong(GgufBuilder().array(types, std::vector<int32_t>{1}), types);
}

// --- split models -------------------------------------------------------------------------------

GgufBuilder part(uint16_t number, uint16_t count) {
  GgufBuilder builder;
  builder.key("split.no", number).key("split.count", count).key("split.tensors.count", int32_t{2});
  if (number == 0) builder.key("general.architecture", "llama");
  builder.tensor(number == 0 ? "a" : "b", {2}, kF32, 8);
  return builder;
}

TEST_F(GgufTest, split_models_open_at_the_first_part) {
  const std::string first = folder_.write("s-00001-of-00002.gguf", part(0, 2).build());
  const std::string second = folder_.write("s-00002-of-00002.gguf", part(1, 2).build());
  const GgufFile file = GgufFile::open(first);
  EXPECT_EQ(file.num_shards(), 2u);
  ASSERT_EQ(file.tensors().size(), 2u);
  const GgufTensor *tensor = file.find_tensor("b");
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->shard, 1u);
  EXPECT_EQ(tensor->data, file.shard(1).data() + tensor->byte_offset);
  EXPECT_EQ(file.get_string("general.architecture"), "llama");
  expect_path_refused(second, Status::kModelMalformed,
                      {"s-00002-of-00002.gguf", "open s-00001-of-00002.gguf"});
}

TEST_F(GgufTest, a_missing_part_is_named) {
  const std::string first = folder_.write("s-00001-of-00003.gguf", part(0, 3).build());
  folder_.write("s-00002-of-00003.gguf", part(1, 3).build());
  expect_path_refused(first, Status::kNotFound, {"s-00003-of-00003.gguf", "part 3 of 3"});
}

TEST_F(GgufTest, parts_must_agree) {
  const std::string renamed = folder_.write("s.gguf", part(0, 2).build());
  expect_path_refused(renamed, Status::kModelMalformed, {"s.gguf", "*-00001-of-00002.gguf"});

  const std::string first = folder_.write("s-00001-of-00002.gguf", part(0, 2).build());
  const auto expect_second = [&](const GgufBuilder &builder, Status status,
                                 const std::vector<std::string> &parts) {
    folder_.write("s-00002-of-00002.gguf", builder.build());
    expect_path_refused(first, status, parts);
  };
  expect_second(part(0, 2), Status::kModelMalformed, {"s-00002-of-00002.gguf", "split.no"});
  expect_second(part(1, 3), Status::kModelMalformed, {"split.count"});
  expect_second(GgufBuilder().tensor("b", {1}, kF32, 4), Status::kModelMalformed, {"split.no"});
  expect_second(part(1, 2).tensor("c", {1}, kF32, 4), Status::kModelMalformed,
                {"split.tensors.count", "found 2"});
  expect_second(part(1, 2).key("llama.block_count", uint32_t{3}), Status::kModelMalformed,
                {"llama.block_count"});
  GgufBuilder twice;
  twice.key("split.no", uint16_t{1}).key("split.count", uint16_t{2}).tensor("a", {1}, kF32, 4);
  expect_second(twice, Status::kModelMalformed, {"s-00002-of-00002.gguf: a", "twice"});
  folder_.write("s-00002-of-00002.gguf", part(1, 2).build().substr(0, 90));
  expect_path_refused(first, Status::kModelTruncated, {"s-00002-of-00002.gguf"});
}

TEST_F(GgufTest, split_counts_are_in_range) {
  for (const uint16_t count : {uint16_t{0}, uint16_t{65535}}) {
    const std::string bytes = part(0, count).build();
    expect_refused(bytes, Status::kModelMalformed);
  }
  expect_refused(GgufBuilder().key("split.count", uint16_t{2}).key("split.no", uint16_t{2}),
                 Status::kModelMalformed, {"split.no"});
}

// --- mutations ----------------------------------------------------------------------------------

TEST_F(GgufTest, random_damage_is_survived) {
  GgufBuilder builder = small_model();
  builder.key("general.alignment", uint32_t{32})
      .key_raw("n", Bytes()
                        .type(GgufType::kArray)
                        .type(GgufType::kArray)
                        .u64(1)
                        .type(GgufType::kString)
                        .u64(1)
                        .string("s")
                        .text());
  const std::string whole = builder.build();
  int num_opened = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    std::string bytes = whole;
    const Philox choice = philox(seed, 0);
    const uint32_t num_changes = 1 + choice.value[0] % 4;
    for (uint32_t i = 0; i < num_changes; ++i) {
      const Philox change = philox(seed, i + 1);
      auto &byte = bytes[change.value[0] % bytes.size()];
      switch (change.value[1] % 3) {
        case 0:
          byte = static_cast<char>(byte ^ (1 << change.value[2] % 8));
          break;
        case 1:
          byte = static_cast<char>(change.value[2]);
          break;
        default:
          byte = static_cast<char>(change.value[2] % 2 == 0 ? 0xff : 0x7f);
      }
    }
    try {
      const GgufFile file = open(bytes);
      ++num_opened;
      EXPECT_GE(read_everything(file), 0u);
    } catch (const Error &error) {
      EXPECT_GE(static_cast<int>(error.status()), static_cast<int>(Status::kNotFound));
      EXPECT_EQ(error.message().find('\n'), std::string::npos) << error.message();
    }
  }
  // The damage falls on text and data too, so both outcomes happen.
  EXPECT_GT(num_opened, 100);
  EXPECT_LT(num_opened, 3900);
}

// --- the mapped file ----------------------------------------------------------------------------

TEST_F(GgufTest, paths_that_are_no_file_are_refused) {
  expect_path_refused(folder_.path("absent.gguf"), Status::kNotFound,
                      {"absent.gguf: No such file"});
  expect_path_refused(folder_.write("f", "x") + "/m.gguf", Status::kNotFound, {"m.gguf"});
  ASSERT_EQ(::mkdir(folder_.path("d.gguf").c_str(), 0700), 0);
  expect_path_refused(folder_.path("d.gguf"), Status::kIo, {"d.gguf: Is a directory"});
  ASSERT_EQ(::mkfifo(folder_.path("p.gguf").c_str(), 0600), 0);
  expect_path_refused(folder_.path("p.gguf"), Status::kIo, {"p.gguf", "regular file"});
  expect_path_refused(std::string("a\0b", 3), Status::kNotFound, {});
}

TEST_F(GgufTest, a_mapped_file_moves) {
  MappedFile file(folder_.write("m", "hello"));
  const uint8_t *data = file.data();
  MappedFile other(folder_.write("n", ""));
  EXPECT_EQ(other.size(), 0u);
  EXPECT_EQ(other.data(), nullptr);
  other = std::move(file);
  EXPECT_EQ(other.data(), data);
  EXPECT_EQ(other.size(), 5u);
  EXPECT_EQ(other.name(), "m");
  EXPECT_EQ(file.data(), nullptr);  // NOLINT(bugprone-use-after-move): that is what is tested
  other.prefetch(0, 100);
  other.prefetch(100, 1);
  EXPECT_EQ(other.data()[4], 'o');
  other.release_pages();
  EXPECT_EQ(other.data()[4], 'o');
  file.release_pages();  // NOLINT(bugprone-use-after-move): nothing to release
}

}  // namespace
}  // namespace xllm
