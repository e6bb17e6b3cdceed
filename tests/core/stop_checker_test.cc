// Stop strings in streamed text: nothing of one is sent, nothing else is kept.

#include "engine/stop_checker.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace xllm {
namespace {

struct Sent {
  std::string text;
  int matched = -1;
  std::vector<std::string> pieces;
};

Sent stream(const std::vector<std::string> &stops, const std::vector<std::string> &pieces) {
  StopChecker checker(stops);
  Sent sent;
  for (const std::string &piece : pieces) {
    sent.pieces.push_back(checker.feed(piece));
    sent.text += sent.pieces.back();
  }
  sent.matched = checker.matched();
  sent.text += checker.flush();
  return sent;
}

TEST(StopChecker, FindsAStringSpreadOverThreePieces) {
  const Sent sent = stream({"STOP"}, {"go ", "S", "TO", "P on"});
  EXPECT_EQ(sent.text, "go ");
  EXPECT_EQ(sent.matched, 0);
  EXPECT_EQ(sent.pieces, (std::vector<std::string>{"go ", "", "", ""}));
}

TEST(StopChecker, ReleasesANearMatchThatTurnsAway) {
  const Sent sent = stream({"STOP"}, {"a STO", "RY", " S"});
  EXPECT_EQ(sent.pieces, (std::vector<std::string>{"a ", "STORY", " "}));
  EXPECT_EQ(sent.text, "a STORY S");  // the end gives back what was held
  EXPECT_EQ(sent.matched, -1);
}

TEST(StopChecker, SeesTheStartInsideAFailedStart) {
  EXPECT_EQ(stream({"aab"}, {"a", "a", "a", "b", "!"}).text, "a");
  EXPECT_EQ(stream({"abcabd"}, {"abcabcabd"}).text, "abc");
}

TEST(StopChecker, MatchesAtTheVeryEnd) {
  const Sent sent = stream({"\n\n"}, {"line", "\n", "\n"});
  EXPECT_EQ(sent.text, "line");
  EXPECT_EQ(sent.matched, 0);
}

TEST(StopChecker, TheOneCompleteFirstWinsThenTheLongest) {
  EXPECT_EQ(stream({"abcd", "bc"}, {"abcd"}).text, "a");
  EXPECT_EQ(stream({"abcd", "bc"}, {"abcd"}).matched, 1);
  EXPECT_EQ(stream({"b", "ab"}, {"xab"}).text, "x");
  EXPECT_EQ(stream({"b", "ab"}, {"xab"}).matched, 1);
  EXPECT_EQ(stream({"ab", "ab"}, {"ab"}).matched, 0);
}

TEST(StopChecker, DoesNotDependOnHowTheTextIsCut) {
  const std::string text = "the cat sat on the mat, the cap sat on the map \xC3\xA9t\xC3\xA9";
  const std::vector<std::string> stops = {"the map", "sat on the m.", "\xC3\xA9t\xC3\xA9s"};
  const Sent whole = stream(stops, {text});
  EXPECT_EQ(whole.matched, 0);
  for (size_t size = 1; size < 9; ++size) {
    std::vector<std::string> pieces;
    for (size_t i = 0; i < text.size(); i += size) pieces.push_back(text.substr(i, size));
    const Sent cut = stream(stops, pieces);
    EXPECT_EQ(cut.text, whole.text) << size;
    EXPECT_EQ(cut.matched, whole.matched) << size;
  }
}

TEST(StopChecker, HoldsBackNoMoreThanAPossibleBeginning) {
  const Sent sent = stream({"abc"}, {"xa", "b", "ab", "a"});
  EXPECT_EQ(sent.pieces, (std::vector<std::string>{"x", "", "ab", "ab"}));
  EXPECT_EQ(sent.text, "xababa");
}

TEST(StopChecker, WithoutStringsPassesEverything) {
  EXPECT_EQ(stream({}, {"a", "b"}).pieces, (std::vector<std::string>{"a", "b"}));
}

}  // namespace
}  // namespace xllm
