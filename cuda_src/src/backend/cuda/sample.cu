// Greedy choice on the device; anything else is left to the host.
#include <algorithm>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/sample.cuh"

namespace xllm::cuda {
namespace {

bool is_greedy(const SampleRow &row) {
  return row.temperature == 0 && row.counts.empty() && row.biases.empty() && row.mask == nullptr &&
         row.num_logprobs == 0;
}

}  // namespace

bool CudaBackend::sample(Workspace &ws_base, const ForwardBatch &batch, Span<const SampleRow> rows,
                         Span<int32_t> token_ids) {
  CudaWorkspace &ws = as_cuda(ws_base);
  const size_t n = rows.size();
  if (n == 0 || n != static_cast<size_t>(batch.num_logits()) || token_ids.size() != n) return false;
  for (const SampleRow &row : rows) {
    if (!is_greedy(row) || row.num_choosable != rows[0].num_choosable) return false;
  }
  check(cudaSetDevice(device_.index), "select the device");
  const int vocab = ws.weights->dims.vocab_size;
  const int num_choosable = std::min(vocab, rows[0].num_choosable);
  launch_kernel(launch(), "argmax_parts", argmax_parts_kernel,
                dim3(kArgmaxParts, static_cast<unsigned>(n)), kArgmaxThreads, 0,
                static_cast<const float *>(ws.logits.data<float>()), vocab, num_choosable,
                ws.argmax.data<Candidate>());
  launch_kernel(launch(), "argmax_rows", argmax_rows_kernel, dim3(static_cast<unsigned>(n)), kWarp,
                0, static_cast<const Candidate *>(ws.argmax.data<Candidate>()),
                static_cast<const int32_t *>(ws.batch.logit_rows),
                static_cast<const int32_t *>(ws.batch.sampler_rows), ws.chosen.data<int32_t>(),
                ws.sampled.data<int32_t>());
  const size_t bytes = n * sizeof(int32_t);
  if (ws.host_chosen.size_bytes() < bytes)
    ws.host_chosen = PinnedBuffer(std::max<size_t>(bytes, 256));
  check(cudaMemcpyAsync(ws.host_chosen.data<int32_t>(), ws.chosen.data(), bytes,
                        cudaMemcpyDeviceToHost, stream_),
        "read chosen tokens");
  synchronize();
  std::copy_n(ws.host_chosen.data<int32_t>(), n, token_ids.begin());
  return true;
}

}  // namespace xllm::cuda
