#include "tokenizer/special_matcher.h"

#include <string>

#include "base/error.h"

namespace xllm {
namespace {

bool is_matched(TokenType type) {
  return type == TokenType::kControl || type == TokenType::kUserDefined;
}

size_t count_bytes(const Vocab &vocab) {
  size_t num_bytes = 0;
  for (int32_t id = 0; id < vocab.num_tokens(); ++id) {
    if (!is_matched(vocab.type(id))) continue;
    const size_t size = vocab.piece(id).size();
    if (size > SpecialMatcher::kMaxNameBytes) {
      throw Error(Status::kModelUnsupported, "tokenizer.ggml.tokens[" + std::to_string(id) +
                                                 "]: expected a special token of at "
                                                 "most " +
                                                 std::to_string(SpecialMatcher::kMaxNameBytes) +
                                                 " bytes, found " + std::to_string(size));
    }
    num_bytes += size;
  }
  return num_bytes;
}

}  // namespace

SpecialMatcher::SpecialMatcher(const Vocab &vocab) : edges_(count_bytes(vocab)), id_at_{-1} {
  for (int32_t id = 0; id < vocab.num_tokens(); ++id) {
    const std::string_view name = vocab.piece(id);
    if (!is_matched(vocab.type(id)) || name.empty()) continue;
    may_begin_[static_cast<unsigned char>(name[0])] = true;
    uint32_t node = 0;
    for (const char c : name) {
      const auto byte = static_cast<unsigned char>(c);
      const uint32_t *next = edges_.find(node, byte);
      if (next != nullptr) {
        node = *next;
        continue;
      }
      const auto fresh = static_cast<uint32_t>(id_at_.size());
      edges_.insert(node, byte, fresh);
      id_at_.push_back(-1);
      node = fresh;
    }
    if (id_at_[node] < 0) id_at_[node] = id;
  }
}

}  // namespace xllm
