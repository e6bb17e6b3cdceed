// Tokenizer: ids, bytes and refusals on small vocabularies. The published vocabularies are compared
// by tests/differential.
#include "tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "tokenizer/detokenizer.h"
#include "tokenizer/nfc.h"
#include "tokenizer/pretokenize.h"
#include "tokenizer_fixture.h"

namespace xllm {
namespace {

using Ids = std::vector<int32_t>;
using Pieces = std::vector<std::string>;

Ids ids_of(const std::string &bytes) {
  Ids ids;
  for (const char c : bytes) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

Pieces split(const std::string &name, const std::string &text) {
  const PreTokenizer *pre = find_pre_tokenizer(name);
  if (pre == nullptr) return {"no such pre-tokenizer"};
  Pieces pieces;
  pre->split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

Status status_of(const std::function<void()> &call, std::string *message = nullptr) {
  try {
    call();
  } catch (const Error &error) {
    if (message != nullptr) *message = error.message();
    return error.status();
  }
  return Status::kOk;
}

EncodeOptions plain() {
  EncodeOptions options;
  options.add_special = false;
  return options;
}

// --- pre-tokenizers ------------------------------------------------------------------------------

TEST(PreTokenizer, SmollmTakesEveryNumberByItselfBeforeAnythingElse) {
  EXPECT_EQ(split("smollm", "in 2024, a1"),
            (Pieces{"in", " ", "2", "0", "2", "4", ",", " a", "1"}));
  // The part in front of a digit ends there, so its white space stays together.
  EXPECT_EQ(split("smollm", "a   7"), (Pieces{"a", "   ", "7"}));
  EXPECT_EQ(split("smollm", "x\u00b2\u0663"), (Pieces{"x", "\u00b2", "\u0663"}));
}

TEST(PreTokenizer, Gpt2LeavesTheLastSpaceToTheWord) {
  EXPECT_EQ(split("gpt-2", "a   b"), (Pieces{"a", "  ", " b"}));
  EXPECT_EQ(split("gpt-2", "a\n\nb  "), (Pieces{"a", "\n", "\n", "b", "  "}));
  EXPECT_EQ(split("gpt-2", "12 345"), (Pieces{"12", " 345"}));
}

TEST(PreTokenizer, ContractionsMatchLowerCaseOnlyInGpt2AndAnyCaseInLlama3) {
  EXPECT_EQ(split("gpt-2", "we're WE'RE"), (Pieces{"we", "'re", " WE", "'", "RE"}));
  EXPECT_EQ(split("llama-bpe", "we're WE'RE"), (Pieces{"we", "'re", " WE", "'RE"}));
  EXPECT_EQ(split("qwen2", "she'D x'\u017fy"), (Pieces{"she", "'D", " x", "'\u017f", "y"}));
}

TEST(PreTokenizer, NumbersGoInThreesInLlama3AndSinglyInQwen2) {
  EXPECT_EQ(split("llama-bpe", " 6045331"), (Pieces{" ", "604", "533", "1"}));
  EXPECT_EQ(split("qwen2", " 60"), (Pieces{" ", "6", "0"}));
}

TEST(PreTokenizer, LineBreaksTakeTheSpacesBeforeThem) {
  EXPECT_EQ(split("llama-bpe", "a \n\n  b\n"), (Pieces{"a", " \n\n", " ", " b", "\n"}));
  EXPECT_EQ(split("qwen2", "t\r\n\r\n\tu"), (Pieces{"t", "\r\n\r\n", "\tu"}));
  EXPECT_EQ(split("llama-bpe", "x;\n\ny"), (Pieces{"x", ";\n\n", "y"}));
}

TEST(PreTokenizer, TekkenEndsAWordWhereCaseTurns) {
  EXPECT_EQ(split("tekken", "helloWorld HTMLPage x1"),
            (Pieces{"hello", "World", " HTMLPage", " x", "1"}));
  EXPECT_EQ(split("tekken", "a/b//\n"), (Pieces{"a", "/b", "//\n"}));
}

TEST(PreTokenizer, DeepseekCoderSplitsLinesWordsMarksAndDigits) {
  EXPECT_EQ(split("deepseek-coder", "if x == 42:\n  y"),
            (Pieces{"if", " x", " == ", "4", "2", ":", "\n", " ", " y"}));
}

TEST(PreTokenizer, FalconTakesThreeDigitsAtATime) {
  EXPECT_EQ(split("falcon", "it's 12345!?"), (Pieces{"it", "'", "s", " ", "123", "45", "!?"}));
}

// Every name, on text of every kind: the pieces joined are the text, and none is empty.
TEST(PreTokenizer, PiecesJoinedAreTheText) {
  const std::string fragments[] = {"a",
                                   "Z",
                                   "7",
                                   " ",
                                   "\n",
                                   "\r\n",
                                   "\t",
                                   "'",
                                   "'ll",
                                   "\u00e9",
                                   "\u0301",
                                   "\u4e2d",
                                   "\u3000",
                                   "\u00b2",
                                   "\U0001F600",
                                   "!",
                                   "/",
                                   "\u2028",
                                   std::string(1, '\0'),
                                   "\u00ad"};
  std::mt19937 random(7);
  for (const char *name : {"gpt-2", "smollm", "starcoder", "refact", "phi-2", "falcon", "llama-bpe",
                           "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "tekken",
                           "deepseek-llm", "deepseek-coder", "deepseek-v3"}) {
    for (int round = 0; round < 300; ++round) {
      std::string text;
      for (int i = 0; i < 12; ++i) text += fragments[random() % std::size(fragments)];
      std::string joined;
      for (const std::string &piece : split(name, text)) {
        EXPECT_FALSE(piece.empty()) << name;
        joined += piece;
      }
      ASSERT_EQ(joined, text) << name;
    }
  }
}

// --- normalization -------------------------------------------------------------------------------

TEST(Nfc, ComposesReordersAndKeeps) {
  EXPECT_EQ(to_nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(to_nfc("s\u0307\u0323"), "\u1e69");         // reordered, then composed twice
  EXPECT_EQ(to_nfc("\u1e9b\u0323"), "\u1e9b\u0323");    // no composition with the dot below
  EXPECT_EQ(to_nfc("\u212b \u2126"), "\u00c5 \u03a9");  // singletons
  EXPECT_EQ(to_nfc("\u1100\u1161\u11a8"), "\uac01");    // Hangul
  EXPECT_EQ(to_nfc("\uac00\u11a8"), "\uac01");
  EXPECT_EQ(to_nfc("\u0958"), "\u0915\u093c");  // excluded from composition
  EXPECT_EQ(to_nfc("a\u0301\u0301"), "\u00e1\u0301");
  EXPECT_EQ(to_nfc("\u0344"), "\u0308\u0301");
  EXPECT_EQ(to_nfc("a\u0316\u0323"), "a\u0316\u0323");  // blocked by a mark of the same class
  EXPECT_EQ(to_nfc("plain"), "plain");
}

TEST(Nfc, OnlyQwen2Normalizes) {
  for (const bool is_qwen : {false, true}) {
    VocabBuilder builder("gpt2", is_qwen ? "qwen2" : "llama-bpe");
    builder.add_bytes();
    const auto tokenizer = builder.create();
    EXPECT_EQ(tokenizer->encode("e\u0301", plain()), ids_of(is_qwen ? "\u00e9" : "e\u0301"));
  }
}

// --- byte-pair encoding --------------------------------------------------------------------------

TEST(Bpe, BestRankFirstAndLeftmostAmongEquals) {
  VocabBuilder builder("gpt2", "gpt-2");
  builder.add_bytes();
  const int32_t bc = builder.add_merge("b", "c");
  const int32_t ab = builder.add_merge("a", "b");
  const int32_t aa = builder.add_merge("a", "a");
  const auto tokenizer = builder.create();
  EXPECT_EQ(tokenizer->encode("abc", plain()), (Ids{'a', bc}));
  EXPECT_EQ(tokenizer->encode("ab", plain()), (Ids{ab}));
  EXPECT_EQ(tokenizer->encode("aaa", plain()), (Ids{aa, 'a'}));
}

// The naive definition: again and again the best pair, leftmost first.
Ids merge_naively(const std::string &text, const std::vector<std::pair<Ids, int32_t>> &merges) {
  Ids ids = ids_of(text);
  while (true) {
    bool merged = false;
    for (const auto &[pair, result] : merges) {
      const auto at = std::search(ids.begin(), ids.end(), pair.begin(), pair.end());
      if (at == ids.end()) continue;
      *at = result;
      ids.erase(at + 1);
      merged = true;
      break;
    }
    if (!merged) return ids;
  }
}

TEST(Bpe, ShortAndLongPiecesFollowTheDefinition) {
  std::mt19937 random(11);
  VocabBuilder builder("gpt2", "gpt-2");
  builder.add_bytes();
  std::vector<std::string> symbols{"a", "b", "c", "d"};
  std::vector<int32_t> symbol_ids{'a', 'b', 'c', 'd'};
  std::vector<std::pair<Ids, int32_t>> merges;
  while (merges.size() < 60) {
    const size_t left = random() % symbols.size();
    const size_t right = random() % symbols.size();
    const std::string both = symbols[left] + symbols[right];
    if (both.size() > 9 || std::count(symbols.begin(), symbols.end(), both) != 0) continue;
    const int32_t id = builder.add_merge(symbols[left], symbols[right]);
    merges.push_back({{symbol_ids[left], symbol_ids[right]}, id});
    symbols.push_back(both);
    symbol_ids.push_back(id);
  }
  const auto tokenizer = builder.create();
  for (int round = 0; round < 400; ++round) {
    const size_t size = 1 + random() % (round % 4 == 0 ? 400 : 60);
    std::string text;
    const int num_letters = 1 + round % 4;
    for (size_t i = 0; i < size; ++i) text += static_cast<char>('a' + random() % num_letters);
    ASSERT_EQ(tokenizer->encode(text, plain()), merge_naively(text, merges)) << text;
  }
}

TEST(Bpe, MergesMayPassThroughStringsThatAreNoTokens) {
  VocabBuilder builder("gpt2", "gpt-2");
  builder.add_bytes();
  builder.add_merge_only("x", "y");  // "xy" is no token, "xyz" is
  const int32_t xyz = builder.add_merge("xy", "z");
  const auto tokenizer = builder.create();
  EXPECT_EQ(tokenizer->encode("xyz", plain()), (Ids{xyz}));
  EXPECT_EQ(tokenizer->encode("xyxyz", plain()), (Ids{'x', 'y', xyz}));
}

TEST(Bpe, AMergeNeverMakesAControlToken) {
  VocabBuilder builder("gpt2", "gpt-2");
  builder.add_bytes();
  builder.add("<s>", TokenType::kControl);
  builder.add_merge_only("<", "s");
  builder.add_merge_only("<s", ">");
  const auto tokenizer = builder.create();
  EXPECT_EQ(tokenizer->encode("<s>", plain()), ids_of("<s>"));
}

TEST(Bpe, TheLowestIdOfEqualTokensAndNeverAnUnusedOne) {
  VocabBuilder builder("gpt2", "gpt-2");
  builder.add(to_alphabet("ab"), TokenType::kUnused);
  std::vector<int32_t> byte_ids;
  for (const char c : {'a', 'b'}) byte_ids.push_back(builder.add(std::string(1, c)));
  const int32_t ab = builder.add_merge("a", "b");
  builder.add(to_alphabet("ab"));
  const auto tokenizer = builder.create();
  EXPECT_EQ(tokenizer->encode("ab", plain()), (Ids{ab}));
}

TEST(Bpe, BytesWithoutATokenLeaveNoTrace) {
  VocabBuilder builder("gpt2", "gpt-2");
  const int32_t a = builder.add("a");
  const int32_t b = builder.add("b");
  const int32_t ab = builder.add_merge("a", "b");
  const auto tokenizer = builder.create();
  EXPECT_EQ(tokenizer->encode("b\x04"
                              "a",
                              plain()),
            (Ids{b, a}));
  EXPECT_EQ(tokenizer->encode("aqb", plain()), (Ids{ab}));
}

TEST(Bpe, Llama3TakesAWholeTokenBeforeMerging) {
  for (const char *pre : {"llama-bpe", "tekken", "qwen2"}) {
    VocabBuilder builder("gpt2", pre);
    builder.add_bytes();
    const int32_t word = builder.add("xyz");  // no chain of merges reaches it
    const auto tokenizer = builder.create();
    const bool takes_whole = std::string(pre) != "qwen2";
    EXPECT_EQ(tokenizer->encode("xyz", plain()), takes_whole ? Ids{word} : ids_of("xyz")) << pre;
  }
}

TEST(Bpe, LongRunsNeedNoStackAndKeepEveryByte) {
  for (const char *pre : {"smollm", "llama-bpe", "deepseek-llm"}) {
    VocabBuilder builder("gpt2", pre);
    builder.add_bytes();
    builder.add_merge("a", "a");
    builder.add_merge("aa", "aa");
    builder.add_merge("\n", "\n");
    const auto tokenizer = builder.create();
    for (const char *unit : {"a", "7", " ", "\n", "\u4e2d"}) {
      std::string text;
      while (text.size() < (1 << 18)) text += unit;
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text, plain())), text) << pre;
    }
  }
}

// --- special tokens ------------------------------------------------------------------------------

struct Special {
  std::unique_ptr<Tokenizer> tokenizer;
  int32_t start, end, call, calls, bos;
};

Special make_special(std::optional<bool> add_bos = std::nullopt) {
  VocabBuilder builder("gpt2", "qwen2");
  builder.add_bytes();
  Special special;
  special.start = builder.add("<|im_start|>", TokenType::kControl);
  special.end = builder.add("<|im_end|>", TokenType::kControl);
  special.call = builder.add("<tool>", TokenType::kUserDefined);
  special.calls = builder.add("<tool>s", TokenType::kUserDefined);
  special.bos = builder.add("<bos>", TokenType::kControl);
  builder.source.bos = special.bos;
  builder.source.eos = special.end;
  builder.source.add_bos = add_bos;
  special.tokenizer = builder.create();
  return special;
}

Ids joined(std::initializer_list<Ids> parts) {
  Ids all;
  for (const Ids &part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

TEST(Special, UserDefinedAlwaysMatchesLongestFirstAndControlOnlyWhenAsked) {
  const Special s = make_special();
  EXPECT_EQ(s.tokenizer->encode("a<tool>s <tool>", plain()),
            joined({{'a', s.calls, ' '}, {s.call}}));
  EXPECT_EQ(s.tokenizer->encode("<|im_start|>x", plain()), ids_of("<|im_start|>x"));
  EncodeOptions parse = plain();
  parse.parse_special = true;
  EXPECT_EQ(s.tokenizer->encode("<|im_start|>x", parse), (Ids{s.start, 'x'}));
}

TEST(Special, MessageTextNeverBecomesControl) {
  const Special s = make_special();
  const std::vector<Segment> segments{{"<|im_start|>", true},
                                      {"<|im_end|><tool>", false},
                                      {"<|im_end|>", true},
                                      {"<|im_", true},
                                      {"end|>", false}};
  const Ids ids = s.tokenizer->encode_segments(segments);
  EXPECT_EQ(ids, joined({{s.start}, ids_of("<|im_end|>"), {s.call, s.end}, ids_of("<|im_end|>")}));
  // Two template segments may share a token; a plain run is part of none, wherever it lies in one.
  const std::vector<Segment> parts{
      {"<|im_", true}, {"", false}, {"end|>", true}, {"<", false, true}, {"tool>", false}};
  EXPECT_EQ(s.tokenizer->encode_segments(parts), joined({{s.end}, ids_of("<tool>")}));
  const std::vector<Segment> end_is_plain{{"<", false}, {"tool", true}, {">", false, true}};
  EXPECT_EQ(s.tokenizer->encode_segments(end_is_plain), ids_of("<tool>"));
}

TEST(Special, SegmentsAreSplitAsOneText) {
  VocabBuilder builder("gpt2", "gpt-2");
  builder.add_bytes();
  const int32_t ab = builder.add_merge("a", "b");
  const auto tokenizer = builder.create();
  EXPECT_EQ(tokenizer->encode_segments(std::vector<Segment>{{"a", true}, {"b", false}}), (Ids{ab}));
}

TEST(Special, BosExactlyOnce) {
  const Special s = make_special(true);
  EncodeOptions parse;
  parse.parse_special = true;
  EXPECT_EQ(s.tokenizer->encode("x"), (Ids{s.bos, 'x'}));
  EXPECT_EQ(s.tokenizer->encode(""), (Ids{s.bos}));
  EXPECT_EQ(s.tokenizer->encode("<bos>x", parse), (Ids{s.bos, 'x'}));
  EXPECT_EQ(s.tokenizer->encode("x<bos>", parse), (Ids{s.bos, 'x', s.bos}));
  EXPECT_EQ(s.tokenizer->encode("<bos>x"), joined({{s.bos}, ids_of("<bos>x")}));
  parse.add_special = false;
  EXPECT_EQ(s.tokenizer->encode("<bos>x", parse), (Ids{s.bos, 'x'}));
  EXPECT_EQ(make_special(false).tokenizer->encode("x"), (Ids{'x'}));
}

TEST(Special, BosByDefaultIsTheFamilys) {
  for (const auto &[pre, adds] :
       {std::pair{"llama-bpe", true}, {"qwen2", false}, {"gpt-2", false}}) {
    VocabBuilder builder("gpt2", pre);
    builder.add_bytes();
    builder.source.bos = builder.add("<s>", TokenType::kControl);
    EXPECT_EQ(builder.create()->add_bos(), adds) << pre;
  }
}

// --- bytes in, bytes out -------------------------------------------------------------------------

TEST(Text, InvalidUtf8IsRefusedWithItsPlace) {
  const Special s = make_special();
  for (const char *bad : {"ab\xff", "ab\xc3", "ab\xc0\x80", "ab\xed\xa0\x80", "ab\xe0\x80\x80",
                          "ab\xf4\x90\x80\x80", "ab\x80", "ab\xf0\x9f\x98"}) {
    std::string message;
    EXPECT_EQ(status_of([&] { s.tokenizer->encode(bad); }, &message), Status::kInvalidArgument);
    EXPECT_NE(message.find("byte 2"), std::string::npos) << message;
  }
}

TEST(Text, NulIsACharacter) {
  const Special s = make_special();
  const std::string text("a\0b", 3);
  EXPECT_EQ(s.tokenizer->encode(text, plain()), (Ids{'a', 0, 'b'}));
  EXPECT_EQ(s.tokenizer->decode(Ids{'a', 0, 'b'}), text);
}

TEST(Text, DecodingTidiesNothing) {
  const Special s = make_special();
  const std::string text = "if ( 'ok' ) ; x != y  , n't .  ";
  EXPECT_EQ(s.tokenizer->decode(s.tokenizer->encode(text, plain())), text);
}

TEST(Text, ControlAndUnusedGiveNoText) {
  VocabBuilder builder("gpt2", "gpt-2");
  builder.add_bytes();
  const int32_t control = builder.add("<s>", TokenType::kControl);
  const int32_t user = builder.add("<u>", TokenType::kUserDefined);
  const int32_t unused = builder.add("[PAD]", TokenType::kUnused);
  builder.source.num_rows = unused + 3;
  const auto tokenizer = builder.create();
  const Ids ids{'a', control, user, unused, unused + 2, 'b'};
  EXPECT_EQ(tokenizer->decode(ids), "a<u>b");
  DecodeOptions render;
  render.render_special = true;
  EXPECT_EQ(tokenizer->decode(ids, render), "a<s><u>b");
  EXPECT_EQ(tokenizer->vocab_size(), unused + 3);
  EXPECT_EQ(tokenizer->num_real_tokens(), unused);
  EXPECT_TRUE(tokenizer->is_choosable(control));
  for (const int32_t id : {unused, unused + 1, unused + 3, -1}) {
    EXPECT_FALSE(tokenizer->is_choosable(id));
  }
  EXPECT_EQ(tokenizer->token_bytes(unused + 1), "");
}

TEST(Text, IdsOutOfRangeAreRefusedWithTheirPlace) {
  const Special s = make_special();
  for (const int32_t bad : {-1, s.tokenizer->vocab_size(), 0x7FFFFFFF}) {
    std::string message;
    EXPECT_EQ(status_of([&] { s.tokenizer->decode(Ids{'a', bad}); }, &message),
              Status::kInvalidArgument);
    EXPECT_NE(message.find("token_ids[1]"), std::string::npos) << message;
    Detokenizer detokenizer(*s.tokenizer);
    EXPECT_EQ(status_of([&] { detokenizer.feed(bad); }), Status::kInvalidArgument);
  }
}

TEST(Detokenizer, GivesWholeCharactersAndNothingIsLost) {
  const Special s = make_special();
  Detokenizer detokenizer(*s.tokenizer);
  EXPECT_EQ(detokenizer.feed(0xF0), "");
  EXPECT_EQ(detokenizer.feed(0x9F), "");
  const Detokenizer snapshot = detokenizer;
  EXPECT_EQ(detokenizer.feed(0x98), "");
  EXPECT_EQ(detokenizer.num_pending_bytes(), 3u);
  EXPECT_EQ(detokenizer.feed(0x80), "\U0001F600");
  EXPECT_EQ(detokenizer.flush(), "");
  Detokenizer again = snapshot;  // goes on from where the copy was taken
  EXPECT_EQ(again.feed('x'), "\uFFFDx");
  again = snapshot;
  EXPECT_EQ(again.feed(s.end), "");  // a CONTROL token does not interrupt a character
  EXPECT_EQ(again.flush(), "\uFFFD");
  EXPECT_EQ(again.flush(), "");
}

// What Python's bytes.decode("utf-8", "replace") and the WHATWG decoder give.
TEST(Detokenizer, OneReplacementForEachMaximalSubpart) {
  const Special s = make_special();
  const std::vector<std::pair<std::string, std::string>> cases{
      {"a\x80z", "a\uFFFDz"},
      {"\xe2\x82z", "\uFFFDz"},
      {"\xf0\x9f\x98\xf0\x9f\x98\x80", "\uFFFD\U0001F600"},
      {"\xc0\xaf", "\uFFFD\uFFFD"},
      {"\xed\xa0\x80", "\uFFFD\uFFFD\uFFFD"},
      {"\xf4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},
      {"\xe0\x80\x80", "\uFFFD\uFFFD\uFFFD"},
      {"\xff\xfe", "\uFFFD\uFFFD"},
      {"\xe1\x80", "\uFFFD"}};
  for (const auto &[bytes, text] : cases) EXPECT_EQ(s.tokenizer->decode(ids_of(bytes)), text);
}

TEST(Detokenizer, PiecesJoinedEqualTheWholeForAnyIds) {
  const Special s = make_special();
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    Ids ids;
    for (int i = 0; i < 12; ++i) {
      const int32_t bytes[] = {0xF0, 0x9F, 0x98, 0x80, 0xE2,  0x82,
                               0xAC, 0xC3, 0xA9, 'a',  s.end, s.call};
      ids.push_back(bytes[random() % std::size(bytes)]);
    }
    Detokenizer detokenizer(*s.tokenizer);
    std::string streamed;
    for (const int32_t id : ids) {
      const std::string piece = detokenizer.feed(id);
      ASSERT_EQ(find_invalid_utf8(piece), piece.size());
      streamed += piece;
    }
    streamed += detokenizer.flush();
    ASSERT_EQ(streamed, s.tokenizer->decode(ids));
  }
}

// --- SentencePiece -------------------------------------------------------------------------------

VocabBuilder sentencepiece() {
  VocabBuilder builder("llama");
  builder.add("<unk>", TokenType::kUnknown);
  builder.source.bos = builder.add("<s>", TokenType::kControl);
  builder.source.eos = builder.add("</s>", TokenType::kControl);
  builder.add_byte_names();
  return builder;
}

TEST(Spm, BestScoreFirstThenLeftmost) {
  VocabBuilder builder = sentencepiece();
  const int32_t space = builder.add("\u2581", TokenType::kNormal, -9);
  const int32_t a = builder.add("a", TokenType::kNormal, -9);
  builder.add("b", TokenType::kNormal, -9);
  const int32_t ab = builder.add("ab", TokenType::kNormal, -2);
  const int32_t aa = builder.add("aa", TokenType::kNormal, -1);
  builder.source.add_space_prefix = false;
  const auto tokenizer = builder.create();
  EXPECT_EQ(tokenizer->encode("aab", plain()), (Ids{aa, ab - 1}));
  EXPECT_EQ(tokenizer->encode("aaa", plain()), (Ids{aa, a}));
  EXPECT_EQ(tokenizer->encode(" ab", plain()), (Ids{space, ab}));
}

TEST(Spm, TheSpaceInFrontComesAndGoesOnce) {
  VocabBuilder builder = sentencepiece();
  builder.add("\u2581", TokenType::kNormal, -3);
  builder.add("\u2581two", TokenType::kNormal, -2);
  const auto tokenizer = builder.create();
  EXPECT_TRUE(tokenizer->add_bos());
  for (const std::string text : {"two  words", " two", "", "  ", "two\n"}) {
    const Ids first = tokenizer->encode(text);
    EXPECT_EQ(first[0], *tokenizer->bos());
    std::string again = text;
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(tokenizer->encode(again), first);
      again = tokenizer->decode(first);
      EXPECT_EQ(again, text);
    }
    DecodeOptions continuation;
    continuation.is_continuation = true;
    EXPECT_EQ(tokenizer->decode(first, continuation), text.empty() ? "" : " " + text);
  }
}

TEST(Spm, TheSpaceInFrontBelongsToTextsAndToWhatFollowsAControlToken) {
  VocabBuilder builder = sentencepiece();
  const int32_t space = builder.add("\u2581", TokenType::kNormal, -3);
  const int32_t a = builder.add("a", TokenType::kNormal, -3);
  const int32_t user = builder.add("<u>", TokenType::kUserDefined);
  const auto tokenizer = builder.create();
  const int32_t end = *tokenizer->eos();
  EncodeOptions parse = plain();
  parse.parse_special = true;
  EXPECT_EQ(tokenizer->encode("a<u>a", parse), (Ids{space, a, user, a}));
  EXPECT_EQ(tokenizer->encode("<u>a", parse), (Ids{space, user, a}));
  EXPECT_EQ(tokenizer->encode("a</s>a", parse), (Ids{space, a, end, space, a}));
  EXPECT_EQ(tokenizer->encode("</s>", parse), (Ids{end}));
}

TEST(Spm, WhatIsNoPieceFallsBackToBytesElseToOneUnknown) {
  VocabBuilder with_bytes = sentencepiece();
  with_bytes.source.add_space_prefix = false;
  const auto tokenizer = with_bytes.create();
  const int32_t first_byte = 3;
  EXPECT_EQ(tokenizer->encode("\u00e9", plain()), (Ids{first_byte + 0xC3, first_byte + 0xA9}));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("\u00e9 \u4e2d")), "\u00e9 \u4e2d");

