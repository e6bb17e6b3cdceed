// Finds CONTROL and USER_DEFINED tokens written out in a text.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tokenizer/flat_map.h"
#include "tokenizer/vocab.h"

namespace xllm {

class SpecialMatcher {
 public:
  // kModelUnsupported: a name of more than kMaxNameBytes. That bound keeps the search linear.
  static constexpr size_t kMaxNameBytes = 512;
  explicit SpecialMatcher(const Vocab &vocab);

  struct Match {
    size_t begin;
    size_t end;
    int32_t id;
  };

  // The first match at or behind `from`, and there the longest, that accept(Match) takes; false if
  // there is none.
  template <typename Accept>
  bool find(std::string_view text, size_t from, const Accept &accept, Match *match) const {
    for (size_t begin = from; begin < text.size(); ++begin) {
      if (!may_begin_[static_cast<unsigned char>(text[begin])]) continue;
      uint32_t node = 0;
      bool found = false;
      for (size_t end = begin; end < text.size();) {
        const uint32_t *next = edges_.find(node, static_cast<unsigned char>(text[end]));
        if (next == nullptr) break;
        node = *next;
        ++end;
        const Match candidate{begin, end, id_at_[node]};
        if (candidate.id >= 0 && accept(candidate)) {
          *match = candidate;
          found = true;
        }
      }
      if (found) return true;
    }
    return false;
  }

 private:
  PairMap<uint32_t> edges_;     // a trie: (node, byte) to node; node 0 is the root
  std::vector<int32_t> id_at_;  // [num_nodes] the token that ends there, or -1
  bool may_begin_[256] = {};    // bytes that some token begins with
};

}  // namespace xllm
