// What an engine tells about itself while it runs.
#pragma once

#include <cstdint>

namespace xllm {

// As xllm_engine_stats, field by field.
struct EngineStats {
  uint32_t num_running = 0, num_waiting = 0;
  uint32_t slots_total = 0, slots_used = 0;
  uint64_t blocks_total = 0, blocks_used = 0, blocks_cached = 0;
  uint64_t num_steps = 0;
  uint64_t num_prompt_tokens = 0, num_cached_tokens = 0, num_generated_tokens = 0;
  uint64_t num_requests_finished = 0, num_requests_cancelled = 0, num_requests_failed = 0;
  uint64_t num_preemptions = 0;
  double last_step_s = 0;
  double heartbeat_age_s = 0;
  uint32_t cancel_steps_max = 0;
  uint64_t workspace_bytes = 0;
  bool is_draining = false, has_failed = false;
  double token_gap_bound_s = 0, token_gap_max_s = 0;
  double prefill_tokens_per_s = 0;
};

}  // namespace xllm
