// A small device for engine tests. It stores the token ids themselves as keys and, for a row whose
// logits are wanted, reads the whole context back through the block table: logits are a function of
// what lies in the cache, so a wrong block, a wrong index or a neighbour's write changes the
// answer. Unwritten memory holds no id, and reading it is an error. Tests may choose logits and
// hold the loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/error.h"
#include "base/rng.h"
#include "sampling/sampler.h"

namespace xllm {

// Lets a test hold the step loop at the start of a step and see how many have begun.
class StepGate {
 public:
  // The step loop's side.
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_begun_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return num_allowed_ > 0 || is_open_; });
    if (!is_open_) --num_allowed_;
  }
  // The test's side. Closed at first only where close() came before the engine.
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = false;
    num_allowed_ = 0;
  }
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  void allow(int num_steps) {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_allowed_ += num_steps;
    changed_.notify_all();
  }
  // Until the loop has begun its num_steps-th step (and is held there, unless allowed to go on).
  void wait_until_begun(int num_steps) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return num_begun_ >= num_steps; });
  }
  int num_begun() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_begun_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_begun_ = 0;
  int num_allowed_ = 0;
  bool is_open_ = true;
};

class RecallBackend : public Backend {
 public:
  static constexpr int kVocabSize = 64;

  // The parts that a test looks at or sets; shared, because the engine owns the backend.
  struct Control {
    StepGate gate;
    // In place of logits by hash: fills [kVocabSize] given the tokens of the context.
    std::function<void(const std::vector<int32_t> &context, float *logits)> logits;
    std::atomic<bool> fails{false};  // the next step throws as a broken device does
    uint64_t free_bytes = uint64_t{1} << 30;
    bool has_per_slot = true;
    bool has_int8 = true;
    bool has_segments = false;
    bool samples_on_device = false;
    std::atomic<int> num_ahead{0};  // steps that were started before the tokens of the one before
    std::atomic<int> num_rows_ahead{0};  // such steps, whether or not their tokens could be chosen
    std::function<bool()> is_computing;  // in place of a device that is never at work
    std::map<int, TokenPath> paths;   // of each position, as computed last; read while no step runs
    std::atomic<int> num_loaded{0};   // weight sets
    std::function<void()> on_load;    // called by the loop while it takes in what has come
    std::function<bool()> has_piece;  // asked before each piece of a load: whether there is one
    std::atomic<int> most_rows{0};    // of any step
    std::atomic<int> most_seqs{0};
    std::atomic<int> num_copied_blocks{0};
    std::atomic<int> step_ms{0}, row_us{0};     // what a step, and a row of it, takes at least
    std::atomic<int> most_rows_with_memory{0};  // > 0: a step of more rows finds none
    std::atomic<int> num_rows{0};               // of all steps
  };

  explicit RecallBackend(std::shared_ptr<Control> control) : control_(std::move(control)) {
    info_.kind = "cpu";
    info_.name = "recall";
    info_.kernels = "none";
    info_.num_threads = 1;
    info_.has_segment_path = control_->has_segments;
    info_.samples_on_device = control_->samples_on_device;
  }

  const DeviceInfo &info() const override { return info_; }
  DeviceMemory memory() const override { return {uint64_t{1} << 30, control_->free_bytes}; }
  Allocator &allocator() override { return allocator_; }

  BackendPlan plan(const ModelDims &, const ModelTensors &, WeightForm form, int,
                   int) const override {
    if (form == WeightForm::kDequantized && !control_->has_per_slot) {
      throw Error(Status::kUnimplemented, "recall: PER_SLOT is not built; use BATCHED");
    }
    BackendPlan plan;
    plan.weight_bytes = 1000;
    return plan;
  }
  void check_kv(const KvView &kv) const override {
    if (kv.layout.type == KvType::kInt8 && !control_->has_int8) {
      throw Error(Status::kUnimplemented, "recall: KV type int8 is not built; use f16");
    }
  }
  std::unique_ptr<WeightSet> load_weights(
      const ModelDims &, const ModelTensors &, WeightForm form,
      const std::function<void(uint64_t, uint64_t)> &progress) override {
    ++control_->num_loaded;
    if (control_->on_load) control_->on_load();
    while (control_->has_piece && control_->has_piece()) {
      if (progress) progress(1, 2);
    }
    return std::make_unique<Weights>(form);
  }
  std::unique_ptr<Workspace> make_workspace(const WeightSet &, int) override {
    return std::make_unique<Scratch>();
  }

