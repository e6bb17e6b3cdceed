#include <algorithm>
#include <cstring>

#include "backend/cuda/attention_splits.cuh"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/cuda_workspace.h"

namespace xllm::cuda {
namespace {

// Rows of activations come in whole passes of the widest matrix kernel, so that it may read past
// the last token.
constexpr int kRowGranule = 64;
// Partial results of attention: enough for 32 rows of 32 heads at the longest context, or 128 where
// that is a thousandth of the device's memory; more rows take turns.
constexpr int64_t kMinSplitEntries = 65536, kMaxSplitEntries = 262144;

int64_t padded(int64_t rows) { return (rows + kRowGranule - 1) / kRowGranule * kRowGranule; }
uint64_t bytes_of(int64_t count, uint64_t size) { return static_cast<uint64_t>(count) * size; }
int64_t q_cols(const ModelDims &dims) { return int64_t{dims.num_heads} * dims.head_dim; }
int64_t qkv_cols(const ModelDims &dims) {
  return (int64_t{dims.num_heads} + 2 * dims.num_kv_heads) * dims.head_dim;
}
uint64_t split_entry_bytes(const ModelDims &dims) {
  return static_cast<uint64_t>(dims.head_dim) * sizeof(float) + sizeof(float2) + sizeof(int);
}
int64_t wanted_split_entries(const Device &device, const ModelDims &dims) {
  const auto fit = static_cast<int64_t>(device.memory_bytes / 1024 / split_entry_bytes(dims));
  return std::max(std::clamp(fit, kMinSplitEntries, kMaxSplitEntries),
                  int64_t{dims.num_heads} * kMaxSplits);
}

// Of the products whose slices are spread over CTAs (matmul.h).
uint64_t partial_bytes(const ModelDims &dims, int64_t rows) {
  const uint64_t most =
      std::max({partial_floats(qkv_cols(dims), dims.hidden_size, rows),
                partial_floats(dims.hidden_size, q_cols(dims), rows),
                partial_floats(dims.hidden_size, dims.intermediate_size, rows),
                partial_floats(dims.vocab_size, dims.hidden_size, rows),
                partial_floats(2 * int64_t{dims.intermediate_size}, dims.hidden_size, rows)});
  return most * sizeof(float);
}

// Of the activations of the widest product, in groups of 8 rows.
uint64_t act_bytes(const ModelDims &dims, int64_t rows) {
  const int64_t cols = std::max<int64_t>({dims.hidden_size, q_cols(dims), dims.intermediate_size});
  return bytes_of((rows + kActGroup - 1) / kActGroup * ((cols + kActCols - 1) / kActCols),
                  kActChunkBytes);
}

constexpr int64_t kBatchRowBytes = 8 + 6 * 4;

// Rows of logits that a step of `n` sequences takes: whole calls of cuBLAS, or the largest graph's.
int64_t logit_rows_for(int64_t n, bool is_f32) {
  if (is_f32)
    return (std::max<int64_t>(n, 1) + Sgemm::kTokens - 1) / Sgemm::kTokens * Sgemm::kTokens;
  return n <= 8 ? 8 : padded(n);
}

// Of the block tables, to begin with: a few thousand tokens for each sequence. They grow with the
// longest context, by four bytes for a block.
int64_t first_table_entries(int64_t seqs) { return std::max<int64_t>(1024, 64 * seqs); }

}  // namespace

CudaWorkspace::CudaWorkspace(const Device &device, const CudaWeights &set, DeviceAllocator *memory,
                             cudaStream_t on, int seqs, std::shared_ptr<const CublasLibrary> cublas)
    : weights(&set), allocator(memory), stream(on), max_seqs(seqs) {
  const ModelDims &dims = set.dims;
  if (is_f32()) {
    f32.sgemm = std::make_unique<Sgemm>(std::move(cublas), allocator, stream);
  } else {
    split_entries = wanted_split_entries(device, dims);
    split_out = Buffer(
        allocator, bytes_of(split_entries, static_cast<uint64_t>(dims.head_dim) * sizeof(float)));
    split_stats = Buffer(allocator, bytes_of(split_entries, sizeof(float2)));
    split_counters = Buffer(allocator, bytes_of(split_entries, sizeof(int)));
    check(cudaMemsetAsync(split_counters.data(), 0, split_counters.size_bytes(), stream),
          "clear counters");
  }
  sampled = Buffer(allocator, bytes_of(seqs, sizeof(int32_t)));
  check(cudaMemsetAsync(sampled.data(), 0, sampled.size_bytes(), stream), "clear ids");
  for (Staging &staging : staging_)
    check(cudaEventCreateWithFlags(&staging.is_free, cudaEventDisableTiming), "create an event");
  for (SampleBatch &samples : sample_batches_)
    check(cudaEventCreateWithFlags(&samples.is_done, cudaEventDisableTiming), "create an event");
}

CudaWorkspace::~CudaWorkspace() {
  (void)cudaStreamSynchronize(stream);
  drop_graphs();
  for (Staging &staging : staging_) {
    if (staging.is_free != nullptr) (void)cudaEventDestroy(staging.is_free);
  }
  for (SampleBatch &samples : sample_batches_) {
    if (samples.is_done != nullptr) (void)cudaEventDestroy(samples.is_done);
  }
}

void CudaWorkspace::drop_graphs() {
  for (auto &entry : graphs) {
    if (entry.second.exec != nullptr) (void)cudaGraphExecDestroy(entry.second.exec);
  }
  graphs.clear();
}

uint64_t CudaWorkspace::size_bytes() const {
  uint64_t total = is_f32() ? f32.sgemm->size_bytes() : 0;
  for (const Buffer *buffer : {&x,
                               &qkv,
                               &q,
                               &attention_out,
                               &ffn,
                               &head_rows,
                               &logits,
                               &act,
                               &partials,
                               &split_out,
                               &split_stats,
                               &split_counters,
                               &f32.act,
                               &f32.q,
                               &batch_memory,
                               &sampled,
                               &chosen,
                               &sample_parts,
                               &bins,
                               &adjusted,
                               &sample_batches_[0].wishes,
                               &sample_batches_[1].wishes}) {
    total += buffer->size_bytes();
  }
  return total;
}

uint64_t CudaWorkspace::plan_bytes(const Device &device, const ModelDims &dims, WeightForm form,
                                   bool is_gate_unfused, int num_rows, int max_seqs) {
  const bool is_f32 = form == WeightForm::kDequantized;
  const int64_t rows = padded(std::max(num_rows, 1)), logits = logit_rows_for(max_seqs, is_f32);
  const auto floats = [](int64_t count, int64_t cols) {
    return bytes_of(count, sizeof(float)) * static_cast<uint64_t>(cols);
  };
  uint64_t total = floats(rows, dims.hidden_size + qkv_cols(dims) + q_cols(dims));
  total += floats(rows, (is_gate_unfused ? 2 : 1) * int64_t{dims.intermediate_size});
  total += floats(logits, dims.vocab_size) + floats(logits, dims.hidden_size);
  if (is_f32) {
    total += Sgemm::kWorkspaceBytes + floats(rows, dims.hidden_size + q_cols(dims));
  } else {
    total += bytes_of(rows, 2) * static_cast<uint64_t>(q_cols(dims));
    total += partial_bytes(dims, rows) + act_bytes(dims, rows);
    total += bytes_of(wanted_split_entries(device, dims), split_entry_bytes(dims));
  }
  total += bytes_of(rows, kBatchRowBytes) + bytes_of(first_table_entries(max_seqs), 4);
  return total + sampler_bytes(dims.vocab_size, std::max(max_seqs, 1));
}

void CudaWorkspace::reserve_all(int num_rows) {
  const int seqs = std::max(max_seqs, 1);
  reserve(std::max(num_rows, 1), seqs, first_table_entries(seqs));
  reserve_sampler(static_cast<size_t>(seqs), static_cast<size_t>(seqs), true);
}

void CudaWorkspace::grow(Buffer *buffer, uint64_t bytes) {
  if (buffer->size_bytes() >= bytes) return;
  *buffer = Buffer();  // the old one goes first: both at once might not fit
  *buffer = Buffer(allocator, bytes);
}

void CudaWorkspace::reserve(int rows, int logit_rows, int64_t num_table_entries) {
  const ModelDims &dims = weights->dims;
  const bool grows =
      rows > row_capacity_ || logit_rows > logit_capacity_ || num_table_entries > table_capacity_;
  if (!grows) return;
  check(cudaStreamSynchronize(stream), "finish a step");
  drop_graphs();
  if (rows > row_capacity_) {
    const int64_t n = padded(rows);
    row_capacity_ = 0;
    grow(&x, bytes_of(n, 4) * static_cast<uint64_t>(dims.hidden_size));
    grow(&qkv, bytes_of(n, 4) * static_cast<uint64_t>(qkv_cols(dims)));
    grow(&attention_out, bytes_of(n, 4) * static_cast<uint64_t>(q_cols(dims)));
    grow(&ffn, bytes_of(n, weights->is_gate_unfused() ? 8 : 4) *
                   static_cast<uint64_t>(dims.intermediate_size));
    if (is_f32()) {
      grow(&f32.act, bytes_of(n, 4) * static_cast<uint64_t>(dims.hidden_size));
      grow(&f32.q, bytes_of(n, 4) * static_cast<uint64_t>(q_cols(dims)));
    } else {
      grow(&q, bytes_of(n, 2) * static_cast<uint64_t>(q_cols(dims)));
      grow(&partials, partial_bytes(dims, n));
      grow(&act, act_bytes(dims, n));
      // A group of 8 may be read whole where it has fewer rows.
      check(cudaMemsetAsync(act.data(), 0, act.size_bytes(), stream), "clear activations");
    }
    row_capacity_ = static_cast<int>(n);
  }
  if (logit_rows > logit_capacity_) {
    const int64_t n = logit_rows_for(logit_rows, is_f32());
    logit_capacity_ = 0;
    grow(&logits, bytes_of(n, 4) * static_cast<uint64_t>(dims.vocab_size));
    grow(&head_rows, bytes_of(n, 4) * static_cast<uint64_t>(dims.hidden_size));
    grow(&chosen, bytes_of(n, 4));
    logit_capacity_ = static_cast<int>(n);
  }
  int64_t tables = table_capacity_;
  while (tables < num_table_entries) tables = std::max<int64_t>(1024, tables * 2);
  table_capacity_ = 0;
  const int64_t n = row_capacity_;
  const uint64_t bytes = bytes_of(n, kBatchRowBytes) + bytes_of(tables, 4);
  grow(&batch_memory, bytes);
  for (Staging &staging : staging_) {
    if (staging.memory.size_bytes() < bytes) staging.memory = PinnedBuffer(bytes);
  }
  batch.kv_indices = batch_memory.data<int64_t>();
  batch.token_ids = reinterpret_cast<int32_t *>(batch.kv_indices + n);
  batch.positions = batch.token_ids + n;
  batch.row_tables = batch.positions + n;
  batch.sampler_rows = batch.row_tables + n;
  batch.logit_rows = batch.sampler_rows + n;
  batch.tiles = batch.logit_rows + n;
  batch.tables = batch.tiles + n;
  table_capacity_ = tables;
}

void CudaWorkspace::upload(const ForwardBatch &from, int padded_rows) {
  Staging &staging = staging_[next_staging_];
  next_staging_ = (next_staging_ + 1) % 4;
  check(cudaEventSynchronize(staging.is_free), "stage the batch");
  const auto n = static_cast<size_t>(row_capacity_);
  const auto num_tokens = static_cast<size_t>(from.num_tokens());
  auto *kv_indices = staging.memory.data<int64_t>();
  auto *token_ids = reinterpret_cast<int32_t *>(kv_indices + n);
  int32_t *positions = token_ids + n, *row_tables = positions + n, *sampler_rows = row_tables + n,
          *logit_rows = sampler_rows + n, *tiles = logit_rows + n, *tables = tiles + n;
  for (size_t i = 0; i < static_cast<size_t>(padded_rows); ++i) {
    const bool is_real = i < num_tokens;
    const int32_t seq = is_real ? from.seq_index[i] : 0;
    kv_indices[i] = is_real ? from.kv_indices[i] : -1;
    token_ids[i] = is_real ? from.token_ids[i] : 0;
    positions[i] = is_real ? from.positions[i] : -1;
    row_tables[i] = is_real ? seq * from.max_blocks : 0;
    sampler_rows[i] = is_real ? from.sampler_row[static_cast<size_t>(seq)] : 0;
  }
  if (!from.logit_rows.empty())
    std::memcpy(logit_rows, from.logit_rows.data(), from.logit_rows.size() * sizeof(int32_t));
  for (size_t i = 0; i < prompt.tiles.size(); ++i) tiles[i] = pack_tile(prompt.tiles[i]);
  std::memcpy(tables, from.block_tables.data(), from.block_tables.size() * sizeof(int32_t));
  const auto bytes =
      static_cast<size_t>(reinterpret_cast<uint8_t *>(tables + from.block_tables.size()) -
                          staging.memory.data<uint8_t>());
  check(cudaMemcpyAsync(batch_memory.data(), staging.memory.data<uint8_t>(), bytes,
                        cudaMemcpyHostToDevice, stream),
        "copy the batch");
  check(cudaEventRecord(staging.is_free, stream), "copy the batch");
}

}  // namespace xllm::cuda
