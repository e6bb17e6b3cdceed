// A backend without arithmetic: it says what it is told to say about memory, and notes the stages
// that it is asked to run.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "backend/backend.h"

namespace xllm {

class NotingBackend : public Backend {
 public:
  struct NoWorkspace : Workspace {
    uint64_t size_bytes() const override { return 0; }
  };

  struct NoWeights : WeightSet {
    WeightForm form() const override { return WeightForm::kRaw; }
    uint64_t size_bytes() const override { return 0; }
  };

  DeviceInfo note = {"cpu", "none", "none", 1, "", false, false};
  DeviceMemory bytes;
  BackendPlan needs;
  std::string calls;
  mutable int planned_tokens = 0;
  mutable int planned_seqs = 0;

  const DeviceInfo &info() const override { return note; }
  DeviceMemory memory() const override { return bytes; }
  Allocator &allocator() override { throw std::logic_error("no memory here"); }
  BackendPlan plan(const ModelDims &, const ModelTensors &, WeightForm, int max_step_tokens,
                   int max_seqs) const override {
    planned_tokens = max_step_tokens;
    planned_seqs = max_seqs;
    return needs;
  }
  std::unique_ptr<WeightSet> load_weights(
      const ModelDims &, const ModelTensors &, WeightForm,
      const std::function<void(uint64_t, uint64_t)> &) override {
    throw std::logic_error("no weights here");
  }
  std::unique_ptr<Workspace> make_workspace(const WeightSet &, int) override {
    return std::make_unique<NoWorkspace>();
  }
  void embed(Workspace &, const WeightSet &, const ForwardBatch &) override { calls += "embed "; }
  void qkv(Workspace &, const WeightSet &, int layer, const KvView &,
           const ForwardBatch &) override {
    add("qkv", layer);
  }
  void attention(Workspace &, const WeightSet &, int layer, const KvView &,
                 const ForwardBatch &) override {
    add("attention", layer);
  }
  void o_proj(Workspace &, const WeightSet &, int layer, const ForwardBatch &) override {
    add("o_proj", layer);
  }
  void ffn(Workspace &, const WeightSet &, int layer, const ForwardBatch &) override {
    add("ffn", layer);
  }
  void head(Workspace &, const WeightSet &, const ForwardBatch &) override { calls += "head "; }
  void run_step(Workspace &, const ForwardBatch &, const std::function<void()> &stages) override {
    calls += "step(";
    stages();
    calls += ")";
  }
  const float *host_logits(Workspace &) override { return nullptr; }
  void copy_blocks(const KvView &, Span<const int32_t>, Span<const int32_t>) override {}
  void read_tap(Workspace &, Tap, std::vector<float> *) override {}

 private:
  void add(const char *stage, int layer) { calls += stage + std::to_string(layer) + " "; }
};

}  // namespace xllm
