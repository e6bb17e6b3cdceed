// Finds stop strings in streamed text and holds back no more than what may yet become one.
//
// The text is read byte by byte, so the outcome does not depend on how it was cut into pieces: the
// stop string that is complete first ends it; of several complete at the same byte, the longest,
// then the one named first.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace xllm {

class StopChecker {
 public:
  // stops: valid UTF-8, none empty. May be empty: everything passes at once.
  explicit StopChecker(std::vector<std::string> stops);

  // More text, whole code points. Returns what may be sent now, whole code points again: neither
  // any part of a stop string nor a possible beginning of one. After a match, always "".
  std::string feed(std::string_view text);
  // The end of the text: what was held back, "" after a match.
  std::string flush();

  // The stop string that was found, -1 while none was.
  int matched() const { return matched_; }

 private:
  struct Pattern {
    std::string text;
    std::vector<size_t>
        failure;  // of each prefix, the length of its longest border (Knuth-Morris-Pratt)
    size_t num_matched = 0;  // the longest prefix that the text so far ends in
  };

  void step(Pattern *pattern, char byte) const;

  std::vector<Pattern> patterns_;
  std::string held_;
  int matched_ = -1;
};

}  // namespace xllm
