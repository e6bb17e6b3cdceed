// A token for every row of logits, on the device. Rows that want logprobs are left to the host,
// whose sampler gives the same tokens.
#include <algorithm>
#include <cstring>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/sample.cuh"
#include "backend/cuda/sample_draw.cuh"
#include "base/rng.h"

namespace xllm::cuda {
namespace {

static_assert(sizeof(DeviceCount) == sizeof(TokenCount) && sizeof(DeviceBias) == sizeof(TokenBias),
              "copied as they are");

// What the rows of one step need besides their logits.
struct Wishes {
  size_t num_adjusted = 0, num_masks = 0, num_biases = 0, num_counts = 0;
  bool has_draws = false, has_selections = false;
};

bool is_adjusted(const SampleRow &row) {
  return !row.counts.empty() || !row.biases.empty() || row.mask != nullptr;
}

Wishes wishes_of(Span<const SampleRow> rows) {
  Wishes wishes;
  for (const SampleRow &row : rows) {
    wishes.num_adjusted += is_adjusted(row) ? 1 : 0;
    wishes.num_masks += row.mask != nullptr ? 1 : 0;
    wishes.num_biases += row.biases.size();
    wishes.num_counts += row.counts.size();
    if (row.temperature == 0) continue;
    wishes.has_draws = true;
    wishes.has_selections |= row.top_p < 1 || (row.top_k > 0 && row.top_k < row.num_choosable);
  }
  return wishes;
}

// Lays things out in a buffer one after the other, each on 16 bytes.
class Layout {
 public:
  template <typename T>
  size_t add(size_t count) {
    const size_t at = size_;
    size_ = (size_ + count * sizeof(T) + 15) / 16 * 16;
    return at;
  }
  size_t size() const { return size_; }

