// The memory that an engine will take for given options, known before anything is loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "tensor/kv.h"

namespace xllm {

constexpr int kKvBlockSize =
    64;  // token positions per block; half a prompt segment, one page of attention

struct PlanOptions {
  bool raw_at_creation = true;           // batched and AUTO engines
  bool dequantized_at_creation = false;  // per-slot engines
  bool raw_later = false;  // loaded on first use (AUTO): planned, not part of bytes_needed
  bool dequantized_later = false;
  KvType kv_type = KvType::kF16;  // of the raw set; the dequantised set always stores f32
  uint64_t kv_memory = 0;         // bytes of a set's pool; 0: auto
  int block_size = kKvBlockSize;
  int max_slots = 1;
  int max_seq_len = 0;
  int prefill_chunk_tokens = 512;
  // The vocabulary's tables in host memory: a part of the plan where the backend computes there.
  uint64_t vocabulary_bytes = 0;
};

// One set of weights with what runs on it: its own KV pool, scratch and tables.
struct WeightSetPlan {
  WeightForm form = WeightForm::kRaw;
  bool is_at_creation = true;
  uint64_t weight_bytes = 0;  // of its own on the device
  uint64_t mapped_bytes =
      0;  // of the file that it keeps reading: shared, can be dropped, not counted as needed
  KvLayout kv_layout;
  uint64_t kv_bytes_per_token = 0;
  uint64_t pool_bytes = 0;
  int32_t num_blocks = 0;
  int max_step_tokens = 0;  // what scratch_bytes is for
  uint64_t scratch_bytes = 0;
  uint64_t table_bytes = 0;
  uint64_t total_bytes() const { return weight_bytes + pool_bytes + scratch_bytes + table_bytes; }
};

struct MemoryPlan {
  std::string backend;              // "cpu", "cuda"
  std::vector<WeightSetPlan> sets;  // those at creation first
  uint64_t bytes_needed = 0;        // of the sets at creation
  uint64_t bytes_free = 0;          // when the plan was made
  uint64_t total_bytes = 0;         // device memory, what the cgroup grants, or the engine's limit
  int max_slots = 0;
  int max_seq_len = 0;
  int prefill_chunk_tokens = 0;
  bool fits = false;
  std::string remedy;  // what to change when it does not fit; else empty

  const WeightSetPlan *find(WeightForm form) const;
};

// Pool size with kv_memory auto: 0.90 x device memory less weights, scratch and tables on a GPU, a
// quarter of what the process is granted on the CPU (its pages are not touched until used), in both
// cases at most what is free, less a margin on a GPU for what its driver takes by itself; a
// twentieth for a set that may be loaded later. A pool of fewer blocks than slots would only fail
// later, so that many are planned, and the plan does not fit. With kv_memory given, each set's pool
// has that size.
// Throws Error(kInvalidArgument, field kv_memory or kv_type), what check_kv_precision and what
// Backend::plan throw.
MemoryPlan make_plan(const Backend &backend, const ModelDims &dims, const ModelTensors &tensors,
                     const PlanOptions &options);

// Throws Error(kMemory) with details bytes_needed, bytes_free and remedy unless the sets at
// creation fit.
void check_plan(const MemoryPlan &plan);

// The same for loading one more set beside what is there now: `bytes_free` is the device's at this
// moment.
void check_set_fits(const WeightSetPlan &set, uint64_t bytes_free);

}  // namespace xllm
