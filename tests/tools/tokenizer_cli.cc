// Encodes texts with the core's tokenizer, for tests/differential: a vocabulary file in, then one
// request after the other on stdin and one answer each on stdout. Everything is little-endian;
// a string is a u32 length and its bytes.
//
//   vocabulary  string model, string pre ("": none), string chat_template,
//               i32 bos eos eot eom (-1: none), i32 add_bos add_eos add_space_prefix (-1: unset),
//               u32 num_tokens, that many strings, i32 types and f32 scores,
//               u32 num_merges, that many strings
//   request     u32 flags (1: add_special, 2: parse_special), string text
//   answer      u32 num_ids, i32 ids, string text of a streaming decode; or u32 2^32 - 1 and the
//               string of an error
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "tokenizer/detokenizer.h"
#include "tokenizer/tokenizer.h"

namespace {

class Reader {
 public:
  explicit Reader(std::string_view data) : data_(data) {}

  template <typename T>
  T number() {
    T value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view string() { return take(number<uint32_t>()); }
  template <typename T>
  std::vector<T> numbers(size_t count) {
    std::vector<T> values(count);
    for (T &value : values) value = number<T>();
    return values;
  }
  std::vector<std::string_view> strings(size_t count) {
    std::vector<std::string_view> values(count);
    for (std::string_view &value : values) value = string();
    return values;
  }

 private:
  std::string_view take(size_t size) {
    if (size > data_.size()) throw xllm::Error(xllm::Status::kIo, "the vocabulary file ends early");
    const std::string_view taken = data_.substr(0, size);
    data_.remove_prefix(size);
    return taken;
  }

  std::string_view data_;
};

std::optional<int32_t> optional_id(int32_t value) {
  return value < 0 ? std::nullopt : std::optional<int32_t>(value);
}

std::optional<bool> optional_flag(int32_t value) {
  return value < 0 ? std::nullopt : std::optional<bool>(value != 0);
}

std::unique_ptr<xllm::Tokenizer> load(const char *path) {
  std::ifstream file(path, std::ios::binary);
  const std::string data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  Reader reader(data);
  xllm::VocabSource source;
  source.model = reader.string();
  const std::string pre(reader.string());
  if (!pre.empty()) source.pre = pre;
  source.chat_template = reader.string();
  source.bos = optional_id(reader.number<int32_t>());
  source.eos = optional_id(reader.number<int32_t>());
  source.eot = optional_id(reader.number<int32_t>());
  source.eom = optional_id(reader.number<int32_t>());
  source.add_bos = optional_flag(reader.number<int32_t>());
  source.add_eos = optional_flag(reader.number<int32_t>());
  source.add_space_prefix = optional_flag(reader.number<int32_t>());
  const auto num_tokens = reader.number<uint32_t>();
  source.tokens = reader.strings(num_tokens);
  const std::vector<int32_t> types = reader.numbers<int32_t>(num_tokens);
  const std::vector<float> scores = reader.numbers<float>(num_tokens);
  source.types = types;
  source.scores = scores;
  source.merges = reader.strings(reader.number<uint32_t>());
  return xllm::Tokenizer::create(source);
}

bool read_number(uint32_t *value) { return std::fread(value, sizeof *value, 1, stdin) == 1; }

void write_number(uint32_t value) { std::fwrite(&value, sizeof value, 1, stdout); }

void write_string(const std::string &text) {
  write_number(static_cast<uint32_t>(text.size()));
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void answer(const xllm::Tokenizer &tokenizer, const std::string &text, uint32_t flags) {
  xllm::EncodeOptions options;
  options.add_special = (flags & 1) != 0;
  options.parse_special = (flags & 2) != 0;
  const std::vector<int32_t> ids = tokenizer.encode(text, options);
  xllm::Detokenizer detokenizer(tokenizer);
  std::string decoded;
  for (const int32_t id : ids) decoded += detokenizer.feed(id);
  decoded += detokenizer.flush();
  write_number(static_cast<uint32_t>(ids.size()));
  std::fwrite(ids.data(), sizeof(int32_t), ids.size(), stdout);
  write_string(decoded);
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: tokenizer_cli VOCABULARY < requests > answers\n");
    return 2;
  }
  try {
    const std::unique_ptr<xllm::Tokenizer> tokenizer = load(argv[1]);
    uint32_t flags = 0;
    uint32_t size = 0;
    while (read_number(&flags) && read_number(&size)) {
      std::string text(size, '\0');
      if (std::fread(text.data(), 1, size, stdin) != size) break;
      try {
        answer(*tokenizer, text, flags);
      } catch (const xllm::Error &error) {
        write_number(~uint32_t{0});
        write_string(error.message());
      }
      std::fflush(stdout);
    }
  } catch (const xllm::Error &error) {
    std::fprintf(stderr, "%s\n", error.message().c_str());
    return 1;
  }
  return 0;
}
