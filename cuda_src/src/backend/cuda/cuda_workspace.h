// What a step needs on the device: the batch, residual, activations, logits, and the graphs that
// replay it.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/cublas.h"
#include "backend/cuda/cuda_weights.h"
#include "backend/cuda/matmul.h"
#include "backend/cuda/prompt_tiles.h"

namespace xllm::cuda {

// What the per-slot form has in place of quantised activations.
struct F32Scratch {
  struct Rows {
    const float *data = nullptr;
    int num_cols = 0;
  };
  std::unique_ptr<Sgemm> sgemm;
  Buffer act;  // [rows, hidden]
  Buffer q;    // [rows, q]
  Rows last_act;
};

// The batch as the kernels read it: one staging copy per step, fixed addresses. Arrays of
// row_capacity entries, then the tables.
struct DeviceBatch {
  int64_t *kv_indices = nullptr;  // < 0: not written
  int32_t *token_ids = nullptr;
  int32_t *positions = nullptr;   // < 0: the row is padding of a graph's bucket
  int32_t *row_tables = nullptr;  // where the row's block table begins in `tables`
  int32_t *sampler_rows = nullptr;
  int32_t *logit_rows = nullptr;
  int32_t *tiles = nullptr;  // prompt_attention.cuh
  int32_t *tables = nullptr;
};

class CudaWorkspace : public Workspace {
 public:
  // cublas: for weights of the dequantised form.
  CudaWorkspace(const Device &device, const CudaWeights &weights, DeviceAllocator *allocator,
                cudaStream_t stream, int max_seqs, std::shared_ptr<const CublasLibrary> cublas);
  ~CudaWorkspace() override;

  uint64_t size_bytes() const override;
  // Bytes for steps of `num_rows` rows and as many logits as sequences.
  static uint64_t plan_bytes(const Device &device, const ModelDims &dims, WeightForm form,
                             bool is_gate_unfused, int num_rows, int max_seqs);

  // Makes room for a step and forgets the graphs if anything moved. Waits for the device when it
  // has to grow.
  void reserve(int num_rows, int num_logits, int64_t num_table_entries);
  // Everything that plan_bytes counts, now.
  void reserve_all(int num_rows);
  // Copies the batch and `prompt` to the device; rows from num_tokens to padded_rows are padding.
  void upload(const ForwardBatch &batch, int padded_rows);

  // The activations of the next product: rows, which it quantises itself or which a kernel before
  // it puts into `act` in the form of next_act.
  void set_input(const ActRows &rows) {
    input = rows;
    is_quantized = false;
  }
  ActView next_act() const {
    return {act.data<uint8_t>(), (input.num_cols + kActCols - 1) / kActCols};
  }

  // What crosses the bus for the choice of a step's tokens, both ways. There are two, so that one
  // step's may be asked for while the one before it is on its way.
  struct SampleBatch {
    PinnedBuffer upload, chosen;
    Buffer wishes;
    cudaEvent_t is_done = nullptr;
    size_t num_rows = 0;
  };
  // The next one to fill, for so many rows and bytes; and the oldest that was not taken.
  uint64_t num_sample_starts = 0;  // of those that were filled
  SampleBatch &next_sample_batch(size_t num_rows, size_t num_bytes);
  SampleBatch &oldest_sample_batch();
  void reserve_sampler(size_t num_rows, size_t num_adjusted, bool has_selections);

  // A captured step and what it was captured for.
  struct Graph {
    int num_uses = 0;
    cudaGraphExec_t exec = nullptr;
    std::vector<uint64_t> signature;
  };
  void drop_graphs();

  const CudaWeights *weights;
  DeviceAllocator *allocator;
  cudaStream_t stream;
  int max_seqs;

  // Of the step in progress.
  int num_rows = 0;  // rows that kernels work on: num_tokens, or the bucket of a graph
  int num_logits = 0;
  bool is_identity = false;   // logit_rows = 0, 1, 2, ...
  bool is_decode = false;     // one row per sequence, each with logits
  int max_splits = 1;         // of attention, over the rows
  PromptTiles prompt;         // of attention: which rows go together
  bool is_recording = false;  // stages only append to `signature`
  std::vector<uint64_t> signature;

  Buffer x;              // [rows, hidden] f32
  Buffer qkv;            // [rows, q + 2 kv] f32
  Partials qkv_left;     // of the layer in progress: what stands for `qkv`, if its data is not null
  Buffer q;              // [rows, q] f16
  Buffer attention_out;  // [rows, q] f32
  Buffer ffn;        // [rows, intermediate] f32; twice that where gate and up stand side by side
  Buffer head_rows;  // [logits, hidden] f32
  Buffer logits;     // [logits, vocab] f32
  Buffer act;        // rows of the widest product, quantised
  Buffer partials;   // f32, matmul.h
  ActRows input = {};
  bool is_quantized = false;  // input stands in act
  F32Scratch f32;             // empty in the raw form, which has all the others but this
  Buffer split_out, split_stats, split_counters;  // attention.cuh
  int64_t split_entries = 0;
  Buffer batch_memory;
  DeviceBatch batch;
  Buffer sampled;                       // [max_seqs] the id chosen last for a sampler row
  Buffer chosen;                        // [max_seqs] ids of this step's logits
  Buffer sample_parts, bins, adjusted;  // sample.cuh
  size_t num_bin_rows = 0;
  PinnedBuffer host_logits;

  std::map<std::tuple<int, int>, Graph> graphs;  // by (rows, max_splits)

 private:
  static uint64_t sampler_bytes(int64_t vocab, int64_t rows);  // sample.cu
  void grow(Buffer *buffer, uint64_t bytes);
  bool is_f32() const { return weights->form() == WeightForm::kDequantized; }

  int row_capacity_ = 0;
  int logit_capacity_ = 0;
  int64_t table_capacity_ = 0;
  // Staging of the batch: filled by the host while earlier copies may still be on their way.
  struct Staging {
    PinnedBuffer memory;
    cudaEvent_t is_free = nullptr;
  };
  Staging staging_[4];
  int next_staging_ = 0;
  SampleBatch sample_batches_[2];
  uint64_t num_sample_ends_ = 0;
};

}  // namespace xllm::cuda
