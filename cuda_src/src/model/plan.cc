#include "model/plan.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "kvcache/kv_storage.h"
#include "model/kv_precision.h"

namespace xllm {
namespace {

constexpr int64_t kMaxBlocks = int64_t{1} << 30;  // ids are 32-bit

KvLayout make_layout(const ModelDims &dims, KvType type, int block_size) {
  KvLayout layout;
  layout.type = type;
  layout.num_layers = dims.num_layers;
  layout.num_kv_heads = dims.num_kv_heads;
  layout.head_dim = dims.head_dim;
  layout.block_size = block_size;
  return layout;
}

std::string mebibytes(uint64_t bytes) {
  const uint64_t tenths = bytes / (uint64_t{1 << 20} / 10);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MiB";
}

// The pool of a set under kv_memory auto. `others` is what is planned on the device besides this
// pool. Never more than is free: what auto chose should not be what does not fit.
uint64_t auto_pool_bytes(const Backend &backend, const DeviceMemory &memory, uint64_t others,
                         bool is_at_creation) {
  // note: a set that may come later serves one slot at a time and must fit beside the first pool.
  if (!is_at_creation) return memory.total_bytes / 20;
  const auto less = [](uint64_t a, uint64_t b) { return a > b ? a - b : 0; };
  if (backend.info().kind == "cpu")
    return std::min(memory.total_bytes / 4, less(memory.free_bytes, others));
  return std::min(less(memory.total_bytes / 10 * 9, others),
                  less(memory.free_bytes, others) / 20 * 19);
}

std::string make_remedy(const MemoryPlan &plan, const PlanOptions &options) {
  uint64_t weights = 0;
  uint64_t pools = 0;
  for (const WeightSetPlan &set : plan.sets) {
    if (!set.is_at_creation) continue;
    weights += set.weight_bytes;
    pools += set.pool_bytes;
  }
  const uint64_t without_pools = plan.bytes_needed - pools;
  if (without_pools < plan.bytes_free && pools > 0) {
    const uint64_t left = plan.bytes_free - without_pools;
    return "set kv_memory to at most " + std::to_string(left) + " bytes (" + mebibytes(left) + ")" +
           (options.kv_type == KvType::kF16 ? ", and kv_type int8 to keep more tokens in it" : "");
  }
  if (options.dequantized_at_creation && weights > plan.bytes_free) {
    return "use decode mode batched: its weights stay quantised; or free memory";
  }
  return "use a smaller or more strongly quantised model, a smaller prefill chunk or fewer slots, "
         "or "
         "free memory: another engine on this device leaves some with a kv_memory of its own";
}

}  // namespace

const WeightSetPlan *MemoryPlan::find(WeightForm form) const {
  for (const WeightSetPlan &set : sets) {
    if (set.form == form) return &set;
  }
  return nullptr;
}

MemoryPlan make_plan(const Backend &backend, const ModelDims &dims, const ModelTensors &tensors,
                     const PlanOptions &options) {
  XLLM_DCHECK(options.block_size > 0 && options.max_slots > 0 && options.prefill_chunk_tokens > 0);
  if (options.raw_at_creation || options.raw_later) {
    check_kv_precision(options.kv_type, largest_k_bias(dims, tensors));
  }
  const DeviceMemory memory = backend.memory();
  MemoryPlan plan;
  plan.backend = backend.info().kind;
  plan.bytes_free = memory.free_bytes;
  plan.total_bytes = memory.total_bytes;
  plan.max_slots = options.max_slots;
  plan.max_seq_len = options.max_seq_len;
  plan.prefill_chunk_tokens = options.prefill_chunk_tokens;

  // A step holds a prefill chunk beside one token of every slot; per-slot steps hold one slot.
  const auto add_set = [&](WeightForm form, bool is_at_creation) {
    const bool is_raw = form == WeightForm::kRaw;
    const int max_seqs = is_raw ? options.max_slots : 1;
    const int max_step_tokens = options.prefill_chunk_tokens + (is_raw ? options.max_slots : 0);
    const BackendPlan needs = backend.plan(dims, tensors, form, max_step_tokens, max_seqs);
    WeightSetPlan set;
    set.form = form;
    set.is_at_creation = is_at_creation;
    set.weight_bytes = needs.weight_bytes;
    set.mapped_bytes = needs.mapped_bytes;
    set.max_step_tokens = max_step_tokens;
    set.scratch_bytes = needs.scratch_bytes;
    set.table_bytes = needs.table_bytes;
    set.kv_layout = make_layout(dims, is_raw ? options.kv_type : KvType::kF32, options.block_size);
    check_kv_layout(set.kv_layout);
    set.kv_bytes_per_token = set.kv_layout.bytes_per_token();
    plan.sets.push_back(set);
  };
  if (options.raw_at_creation) add_set(WeightForm::kRaw, true);
  if (options.dequantized_at_creation) add_set(WeightForm::kDequantized, true);
  if (options.raw_later) add_set(WeightForm::kRaw, false);
  if (options.dequantized_later) add_set(WeightForm::kDequantized, false);

  if (plan.backend == "cpu" && !plan.sets.empty()) {
    plan.sets.front().table_bytes += options.vocabulary_bytes;
  }

  // Pools last, because auto gives a pool what the rest leaves. In the order of the sets: the ones
  // at creation come first.
  uint64_t planned = 0;
  for (WeightSetPlan &set : plan.sets) {
    planned += set.weight_bytes + set.scratch_bytes + set.table_bytes;
    const uint64_t block_bytes = set.kv_layout.block_bytes();
    const uint64_t budget = options.kv_memory > 0
                                ? options.kv_memory
                                : auto_pool_bytes(backend, memory, planned, set.is_at_creation);
    if (options.kv_memory > 0 && budget < block_bytes) {
      throw Error(Status::kInvalidArgument,
                  "kv_memory: expected at least one block of " + std::to_string(block_bytes) +
                      " bytes (" + std::to_string(options.block_size) + " tokens), found " +
                      std::to_string(budget),
                  {{"field", "kv_memory"}});
    }
    const auto wanted = static_cast<int64_t>(std::min<uint64_t>(budget / block_bytes, kMaxBlocks));
    const bool is_raw = set.form == WeightForm::kRaw;
    const int64_t fewest = options.kv_memory > 0 || !is_raw ? 1 : options.max_slots;
    set.num_blocks = static_cast<int32_t>(std::max(fewest, wanted));
    set.pool_bytes = static_cast<uint64_t>(set.num_blocks) * block_bytes;
    planned += set.pool_bytes;
    if (set.is_at_creation) plan.bytes_needed += set.total_bytes();
  }
  plan.fits = plan.bytes_needed <= plan.bytes_free;
  if (!plan.fits) plan.remedy = make_remedy(plan, options);
  return plan;
}

void check_plan(const MemoryPlan &plan) {
  if (plan.fits) return;
  throw Error(Status::kMemory,
              "the model does not fit: needs " + std::to_string(plan.bytes_needed) + " bytes (" +
                  mebibytes(plan.bytes_needed) + "), free are " + std::to_string(plan.bytes_free) +
                  " (" + mebibytes(plan.bytes_free) + "); " + plan.remedy,
              {{"bytes_needed", std::to_string(plan.bytes_needed)},
               {"bytes_free", std::to_string(plan.bytes_free)},
               {"remedy", plan.remedy}});
}

void check_set_fits(const WeightSetPlan &set, uint64_t bytes_free) {
  if (set.total_bytes() <= bytes_free) return;
  const std::string remedy =
      "set kv_memory lower at creation, or create an engine of its own for this decode mode";
  throw Error(Status::kMemory,
              std::string(set.form == WeightForm::kRaw ? "batched" : "per-slot") +
                  " weights do not fit beside what is loaded: need " +
                  std::to_string(set.total_bytes()) + " bytes (" + mebibytes(set.total_bytes()) +
                  "), free are " + std::to_string(bytes_free) + " (" + mebibytes(bytes_free) +
                  "); " + remedy,
              {{"bytes_needed", std::to_string(set.total_bytes())},
               {"bytes_free", std::to_string(bytes_free)},
               {"remedy", remedy}});
}

}  // namespace xllm
