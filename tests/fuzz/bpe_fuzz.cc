// Fuzzes the tokenizer: a vocabulary and a text made of the input's bytes. Whatever they are, the
// vocabulary is built or refused; encoding refuses the text or gives ids of the vocabulary; any ids
// decode to valid UTF-8, the same streamed and at once.
//
// With libFuzzer (clang++ -fsanitize=fuzzer,address,undefined -DXLLM_LIBFUZZER) it is a target as
// any other. Without, `bpe_fuzz [NUMBER]` runs that many inputs drawn from a fixed seed.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "tokenizer/detokenizer.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/unicode.h"
#include "tokenizer_fixture.h"

namespace xllm {
namespace {

// Takes an input apart; zeros once it is used up.
class Input {
 public:
  Input(const uint8_t *data, size_t size) : data_(data), size_(size) {}

  uint8_t byte() { return next_ < size_ ? data_[next_++] : 0; }
  std::string bytes(size_t count) {
    std::string out;
    while (out.size() < count && next_ < size_) out.push_back(static_cast<char>(byte()));
    return out;
  }
  std::string rest() { return bytes(size_ - next_); }

 private:
  const uint8_t *data_;
  size_t size_;
  size_t next_ = 0;
};

constexpr const char *kPreTokenizers[] = {"gpt-2",          "smollm", "falcon",       "llama-bpe",
                                          "qwen2",          "tekken", "deepseek-llm", "deepseek-v3",
                                          "deepseek-coder", "none"};

void require(bool condition, const char *what) {
  if (condition) return;
  std::fprintf(stderr, "bpe_fuzz: %s\n", what);
  std::abort();
}

// A chat template, or what may pass for one: it is scanned for what ends a turn.
std::string make_template(Input *input) {
  static constexpr const char *kParts[] = {"{{ ",       " }}",
                                           "{% ",       " %}",
                                           "{#",        "#}",
                                           "if ",       "elif ",
                                           "else",      "endif",
                                           "for m",     "endfor",
                                           "set x = ",  "'",
                                           "\"",        "\\",
                                           "(",         ")",
                                           "==",        "!=",
                                           "content",   "role",
                                           "'user'",    "'assistant'",
                                           "\n",        "add_generation_prompt",
                                           "eos_token", "<|im_end|>"};
  std::string out;
  for (int left = input->byte() % 24; left > 0; --left) {
    const uint8_t shape = input->byte();
    out += shape < 200 ? kParts[shape % std::size(kParts)] : input->bytes(shape % 5);
  }
  return out;
}

std::unique_ptr<Tokenizer> make_tokenizer(Input *input) {
  const uint8_t kind = input->byte();
  const bool is_sentencepiece = kind % 4 == 0;
  const char *pre = kPreTokenizers[input->byte() % std::size(kPreTokenizers)];
  VocabBuilder builder(is_sentencepiece ? "llama" : "gpt2", pre);
  if (kind % 3 != 0) is_sentencepiece ? builder.add_byte_names() : builder.add_bytes();
  for (int left = input->byte() % 32; left > 0; --left) {
    const uint8_t shape = input->byte();
    const std::string token = input->bytes(shape % 8);
    const auto type = static_cast<TokenType>(input->byte() % 29 % 8);
    builder.add(shape & 64 ? to_alphabet(token) : token, type, static_cast<int8_t>(input->byte()));
  }
  for (int left = input->byte() % 32; left > 0; --left) {
    const uint8_t shape = input->byte();
    if (shape % 16 == 0) {
      builder.add_raw_merge(input->bytes(shape / 16));
    } else {
      builder.add_merge(input->bytes(1 + shape % 2), input->bytes(1 + shape / 2 % 2));
    }
  }
  builder.source.bos = input->byte() % 32;
  builder.source.eos = input->byte();
  const std::string chat_template = make_template(input);
  builder.source.chat_template = chat_template;
  return builder.create();
}

void check_decoding(const Tokenizer &tokenizer, const std::vector<int32_t> &ids) {
  Detokenizer detokenizer(tokenizer);
  std::string streamed;
  for (const int32_t id : ids) {
    const std::string piece = detokenizer.feed(id);
    require(find_invalid_utf8(piece) == piece.size(), "a streamed piece is not valid UTF-8");
    streamed += piece;
  }
  streamed += detokenizer.flush();
  require(streamed == tokenizer.decode(ids), "streamed and whole decoding differ");
}

enum class Outcome { kVocabularyRefused, kTextRefused, kEncoded };

Outcome run(const uint8_t *data, size_t size) {
  Input input(data, size);
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    tokenizer = make_tokenizer(&input);
  } catch (const Error &error) {
    require(
        error.status() == Status::kModelMalformed || error.status() == Status::kModelUnsupported,
        "a vocabulary is refused with another status");
    return Outcome::kVocabularyRefused;
  }
  EncodeOptions options;
  options.parse_special = input.byte() % 2 != 0;
  const std::string text = input.rest();
  const size_t half = text.size() / 2;
  const std::vector<Segment> segments{{std::string_view(text).substr(0, half), true},
                                      {std::string_view(text).substr(half), false}};
  Outcome outcome = Outcome::kEncoded;
  try {
    const std::vector<int32_t> ids = tokenizer->encode(text, options);
    for (const int32_t id : ids) {
      require(id >= 0 && id < tokenizer->vocab_size(), "an id is outside the vocabulary");
    }
    check_decoding(*tokenizer, ids);
    tokenizer->encode_segments(segments);
  } catch (const Error &error) {
    require(error.status() == Status::kInvalidArgument || error.status() == Status::kNoTokenizer,
            "a text is refused with another status");
    outcome = Outcome::kTextRefused;
  }
  std::vector<int32_t> ids;
  for (const char c : text) {
    ids.push_back(static_cast<unsigned char>(c) % tokenizer->vocab_size());
  }
  check_decoding(*tokenizer, ids);
  return outcome;
}

}  // namespace
}  // namespace xllm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  xllm::run(data, size);
  return 0;
}

#ifndef XLLM_LIBFUZZER

namespace xllm {
namespace {

// Mostly letters and marks that meet in merges, some bytes of any value.
std::vector<uint8_t> random_input(uint64_t seed) {
  static constexpr char kCommon[] = "aaaabbcc  <|>'s1\n\r/!";
  std::vector<uint8_t> bytes(1 + philox(seed, 0).value[0] % 400);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const Philox random = philox(seed, i + 1);
    const auto common = static_cast<uint8_t>(kCommon[random.value[1] % (sizeof kCommon - 1)]);
    // The text comes last: there, a byte of any value would mostly refuse it.
    const uint32_t chance = i < bytes.size() / 2 ? 3 : 60;
    bytes[i] = random.value[0] % chance == 0 ? static_cast<uint8_t>(random.value[2]) : common;
  }
  return bytes;
}

}  // namespace
}  // namespace xllm

int main(int argc, char **argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10000;
  uint64_t tally[3] = {};
  for (uint64_t seed = 0; seed < count; ++seed) {
    const std::vector<uint8_t> input = xllm::random_input(seed);
    ++tally[static_cast<size_t>(xllm::run(input.data(), input.size()))];
  }
  std::printf("vocabularies refused %llu, texts refused %llu, encoded %llu\n",
              static_cast<unsigned long long>(tally[0]), static_cast<unsigned long long>(tally[1]),
              static_cast<unsigned long long>(tally[2]));
  return 0;
}

#endif  // XLLM_LIBFUZZER