  void run_step(Workspace &ws, const ForwardBatch &batch,
                const std::function<void()> &stages) override {
    control_->most_rows = std::max(control_->most_rows.load(), batch.num_tokens());
    control_->num_rows += batch.num_tokens();
    control_->most_seqs = std::max(control_->most_seqs.load(), batch.num_seqs());
    auto &scratch = static_cast<Scratch &>(ws);
    if (!scratch.started.empty()) ++control_->num_rows_ahead;
    scratch.block_tables = batch.block_tables;
    control_->gate.pass();
    if (control_->most_rows_with_memory > 0 &&
        batch.num_tokens() > control_->most_rows_with_memory) {
      throw Error(Status::kMemory, "recall: no memory for the step", {{"bytes_needed", "1000"}});
    }
    std::this_thread::sleep_for(std::chrono::microseconds(control_->step_ms * 1000 +
                                                          control_->row_us * batch.num_tokens()));
    if (control_->fails) throw Error(Status::kDevice, "recall: the device is gone");
    stages();
  }
  void embed(Workspace &, const WeightSet &, const ForwardBatch &) override {}
  void qkv(Workspace &, const WeightSet &, int layer, const KvView &kv,
           const ForwardBatch &batch) override {
    if (layer != 0) return;
    kv_ = kv;
    for (size_t row = 0; row < batch.token_ids.size(); ++row) {
      if (control_->has_segments) control_->paths[batch.positions[row]] = batch.paths[row];
      int32_t id = batch.token_ids[row];
      if (id == ForwardBatch::kSampledOnDevice) {
        id = sampled_.at(batch.sampler_row[static_cast<size_t>(batch.seq_index[row])]);
        id = std::max(id, 0);  // the row before it was refused: nobody sees what follows
      }
      std::memcpy(place(batch.kv_indices[row]), &id, sizeof(int32_t));
    }
  }
  void attention(Workspace &, const WeightSet &, int, const KvView &,
                 const ForwardBatch &) override {}
  void o_proj(Workspace &, const WeightSet &, int, const ForwardBatch &) override {}
  void ffn(Workspace &, const WeightSet &, int, const ForwardBatch &) override {}