 private:
  size_t size_ = 0;
};

}  // namespace

uint64_t CudaWorkspace::sampler_bytes(int64_t vocab, int64_t rows) {
  const auto n = static_cast<uint64_t>(rows);
  return n * (kBins * 12 + kSampleParts * (sizeof(Candidate) + 8) + sizeof(Candidate) + 8) +
         n * static_cast<uint64_t>(vocab) * sizeof(float);
}

CudaWorkspace::SampleBatch &CudaWorkspace::next_sample_batch(size_t num_rows, size_t num_bytes) {
  SampleBatch &batch = sample_batches_[num_sample_starts % 2];
  check(cudaEventSynchronize(batch.is_done), "stage how to sample");
  if (batch.upload.size_bytes() < num_bytes) batch.upload = PinnedBuffer(2 * num_bytes);
  if (batch.chosen.size_bytes() < num_rows * sizeof(int32_t))
    batch.chosen = PinnedBuffer(2 * num_rows * sizeof(int32_t));
  grow(&batch.wishes, batch.upload.size_bytes());
  batch.num_rows = num_rows;
  return batch;
}

CudaWorkspace::SampleBatch &CudaWorkspace::oldest_sample_batch() {
  XLLM_DCHECK(num_sample_ends_ < num_sample_starts);
  return sample_batches_[num_sample_ends_++ % 2];
}

void CudaWorkspace::reserve_sampler(size_t num_rows, size_t num_adjusted, bool has_selections) {
  grow(&sample_parts, num_rows * (kSampleParts * (sizeof(Candidate) + 8) + sizeof(Candidate) + 8));
  grow(&adjusted, num_adjusted * static_cast<uint64_t>(weights->dims.vocab_size) * sizeof(float));
  if (has_selections && num_bin_rows < num_rows) {
    grow(&bins, num_rows * kBins * 12);
    num_bin_rows = num_rows;
    check(cudaMemsetAsync(bins.data(), 0, bins.size_bytes(), stream), "clear bins");
  }
}

bool CudaBackend::start_sample(Workspace &ws_base, const ForwardBatch &batch,
                               Span<const SampleRow> rows) {
  CudaWorkspace &ws = as_cuda(ws_base);
  const size_t n = rows.size();
  if (n == 0 || n != static_cast<size_t>(batch.num_logits())) return false;
  for (const SampleRow &row : rows) {
    if (row.num_logprobs > 0) return false;
  }
  check(cudaSetDevice(device_.index), "select the device");
  const int vocab = ws.weights->dims.vocab_size;
  const size_t mask_words = (static_cast<size_t>(vocab) + 31) / 32;
  const Wishes wishes = wishes_of(rows);

  Layout layout;
  const size_t params_at = layout.add<SampleParams>(n);
  const size_t biases_at = layout.add<DeviceBias>(wishes.num_biases);
  const size_t counts_at = layout.add<DeviceCount>(wishes.num_counts);
  const size_t masks_at = layout.add<uint32_t>(wishes.num_masks * mask_words);
  CudaWorkspace::SampleBatch &staged = ws.next_sample_batch(n, layout.size());
  auto *host = staged.upload.data<uint8_t>();
  auto *params = reinterpret_cast<SampleParams *>(host + params_at);
  size_t num_adjusted = 0, num_masks = 0, num_biases = 0, num_counts = 0;
  for (size_t i = 0; i < n; ++i) {
    const SampleRow &row = rows[i];
    const Philox random = philox(row.seed, row.position);
    SampleParams p = {};
    p.random = uint64_t{random.value[0]} << 32 | random.value[1];
    p.temperature = row.temperature;
    p.top_p = row.top_p;
    p.min_p = row.min_p;
    p.repetition_penalty = row.repetition_penalty;
    p.frequency_penalty = row.frequency_penalty;
    p.presence_penalty = row.presence_penalty;
    p.top_k = row.top_k;
    p.num_choosable = std::min(vocab, row.num_choosable);
    p.adjusted = is_adjusted(row) ? static_cast<int32_t>(num_adjusted++) : -1;
    p.mask = row.mask != nullptr ? static_cast<int32_t>(num_masks++) : -1;
    p.first_bias = static_cast<int32_t>(num_biases);
    p.num_biases = static_cast<int32_t>(row.biases.size());
    p.first_count = static_cast<int32_t>(num_counts);
    p.num_counts = static_cast<int32_t>(row.counts.size());
    params[i] = p;
    const auto copy = [&](size_t at, const void *from, size_t bytes) {
      if (bytes > 0) std::memcpy(host + at, from, bytes);
    };
    copy(biases_at + num_biases * sizeof(DeviceBias), row.biases.data(),
         row.biases.size() * sizeof(DeviceBias));
    copy(counts_at + num_counts * sizeof(DeviceCount), row.counts.data(),
         row.counts.size() * sizeof(DeviceCount));
    if (row.mask != nullptr) {
      copy(masks_at + (num_masks - 1) * mask_words * sizeof(uint32_t), row.mask,
           (static_cast<size_t>(p.num_choosable) + 31) / 32 * sizeof(uint32_t));
    }
    num_biases += row.biases.size();
    num_counts += row.counts.size();
  }
  auto *device = staged.wishes.data<uint8_t>();
  check(cudaMemcpyAsync(device, host, layout.size(), cudaMemcpyHostToDevice, stream_),
        "copy how to sample");

  ws.reserve_sampler(n, wishes.num_adjusted, wishes.has_selections);
  SampleArgs args = {};
  args.logits = ws.logits.data<float>();
  args.vocab = vocab;
  args.params = reinterpret_cast<const SampleParams *>(device + params_at);
  args.biases = reinterpret_cast<const DeviceBias *>(device + biases_at);
  args.counts = reinterpret_cast<const DeviceCount *>(device + counts_at);
  args.masks = reinterpret_cast<const uint32_t *>(device + masks_at);
  args.adjusted = ws.adjusted.data<float>();
  args.parts = ws.sample_parts.data<Candidate>();
  args.part_sums = reinterpret_cast<uint64_t *>(args.parts + n * kSampleParts);
  args.last_ranks = args.part_sums + n * kSampleParts;
  args.best = reinterpret_cast<Candidate *>(args.last_ranks + n);
  args.bin_sums = ws.bins.data<uint64_t>();
  args.bin_counts = reinterpret_cast<uint32_t *>(args.bin_sums + ws.num_bin_rows * kBins);
  args.logit_rows = ws.batch.logit_rows;
  args.sampler_rows = ws.batch.sampler_rows;
  args.chosen = ws.chosen.data<int32_t>();
  args.sampled = ws.sampled.data<int32_t>();

  const dim3 per_row(static_cast<unsigned>(n));
  const dim3 parts(kSampleParts, static_cast<unsigned>(n));
  const Launch on = launch();
  if (wishes.num_adjusted > 0) {
    launch_kernel(on, "copy_logits", copy_logits_kernel, parts, kSampleThreads, 0, args);
    launch_kernel(on, "adjust_logits", adjust_logits_kernel, per_row, kSampleThreads, 0, args);
  }
  launch_kernel(on, "best_parts", best_parts_kernel, parts, kSampleThreads, 0, args);
  launch_kernel(on, "best_rows", best_rows_kernel, per_row, kWarp, 0, args);
  if (wishes.has_draws) {
    if (wishes.has_selections)
      launch_kernel(on, "bin_logits", bin_logits_kernel, parts, kSampleThreads, 0, args);
    launch_kernel(on, "select", select_kernel, per_row, kSelectThreads, sizeof(SelectMemory), args);
    launch_kernel(on, "weigh_parts", weigh_parts_kernel, parts, kSampleThreads, 0, args);
    launch_kernel(on, "draw", draw_kernel, per_row, kSelectThreads, 0, args);
  }
  check(cudaMemcpyAsync(staged.chosen.data<int32_t>(), ws.chosen.data(), n * sizeof(int32_t),
                        cudaMemcpyDeviceToHost, stream_),
        "read chosen tokens");
  check(cudaEventRecord(staged.is_done, stream_), "read chosen tokens");
  ++ws.num_sample_starts;
  return true;
}

void CudaBackend::finish_sample(Workspace &ws_base, Span<int32_t> token_ids) {
  CudaWorkspace &ws = as_cuda(ws_base);
  CudaWorkspace::SampleBatch &staged = ws.oldest_sample_batch();
  XLLM_DCHECK(token_ids.size() == staged.num_rows);
  check(cudaEventSynchronize(staged.is_done), "wait for chosen tokens");
  std::copy_n(staged.chosen.data<int32_t>(), token_ids.size(), token_ids.begin());
}

bool CudaBackend::sample(Workspace &ws, const ForwardBatch &batch, Span<const SampleRow> rows,
                         Span<int32_t> token_ids) {
  if (token_ids.size() != rows.size() || !start_sample(ws, batch, rows)) return false;
  finish_sample(ws, token_ids);
  return true;
}

}  // namespace xllm::cuda
