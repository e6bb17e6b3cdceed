// The interface that a device implements: memory, weights, and the stages of one step of a
// decoder-only transformer.
//
// A step computes `num_tokens` token rows of one or more sequences. The stages run in this order,
// called by model/transformer.cc and nobody else; each has one file of its name in cpu/ and in
// cuda/:
//
//   embed          x = E[token];  act = Q(rms_norm(x, the first layer's attn_norm))
//   for each layer:
//     qkv          q, k, v = act * Wq|Wk|Wv, bias, head norms, RoPE; k and v go into the cache
//     attention    act = Q(softmax(q k^T / sqrt(head_dim)) v) over the sequence's cache
//     o_proj       x += act * Wo;  act = Q(rms_norm(x, ffn_norm))
//     ffn          x += Q(silu(act * Wg) * (act * Wu)) * Wd
//                  act = Q(rms_norm(x, the next layer's attn_norm, or output_norm))
//   head           logits = act * Wh, for the rows that want them
//
// x is the residual [num_tokens, hidden_size] f32; act the activations in the form the device's
// products want (int8 per 32 with their scales, or f32 in the per-slot form); both live in a
// Workspace and nobody outside the backend reads them. A stage hands over quantised activations
// because the next product's input is a function of the row alone, and fusing the norm and the
// quantiser into the stage's tail is what keeps a layer at five kernels.
//
// Numbers: every output row is a function of its own row, its sequence's cache, the weights and
// constants. Nothing that changes the order of additions depends on num_tokens, on other rows, on
// threads or on free memory.
//
// Shapes and dtypes are checked once, when weights are loaded (check_tensors in backend.cc) and per
// step in check_batch; the stages themselves only DCHECK. Errors: Error(kMemory) from what
// allocates, Error(kDevice) when the device fails; both leave the backend destructible. A backend
// serves one engine. Loading, stepping and destruction are called from one thread at a time; info()
// and memory() from any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/span.h"
#include "tensor/buffer.h"
#include "tensor/kv.h"
#include "tensor/tensor.h"

namespace xllm {

// ---- the model, as a device needs to know it ----

// Rotary position embedding (arXiv:2104.09864) as two small tables combined by one complex
// multiply, so that their size does not depend on the context: the angle of position p = 512 * i +
// j at frequency f is that of coarse[i] plus that of fine[j]. Computed once on the host in double.
// A scaling rule (linear, yarn, llama-3 factors) is inside the tables.
struct RopeTables {
  static constexpr int kFine = 512;
  int rotary_dim = 0;         // leading channels of a head that rotate, even; the rest pass
  bool is_neighbor = false;   // pairs (2i, 2i + 1); otherwise halves (i, i + rotary_dim / 2)
  std::vector<float> coarse;  // [num_coarse, rotary_dim / 2, 2] cos, sin
  std::vector<float> fine;    // [kFine, rotary_dim / 2, 2] cos, sin
};

struct ModelDims {
  int num_layers = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocab_size = 0;  // rows of the head
  float rms_eps = 0;
  float attention_scale = 0;  // usually 1 / sqrt(head_dim)
  int sliding_window = 0;     // keys a token may look back at, itself included; 0: all
  RopeTables rope;
};

// The tensors of a layer as they stand in the file (views of the map). Optional ones may be empty:
// biases, q_norm and k_norm.
struct LayerTensors {
  MatrixView attn_norm;  // [hidden]
  // [num_heads * head_dim, hidden], then [num_kv_heads * head_dim, hidden] twice
  MatrixView q, k, v;
  MatrixView q_bias, k_bias, v_bias;  // [rows of the matrix]
  MatrixView q_norm, k_norm;          // [head_dim]
  MatrixView o, o_bias;               // [hidden, num_heads * head_dim], [hidden]
  MatrixView ffn_norm;                // [hidden]
  MatrixView gate, up, down;          // [intermediate, hidden] twice, [hidden, intermediate]
};

struct ModelTensors {
  MatrixView embedding;  // [rows >= vocab_size, hidden]
  std::vector<LayerTensors> layers;
  MatrixView output_norm;  // [hidden]
  MatrixView head;         // [vocab_size, hidden]; the embedding where tied
};

// The two sets of weights of a model: raw quant blocks and integer kernels (batched API), or
// dequantised to f32 (per-slot API).
enum class WeightForm : int { kRaw, kDequantized };

// Weights as one backend holds them: mapped, repacked or uploaded. Keeps what it needs of
// ModelDims; the map that `tensors` points into outlives it. Destroyed before its backend.
class WeightSet {
 public:
  virtual ~WeightSet() = default;
  virtual WeightForm form() const = 0;
  virtual uint64_t size_bytes() const = 0;  // memory of its own, the map not counted
};

// ---- one step ----

// Which kernels compute a token: a function of its position and its request's prompt length alone
// (never of the batch).
enum class TokenPath : uint8_t {
  kInteger = 0,  // int8 activations times raw blocks: generated tokens and the tail of a prompt
  // A complete 128-token segment of a prompt, where the device has a faster way for those; else as
  // kInteger.
  kSegment = 1,
};

// Everything a step needs to know, on the host. Rows are ordered by sequence; a sequence's rows are
// consecutive positions.
struct ForwardBatch {
  // token_ids entry: the id is the one that sample() last chose for this sequence's sampler_row,
  // still on the device.
  static constexpr int32_t kSampledOnDevice = -1;

