#include "engine/stop_checker.h"

#include <algorithm>
#include <utility>

namespace xllm {

StopChecker::StopChecker(std::vector<std::string> stops) {
  for (std::string &stop : stops) {
    Pattern pattern;
    pattern.failure.assign(stop.size() + 1, 0);
    size_t border = 0;
    for (size_t i = 1; i < stop.size(); ++i) {
      while (border > 0 && stop[i] != stop[border]) border = pattern.failure[border];
      if (stop[i] == stop[border]) ++border;
      pattern.failure[i + 1] = border;
    }
    pattern.text = std::move(stop);
    patterns_.push_back(std::move(pattern));
  }
}

void StopChecker::step(Pattern *pattern, char byte) const {
  size_t &n = pattern->num_matched;
  while (n > 0 && pattern->text[n] != byte) n = pattern->failure[n];
  if (pattern->text[n] == byte) ++n;
}

std::string StopChecker::feed(std::string_view text) {
  if (matched_ >= 0) return {};
  if (patterns_.empty()) return std::string(text);
  for (const char byte : text) {
    held_.push_back(byte);
    size_t longest = 0;
    for (size_t i = 0; i < patterns_.size(); ++i) {
      step(&patterns_[i], byte);
      const size_t size = patterns_[i].text.size();
      if (patterns_[i].num_matched == size && size > longest) {
        longest = size;
        matched_ = static_cast<int>(i);
      }
    }
    if (matched_ >= 0) {
      held_.resize(held_.size() - longest);
      return std::exchange(held_, {});
    }
  }
  size_t num_kept = 0;
  for (const Pattern &pattern : patterns_) num_kept = std::max(num_kept, pattern.num_matched);
  std::string sent = held_.substr(0, held_.size() - num_kept);
  held_.erase(0, sent.size());
  return sent;
}

std::string StopChecker::flush() {
  for (Pattern &pattern : patterns_) pattern.num_matched = 0;
  return std::exchange(held_, {});
}

}  // namespace xllm
