// Synthetic models in host memory, a KV pool with shuffled blocks, and the batches of a few
// sequences: enough of an engine to drive a Backend through whole steps.
#pragma once

#include <deque>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "device_array.h"
#include "quant_blocks.h"

namespace xllm::check {

struct ModelConfig {
  std::string name;
  int num_layers = 2;
  int hidden = 512, inner = 768, heads = 8, kv_heads = 2, head_dim = 64, vocab = 1000;
  DType q = DType::kQ4_K, v = DType::kQ6_K, o = DType::kQ4_K, gate = DType::kQ4_K,
        down = DType::kQ6_K, embedding = DType::kQ4_K, head = DType::kQ6_K;
  bool has_bias = false, has_head_norm = false, is_tied = false, is_neighbor = false,
       has_o_bias = false;
  int window = 0;
  int block_size = 16;
};

struct HostModel {
  ModelDims dims;
  ModelTensors tensors;
  std::deque<HostMatrix> storage;

  const MatrixView &keep(HostMatrix matrix) {
    storage.push_back(std::move(matrix));
    storage.back().view.data = storage.back().bytes.data();
    return storage.back().view;
  }
};

// Keys and values for a cache whose content nobody computes: f16, finite, of either sign.
std::vector<uint8_t> random_cache(size_t num_bytes);
void make_rope(ModelDims *dims, double theta, int max_positions);
std::unique_ptr<HostModel> make_model(const ModelConfig &config, uint64_t seed);

// One sequence of a test: its tokens so far and its blocks.
struct TestSequence {
  std::vector<int32_t> tokens;
  std::vector<int32_t> blocks;
  int num_computed = 0;
};

class TestEngine {
 public:
  TestEngine(cuda::CudaBackend *backend, const HostModel &model, int block_size, int num_blocks,
             int max_seqs, uint64_t seed);

  // A batch of the next `counts[i]` tokens of `sequences[i]`; logits of each sequence's last row.
  ForwardBatch batch(const std::vector<TestSequence *> &sequences, const std::vector<int> &counts);
  void forward(const ForwardBatch &batch);
  // batch + forward; returns the logits, [sequences][vocab].
  std::vector<float> step(const std::vector<TestSequence *> &sequences,
                          const std::vector<int> &counts);
  void release(TestSequence *sequence);

  cuda::CudaBackend *backend;
  const HostModel *model;
  std::unique_ptr<WeightSet> weights;
  std::unique_ptr<Workspace> workspace;
  KvView kv;
  DeviceArray<uint8_t> pool;
  std::vector<int32_t> free_blocks;
};

}  // namespace xllm::check