  // Per token row, [num_tokens].
  std::vector<int32_t> token_ids;
  std::vector<int32_t> positions;   // 0-based, within the sequence
  std::vector<int32_t> seq_index;   // which sequence of this batch
  std::vector<int64_t> kv_indices;  // block * block_size + offset: where K and V are written
  std::vector<TokenPath> paths;
  // Per sequence, [num_seqs].
  std::vector<int32_t> query_start;   // [num_seqs + 1] first row of each sequence, then num_tokens
  std::vector<int32_t> context_len;   // tokens its last row attends to, itself included; >= 1
  std::vector<int32_t> sampler_row;   // its row in the device sampler's memory, < max_seqs
  std::vector<int32_t> block_tables;  // [num_seqs, max_blocks] block ids, unused entries -1
  int max_blocks = 0;
  // Rows whose logits are wanted, ascending, [num_logits].
  std::vector<int32_t> logit_rows;

  int num_tokens() const { return static_cast<int>(token_ids.size()); }
  int num_seqs() const { return static_cast<int>(context_len.size()); }
  int num_logits() const { return static_cast<int>(logit_rows.size()); }
};

// The memory of a step: residual, activations, q, logits, and what the device needs to run it
// (graphs, streams). Grows to the tokens of the largest step so far, never with max_seq_len.
class Workspace {
 public:
  virtual ~Workspace() = default;
  virtual uint64_t size_bytes() const = 0;
};

// ---- choosing a token ----

struct TokenCount {
  int32_t token_id;
  int32_t num_prompt;     // occurrences in the prompt
  int32_t num_generated;  // occurrences among the generated tokens
};

struct TokenBias {
  int32_t token_id;
  float bias;  // added to the logit; -infinity forbids
};

// How one row of logits becomes a token. The order, the same in every backend: bias and mask,
// repetition penalty, frequency and presence penalty, then temperature 0: the largest (lowest id on
// a tie), no random draw; otherwise divide by the temperature, keep top_k, then top_p, then min_p,
// and draw with philox(seed, position). sampling/params.h says what each value means.
struct SampleRow {
  float temperature = 0;
  int32_t top_k = 0;  // 0: off
  float top_p = 1;    // 1: off
  float min_p = 0;    // 0: off
  float repetition_penalty = 1;
  float frequency_penalty = 0;
  float presence_penalty = 0;
  uint64_t seed = 0;
  uint64_t position = 0;           // of the token to be chosen, in its sequence
  Span<const TokenCount> counts;   // ascending ids; tokens that penalties apply to
  Span<const TokenBias> biases;    // ascending ids
  const uint32_t *mask = nullptr;  // [ceil(vocab / 32)] bit set: allowed; null: all
  int32_t num_choosable = 0;       // ids >= this are padding rows, never chosen
  int32_t num_logprobs = 0;        // > 0: the device sampler may refuse
};

// ---- the device ----

struct DeviceInfo {
  std::string kind;     // "cpu" or "cuda"
  std::string name;     // "AMD EPYC 7763", "NVIDIA H200"
  std::string kernels;  // instruction set or compute capability in use: "avx2", "sm_90a"
  int num_threads = 0;  // CPU
  // Which limit decided num_threads: "affinity", "cgroup quota", "physical cores", "flag".
  std::string threads_limit;
  bool samples_on_device = false;
  bool has_segment_path = false;  // TokenPath::kSegment differs from kInteger
};

struct DeviceMemory {
  uint64_t total_bytes = 0;  // of the device, what the cgroup grants, or memory_limit
  uint64_t free_bytes = 0;
};

struct BackendOptions {
  int num_threads = 0;  // CPU: 0 = min(affinity, cgroup quota, physical cores)
  // CPU: empty = the best one; else "scalar", "avx2", "avx512", "neon", refused if the CPU lacks
  // it.
  std::string instruction_set;
  int device_index = 0;       // CUDA
  uint64_t memory_limit = 0;  // bytes this engine may take on the device; 0 = all
  std::function<void(const std::string &)> log;  // one line of progress or notice; may be empty
};

// Memory that loading and stepping will take, before anything is allocated.
struct BackendPlan {
  uint64_t weight_bytes = 0;   // memory of its own that the weight set takes on the device
  uint64_t mapped_bytes = 0;   // bytes of the file's map that it keeps using
  uint64_t scratch_bytes = 0;  // Workspace for max_step_tokens rows and max_seqs sequences
  uint64_t table_bytes = 0;    // RoPE tables and the like
};

// Taps for tests: what a stage left in the workspace, as f32.
enum class Tap { kResidual, kActivations, kQuery, kLogits };

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const DeviceInfo &info() const = 0;
  virtual DeviceMemory memory() const = 0;
  virtual Allocator &allocator() = 0;  // device memory (KV pool)