  void head(Workspace &ws, const WeightSet &, const ForwardBatch &batch) override {
    std::vector<float> &logits = static_cast<Scratch &>(ws).logits;
    logits.assign(batch.logit_rows.size() * kVocabSize, 0);
    for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
      const auto row = static_cast<size_t>(batch.logit_rows[i]);
      const std::vector<int32_t> context = recall(batch, row);
      float *out = logits.data() + i * kVocabSize;
      if (control_->logits) {
        control_->logits(context, out);
      } else {
        hashed_logits(context, out);
      }
    }
  }
  bool is_computing() override { return control_->is_computing && control_->is_computing(); }
  const float *host_logits(Workspace &ws) override {
    return static_cast<Scratch &>(ws).logits.data();
  }
  bool start_sample(Workspace &ws, const ForwardBatch &batch, Span<const SampleRow> rows) override {
    if (!control_->samples_on_device) return false;
    auto &scratch = static_cast<Scratch &>(ws);
    if (batch.block_tables != scratch.block_tables) {
      throw Error(Status::kInternal, "recall: other blocks");
    }
    for (const SampleRow &row : rows) {
      if (row.num_logprobs > 0) return false;
    }
    if (!scratch.started.empty()) ++control_->num_ahead;
    std::vector<int32_t> chosen;
    for (size_t i = 0; i < rows.size(); ++i) {
      const Sampled one = sampler_.sample(host_logits(ws) + i * kVocabSize, rows[i]);
      chosen.push_back(one.outcome == SampleOutcome::kNotFinite      ? -1
                       : one.outcome == SampleOutcome::kAllForbidden ? -2
                                                                     : one.token_id);
      const auto row = static_cast<size_t>(batch.logit_rows[i]);
      sampled_[batch.sampler_row[static_cast<size_t>(batch.seq_index[row])]] = chosen.back();
    }
    scratch.started.push_back(std::move(chosen));
    return true;
  }
  void finish_sample(Workspace &ws, Span<int32_t> token_ids) override {
    std::deque<std::vector<int32_t>> &started = static_cast<Scratch &>(ws).started;
    const std::vector<int32_t> chosen = started.front();
    started.pop_front();
    if (chosen.size() != token_ids.size()) throw Error(Status::kInternal, "recall: other rows");
    std::copy(chosen.begin(), chosen.end(), token_ids.begin());
  }
  void copy_blocks(const KvView &kv, Span<const int32_t> from, Span<const int32_t> to) override {
    const uint64_t size = kv.layout.block_bytes();
    for (size_t i = 0; i < from.size(); ++i) {
      std::memcpy(kv.base + static_cast<uint64_t>(to[i]) * size,
                  kv.base + static_cast<uint64_t>(from[i]) * size, size);
      ++control_->num_copied_blocks;
    }
  }
  void read_tap(Workspace &, Tap, std::vector<float> *) override {}

  // What the device answers to a context.
  static void hashed_logits(const std::vector<int32_t> &context, float *out) {
    uint64_t hash = context.size();
    for (const int32_t id : context) {
      const Philox mixed = philox(hash, static_cast<uint64_t>(id));
      hash = uint64_t{mixed.value[0]} << 32 | mixed.value[1];
    }
    for (int v = 0; v < kVocabSize; ++v) {
      out[v] = 6 * uniform_float(philox(hash, static_cast<uint64_t>(v), 1).value[0]);
    }
  }

 private:
  class PoisonedHeap : public Allocator {
   public:
    void *allocate(uint64_t size_bytes) override {
      void *memory = std::aligned_alloc(256, (size_bytes + 255) / 256 * 256);
      if (memory == nullptr) throw Error(Status::kMemory, "recall: no memory");
      std::memset(memory, 0xFF, size_bytes);
      return memory;
    }
    void free(void *memory, uint64_t) noexcept override { std::free(memory); }
  };
  struct Weights : WeightSet {
    explicit Weights(WeightForm form) : form_(form) {}
    WeightForm form() const override { return form_; }
    uint64_t size_bytes() const override { return 1000; }
    WeightForm form_;
  };
  struct Scratch : Workspace {
    uint64_t size_bytes() const override { return logits.size() * sizeof(float); }
    std::vector<float> logits;
    std::vector<int32_t> block_tables;         // of the last step
    std::deque<std::vector<int32_t>> started;  // chosen, and not read yet
  };

  uint8_t *place(int64_t kv_index) const {
    const int64_t size = kv_.layout.block_size;
    return kv_.k_page(0, static_cast<int>(kv_index / size), 0) +
           static_cast<uint64_t>(kv_index % size) * kv_.layout.row_bytes();
  }

  std::vector<int32_t> recall(const ForwardBatch &batch, size_t row) const {
    const auto sequence = static_cast<size_t>(batch.seq_index[row]);
    const int64_t size = kv_.layout.block_size;
    std::vector<int32_t> context;
    for (int64_t position = 0; position <= batch.positions[row]; ++position) {
      const size_t entry =
          sequence * static_cast<size_t>(batch.max_blocks) + static_cast<size_t>(position / size);
      const int64_t block = batch.block_tables[entry];
      int32_t id = -1;
      std::memcpy(&id, place(block * size + position % size), sizeof id);
      if (id < 0) throw Error(Status::kInternal, "recall: read what was never written");
      context.push_back(id);
    }
    return context;
  }

  std::shared_ptr<Control> control_;
  DeviceInfo info_;
  PoisonedHeap allocator_;
  KvView kv_;
  Sampler sampler_;
  std::map<int32_t, int32_t> sampled_;  // by sampler row: what was chosen last
};

}  // namespace xllm
