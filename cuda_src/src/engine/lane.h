// One way to decode within an engine: its runner, its pool of blocks and its scheduler. A batched
// lane steps all its sequences together, a per-slot lane one at a time, in turns.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/decode_mode.h"
#include "engine/pace.h"
#include "engine/runner.h"
#include "engine/scheduler.h"
#include "kvcache/prefix_cache.h"

namespace xllm {

// A step whose rows are being computed on the device, and whose tokens are perhaps being chosen.
struct StepInFlight {
  std::vector<ScheduledRows> rows;
  std::vector<uint64_t> ids;  // of the rows' requests, which may end before the step does; 0: of a
                              // row that has dropped out, to be computed again
  double start_s = 0;
  bool has_decode = false;  // rows of decode, and how many of prefill
  int num_prefill_rows = 0;
  bool is_chosen = false;  // how its tokens are chosen is known, and asked for

  explicit operator bool() const { return !rows.empty(); }
};

struct Lane {
  Lane(DecodeMode decode_mode, Backend *backend, const ModelDims &dims, const ModelTensors &tensors,
       const WeightSetPlan &plan, const SchedulerConfig &config, int max_seqs, HashKey cache_key,
       bool use_prefix_cache, double max_gap_s,
       const std::function<void(uint64_t, uint64_t)> &progress)
      : mode(decode_mode),
        takes_turns(config.max_step_sequences == 1),
        segment_size(config.segment_size),
        runner(backend, dims, tensors, plan, max_seqs, progress),
        cache(plan.num_blocks, plan.kv_layout.block_size, cache_key, use_prefix_cache),
        scheduler(config, &cache),
        pace(max_gap_s, config.prefill_chunk) {}

  DecodeMode mode;
  bool takes_turns;
  int segment_size;
  Runner runner;
  PrefixCache cache;
  Scheduler scheduler;
  StepInFlight in_flight;
  bool is_on_device = false;    // the tokens of the step are chosen there
  std::vector<Sampled> chosen;  // of a step that is complete, a token per row that wants one
  Pace pace;
  double end_s = 0;       // of the last step
  double measured_s = 0;  // when a step last told how fast long prompts go
};

}  // namespace xllm