  // What load_weights and make_workspace will allocate. Throws what check_tensors throws.
  virtual BackendPlan plan(const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
                           int max_step_tokens, int max_seqs) const = 0;

  // Throws Error(kUnimplemented) where the device cannot compute with keys and values stored this
  // way; asked before anything is loaded. Looks at kv.layout alone. The default takes every layout.
  virtual void check_kv(const KvView &kv) const;

  // Prepare one set of weights. `progress`, if any, is called with bytes done and bytes in all.
  virtual std::unique_ptr<WeightSet> load_weights(
      const ModelDims &dims, const ModelTensors &tensors, WeightForm form,
      const std::function<void(uint64_t, uint64_t)> &progress) = 0;
  // Scratch for steps over `weights` with up to max_seqs sequences. Nothing is sized by
  // max_seq_len.
  virtual std::unique_ptr<Workspace> make_workspace(const WeightSet &weights, int max_seqs) = 0;
  // Takes the memory for steps of up to max_step_tokens rows now, where it might be gone later:
  // what does not fit fails while an engine is made, not in the middle of an answer. The default
  // leaves it to the steps.
  virtual void reserve(Workspace &ws, int max_step_tokens);

  // The stages. `kv` is written by qkv and read by attention; its type is f32 in the dequantised
  // form.
  virtual void embed(Workspace &ws, const WeightSet &weights, const ForwardBatch &batch) = 0;
  virtual void qkv(Workspace &ws, const WeightSet &weights, int layer, const KvView &kv,
                   const ForwardBatch &batch) = 0;
  // Causal attention of each token over its sequence's cached keys and values (GQA,
  // arXiv:2305.13245; paged, arXiv:2309.06180). The order of additions depends on the row's
  // position alone. K and V of this step are read back from the cache, in the cache's type, so the
  // result does not depend on how a prompt was cut into chunks.
  virtual void attention(Workspace &ws, const WeightSet &weights, int layer, const KvView &kv,
                         const ForwardBatch &batch) = 0;
  virtual void o_proj(Workspace &ws, const WeightSet &weights, int layer,
                      const ForwardBatch &batch) = 0;
  virtual void ffn(Workspace &ws, const WeightSet &weights, int layer,
                   const ForwardBatch &batch) = 0;
  // Logits [num_logits, vocab_size] f32 of batch.logit_rows, kept in the workspace until the next
  // step.
  virtual void head(Workspace &ws, const WeightSet &weights, const ForwardBatch &batch) = 0;

  // One call around the stages of a step, for a device that captures or replays them as a graph.
  // `stages` issues embed .. head. The default just runs them.
  virtual void run_step(Workspace &ws, const ForwardBatch &batch,
                        const std::function<void()> &stages);

  // Whether the device still computes what was asked of it; never waits. False where the stages do
  // their work before they return, as by default.
  virtual bool is_computing();

  // Logits of the last head() on the host, [num_logits, vocab_size] f32, valid until the next step.
  // Waits for the device.
  virtual const float *host_logits(Workspace &ws) = 0;

  // Choose one token per row of the last head() on the device. Returns false, having done nothing,
  // where the device has no sampler or a row wants what it lacks; the caller then samples on the
  // host from host_logits. token_ids [num rows] is valid after return; an id of -1 says that the
  // row's logits were not finite, -2 that bias and mask leave no token.
  virtual bool sample(Workspace &ws, const ForwardBatch &batch, Span<const SampleRow> rows,
                      Span<int32_t> token_ids);
  // The same in two parts, so that the next step can be started before this one's tokens are read
  // (its token_ids are kSampledOnDevice). At most two are started and not finished; finish_sample
  // waits for the older. start_sample returns false where sample would.
  virtual bool start_sample(Workspace &ws, const ForwardBatch &batch, Span<const SampleRow> rows);
  virtual void finish_sample(Workspace &ws, Span<int32_t> token_ids);

  // Copy `num_blocks` blocks of the pool (copy-on-write of a shared, partly filled block). src and
  // dst hold block ids.
  virtual void copy_blocks(const KvView &kv, Span<const int32_t> src, Span<const int32_t> dst) = 0;

  // For tests: copies what the last stage left to `out` ([num_tokens, width] f32, or [num_logits,
  // vocab] for kLogits).
  virtual void read_tap(Workspace &ws, Tap tap, std::vector<float> *out) = 0;
};

// ---- checks shared by all backends (backend.cc) ----

// Every tensor present, of the shape that dims ask for and of a type this build computes with;
// throws Error(kModelMalformed or kModelUnsupported) that names the tensor, what was expected and
// what was found.
void check_tensors(const ModelDims &dims, const ModelTensors &tensors);

// The invariants of ForwardBatch against dims and the pool; throws Error(kInternal): a batch is
// always of our own making.
void check_batch(const ForwardBatch &batch, const ModelDims &dims, const KvView &kv);

}  // namespace xllm