  VocabBuilder without("llama");
  const int32_t unknown = without.add("<unk>", TokenType::kUnknown);
  const int32_t a = without.add("a");
  without.source.add_space_prefix = false;
  EXPECT_EQ(without.create()->encode("xya\u4e2d", plain()), (Ids{unknown, a, unknown}));
}

TEST(Spm, UnusedPiecesAreStepsOnly) {
  VocabBuilder builder = sentencepiece();
  const int32_t a = builder.add("a", TokenType::kNormal, -9);
  const int32_t b = builder.add("b", TokenType::kNormal, -9);
  builder.add("ab", TokenType::kUnused, -1);
  const int32_t abb = builder.add("abb", TokenType::kNormal, -2);
  builder.source.add_space_prefix = false;
  const auto tokenizer = builder.create();
  EXPECT_EQ(tokenizer->encode("ab", plain()), (Ids{a, b}));
  EXPECT_EQ(tokenizer->encode("abb", plain()), (Ids{abb}));
}

TEST(Spm, AWrittenSpaceMarkIsASpaceAndControlNamesAreText) {
  VocabBuilder builder = sentencepiece();
  const int32_t space = builder.add("\u2581", TokenType::kNormal, -3);
  builder.source.add_space_prefix = false;
  const auto tokenizer = builder.create();
  EXPECT_EQ(tokenizer->encode("\u2581", plain()), (Ids{space}));
  const Ids ids = tokenizer->encode("</s>", plain());
  EXPECT_EQ(std::count(ids.begin(), ids.end(), *tokenizer->eos()), 0);
}

// A name is not text in SentencePiece's alphabet: U+2581 in it is itself.
TEST(Spm, ControlNamesKeepTheirCharacters) {
  const std::string name = "<\uff5cend\u2581of\u2581sentence\uff5c>";
  VocabBuilder builder = sentencepiece();
  const int32_t end = builder.add(name, TokenType::kControl);
  const auto tokenizer = builder.create();
  EXPECT_EQ(tokenizer->find_special(name), end);
  EXPECT_TRUE(tokenizer->is_end_of_generation(end));
  EncodeOptions parse = plain();
  parse.parse_special = true;
  EXPECT_EQ(tokenizer->encode(name, parse), (Ids{end}));
  DecodeOptions render;
  render.render_special = true;
  EXPECT_EQ(tokenizer->decode(Ids{end}, render), name);
}

// --- end of generation ---------------------------------------------------------------------------

struct EndCase {
  const char *chat_template;
  std::vector<std::string> ends;
};

// CONTROL tokens under names of our own, so that only the template can tell.
Pieces ends_of(const std::string &chat_template) {
  VocabBuilder builder("gpt2", "gpt-2");
  builder.add_bytes();
  for (const char *name : {"<A>", "<B>", "<C>", "<D>", "<E>"})
    builder.add(name, TokenType::kControl);
  builder.source.eos = 256;  // <A>
  builder.source.chat_template = chat_template;
  const auto tokenizer = builder.create();
  Pieces names;
  for (const EndToken &end : tokenizer->end_of_generation()) {
    names.emplace_back(tokenizer->token_bytes(end.id));
  }
  return names;
}

TEST(EndOfGeneration, WhatTheTemplateEndsAnAssistantTurnWith) {
  // <B> opens a turn, <C> closes it, <D> stands behind the role, <E> is someone else's.
  const EndCase cases[] = {
      {"{% for m in messages %}{{'<B>' + m['role'] + '\\n' + m['content'] + '<C>' + '\\n'}}"
       "{% endfor %}{% if add_generation_prompt %}{{ '<B>assistant\\n' }}{% endif %}",
       {"<A>", "<C>"}},
      {"{% for m in messages %}{% set content = '<B>' + m['role'] + '<D>\\n\\n' + "
       "m['content'] | trim + '<C>' %}{{ content }}{% endfor %}"
       "{% if add_generation_prompt %}{{ '<B>assistant<D>\\n\\n' }}{% endif %}",
       {"<A>", "<C>"}},
      {"{% for m in messages %}{% if m.role == 'user' %}{{ '<B>' + m.content + '<E>' }}"
       "{% elif m.role == 'assistant' %}{{ m.content + '<C>' }}{% endif %}{% endfor %}",
       {"<A>", "<C>"}},
      {"{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
       "{% else %}{{ '<B>' + m['content'] + '<B>' }}{% endif %}{% endfor %}",
       {"<A>", "<B>"}},
      {"{% for m in messages %}<B>{{ m.role }}\n{{ m.content }}<C>\n{% endfor %}"
       "{% if add_generation_prompt %}<B>assistant\n{% endif %}",
       {"<A>", "<C>"}},
      {"{% for m in messages %}{% if m.content.split('<E>')[-1] %}<B>{{ m.content.split('<D>')[0] "
       "}}"
       "<C>{% endif %}{% endfor %}{# '<E>' content '<E>' #}",
       {"<A>", "<C>"}},
      {"{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content + '<E>' }}{% else %}"
       "{{ m.content }}{% if m.tool_calls %}{{ '<tool>' }}{% endif %}{{ '<C>' }}{% endif %}"
       "{% endfor %}",
       {"<A>", "<C>"}},
      {"{% if", {"<A>"}},
      {"{{ content + '<C>", {"<A>", "<C>"}},
      {"no markers at all { } {{ }} {% %} {", {"<A>"}},
  };
  for (const EndCase &c : cases) EXPECT_EQ(ends_of(c.chat_template), c.ends) << c.chat_template;
}

TEST(EndOfGeneration, UnionOfKeysAndNamesEachOnceWithItsSource) {
  VocabBuilder builder("gpt2", "gpt-2");
  builder.add_bytes();
  const int32_t end = builder.add("<|end_of_text|>", TokenType::kControl);
  const int32_t eot = builder.add("<|eot_id|>", TokenType::kControl);
  const int32_t eom = builder.add("<custom>", TokenType::kControl);
  const int32_t start = builder.add("<|im_start|>", TokenType::kControl);
  const int32_t im_end = builder.add("<|im_end|>", TokenType::kUserDefined);
  const int32_t normal = builder.add("</s>");
  builder.source.eos = end;
  builder.source.eom = eom;
  const auto tokenizer = builder.create();
  std::vector<std::pair<int32_t, std::string>> found;
  for (const EndToken &token : tokenizer->end_of_generation()) {
    found.emplace_back(token.id, token.source);
  }
  EXPECT_EQ(found,
            (std::vector<std::pair<int32_t, std::string>>{{end, "tokenizer.ggml.eos_token_id"},
                                                          {eot, "known name"},
                                                          {eom, "tokenizer.ggml.eom_token_id"},
                                                          {im_end, "known name"}}));
  EXPECT_TRUE(tokenizer->is_end_of_generation(eot));
  EXPECT_FALSE(tokenizer->is_end_of_generation(start));
  EXPECT_FALSE(tokenizer->is_end_of_generation(normal));
  // Though the file calls it USER_DEFINED, text must not end a turn.
  EXPECT_EQ(tokenizer->token_type(im_end), TokenType::kControl);
  EXPECT_EQ(tokenizer->encode("<|im_end|>", plain()), ids_of("<|im_end|>"));
}

// --- files ---------------------------------------------------------------------------------------

TEST(File, AGpt2VocabularyWithoutPreTokenizerHasIdsButNoText) {
  for (const std::optional<std::string> &pre :
       {std::optional<std::string>(), std::optional<std::string>("default")}) {
    VocabBuilder builder("gpt2", pre);
    builder.add_bytes();
    const auto tokenizer = builder.create();
    EXPECT_FALSE(tokenizer->has_text());
    std::string message;
    EXPECT_EQ(status_of([&] { tokenizer->encode("a"); }, &message), Status::kNoTokenizer);
    EXPECT_NE(message.find("tokenizer.ggml.pre"), std::string::npos);
    EXPECT_NE(message.find("flag"), std::string::npos);
    EXPECT_EQ(tokenizer->vocab_size(), 256);
    EXPECT_TRUE(tokenizer->is_choosable(255));
  }
}

TEST(File, KeysThatWouldChangeTheIdsAreNotIgnored) {
  VocabBuilder gpt2("gpt2", "gpt-2");
  gpt2.add_bytes();
  gpt2.source.add_space_prefix = true;
  EXPECT_NE(gpt2.create()->without_text_reason().find("add_space_prefix"), std::string::npos);
  VocabBuilder llama = sentencepiece();
  llama.source.remove_extra_whitespaces = true;
  std::string message;
  EXPECT_EQ(status_of([&] { llama.create(); }, &message), Status::kModelUnsupported);
  EXPECT_NE(message.find("remove_extra_whitespaces"), std::string::npos);
  llama = sentencepiece();
  llama.source.unsupported_keys = {"some.key"};
  EXPECT_EQ(status_of([&] { llama.create(); }, &message), Status::kModelUnsupported);
  EXPECT_NE(message.find("some.key"), std::string::npos);
}

TEST(File, UnknownNamesAreRefusedByName) {
  std::string message;
  EXPECT_EQ(status_of([] { VocabBuilder("gpt2", "klingon").add_bytes().create(); }, &message),
            Status::kModelUnsupported);
  EXPECT_NE(message.find("klingon"), std::string::npos);
  EXPECT_EQ(status_of([] { VocabBuilder("t5").add_bytes().create(); }, &message),
            Status::kModelUnsupported);
  EXPECT_NE(message.find("t5"), std::string::npos);
}

TEST(File, SentencePieceNeedsNoPreTokenizerAndAnAliasLoads) {
  EXPECT_TRUE(sentencepiece().create()->has_text());
  EXPECT_TRUE(VocabBuilder("gpt2", "deepseek-r1-qwen").add_bytes().create()->has_text());
}

TEST(File, NoVocabWorksWithIdsAlone) {
  VocabBuilder builder("no_vocab");
  builder.source.num_rows = 100;
  const auto tokenizer = builder.create();
  EXPECT_EQ(status_of([&] { tokenizer->encode("a"); }), Status::kNoTokenizer);
  EXPECT_EQ(status_of([&] { tokenizer->decode(Ids{1}); }), Status::kNoTokenizer);
  EXPECT_EQ(tokenizer->vocab_size(), 100);
  EXPECT_EQ(tokenizer->num_real_tokens(), 100);
  EXPECT_TRUE(tokenizer->is_choosable(99));
  EXPECT_FALSE(tokenizer->is_choosable(100));
}

TEST(File, MalformedVocabulariesAreRefusedNamingTheKey) {
  const auto expect = [](const char *key, VocabBuilder builder,
                         const std::function<void(VocabBuilder *)> &break_it) {
    builder.add_bytes();
    break_it(&builder);
    std::string message;
    EXPECT_EQ(status_of([&] { builder.create(); }, &message), Status::kModelMalformed) << key;
    EXPECT_NE(message.find(key), std::string::npos) << message;
  };
  const VocabBuilder gpt2("gpt2", "gpt-2");
  for (const char *merge : {"", "ab", " ab", "ab "}) {
    expect("tokenizer.ggml.merges[0]", gpt2, [&](VocabBuilder *b) { b->add_raw_merge(merge); });
  }
  expect("tokenizer.ggml.token_type[256]", gpt2,
         [](VocabBuilder *b) { b->add("x", static_cast<TokenType>(7)); });
  expect("tokenizer.ggml.token_type[256]", gpt2,
         [](VocabBuilder *b) { b->add("x", static_cast<TokenType>(-1)); });
  expect("tokenizer.ggml.eos_token_id", gpt2, [](VocabBuilder *b) { b->source.eos = 256; });
  expect("tokenizer.ggml.bos_token_id", gpt2, [](VocabBuilder *b) { b->source.bos = -1; });
  expect("tokenizer.ggml.tokens", gpt2, [](VocabBuilder *b) { b->source.num_rows = 255; });
  expect("tokenizer.ggml.scores[256]", VocabBuilder("llama"),
         [](VocabBuilder *b) { b->add("x", TokenType::kNormal, std::stof("nan")); });
  expect("tokenizer.ggml.tokens[256]", VocabBuilder("llama"),
         [](VocabBuilder *b) { b->add("<0xG0>", TokenType::kByte); });

  VocabSource uneven;
  uneven.model = "gpt2";
  uneven.pre = "gpt-2";
  uneven.tokens = {"a", "b"};
  const std::vector<int32_t> types{1};
  uneven.types = types;
  std::string message;
  EXPECT_EQ(status_of([&] { Tokenizer::create(uneven); }, &message), Status::kModelMalformed);
  EXPECT_NE(message.find("tokenizer.ggml.token_type"), std::string::npos);
}

}  // namespace
}  // namespace xllm
