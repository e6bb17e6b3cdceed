// Constrained requests in engine tests: masks, and who pushes them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "engine_fixture.h"

namespace xllm {

constexpr int32_t kVocab = RecallBackend::kVocabSize;

inline TokenMask only(const Ids &ids) {
  TokenMask mask(kVocab, false);
  for (const int32_t id : ids) mask.set(id, true);
  return mask;
}

inline TokenMask everything() { return TokenMask(kVocab, true); }

inline RequestOptions constrained(Ids prompt, uint32_t max_tokens = 12) {
  RequestOptions options = request(std::move(prompt), max_tokens);
  options.is_constrained = true;
  return options;
}

// The mask of a test's choice for each position, pushed when the engine asks for it.
inline Answer run_masked(Engine *engine, uint64_t id,
                         const std::function<TokenMask(uint32_t)> &mask_of) {
  Answer answer;
  while (answer.finished.kind != EventKind::kFinished) {
    const std::vector<Event> events = engine->take_events(id, kSoon);
    if (events.empty()) {
      ADD_FAILURE() << "no event in time";
      return answer;
    }
    for (const Event &event : events) {
      add(event, &answer);
      if (!event.wants_mask) continue;
      const uint32_t next = event.kind == EventKind::kToken ? event.token_index + 1 : 0;
      engine->push_masks({{id, next, mask_of(next)}});
    }
  }
  return answer;
}

// What is chosen greedily when each position has its own allowed ids.
inline Ids expected_within(Ids context, const std::vector<Ids> &allowed) {
  Ids out;
  for (const Ids &ids : allowed) {
    float logits[kVocab];
    RecallBackend::hashed_logits(context, logits);
    int32_t best = ids.front();
    for (const int32_t id : ids) {
      if (logits[id] > logits[best] || (logits[id] == logits[best] && id < best)) best = id;
    }
    out.push_back(best);
    context.push_back(best);
  }
  return out;
}

inline std::vector<Ids> pairs(int count) {
  std::vector<Ids> out;
  for (int i = 0; i < count; ++i) out.push_back({i % 26, (i * 5 + 3) % 26, 31 + i % 20});
  return out;
}

}  // namespace xllm
