#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "small_model.h"

namespace xllm::check {

std::vector<uint8_t> random_cache(size_t num_bytes) {
  Random random(3);
  std::vector<uint8_t> bytes(num_bytes / 2 * 2);
  for (size_t i = 0; i < bytes.size(); i += 2) {
    const auto half =
        static_cast<uint16_t>(random.below(2) << 15 | (0x2800 + random.below(0x1400)));
    std::memcpy(bytes.data() + i, &half, 2);
  }
  return bytes;
}

void make_rope(ModelDims *dims, double theta, int max_positions) {
  const int pairs = dims->head_dim / 2;
  dims->rope.rotary_dim = dims->head_dim;
  const int num_coarse = (max_positions + RopeTables::kFine - 1) / RopeTables::kFine;
  const auto fill = [&](std::vector<float> *table, int rows, int stride) {
    for (int i = 0; i < rows; ++i) {
      for (int f = 0; f < pairs; ++f) {
        const double angle =
            static_cast<double>(i) * stride * std::pow(theta, -2.0 * f / dims->head_dim);
        table->push_back(static_cast<float>(std::cos(angle)));
        table->push_back(static_cast<float>(std::sin(angle)));
      }
    }
  };
  fill(&dims->rope.coarse, num_coarse, RopeTables::kFine);
  fill(&dims->rope.fine, RopeTables::kFine, 1);
}

std::unique_ptr<HostModel> make_model(const ModelConfig &c, uint64_t seed) {
  auto model = std::make_unique<HostModel>();
  ModelDims &dims = model->dims;
  dims.num_layers = c.num_layers;
  dims.hidden_size = c.hidden;
  dims.intermediate_size = c.inner;
  dims.num_heads = c.heads;
  dims.num_kv_heads = c.kv_heads;
  dims.head_dim = c.head_dim;
  dims.vocab_size = c.vocab;
  dims.rms_eps = 1e-5f;
  dims.attention_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim)));
  dims.sliding_window = c.window;
  make_rope(&dims, 10000, 32768);
  dims.rope.is_neighbor = c.is_neighbor;
  const auto matrix = [&](DType type, int64_t rows, int64_t cols, double gain,
                          const std::string &name) {
    return model->keep(
        random_matrix(type, rows, cols, gain / std::sqrt(static_cast<double>(cols)), ++seed, name));
  };
  const auto vector = [&](int64_t size, double mean, double sigma) {
    return model->keep(random_vector(size, mean, sigma, ++seed));
  };
  ModelTensors &t = model->tensors;
  t.embedding = matrix(c.embedding, c.vocab, c.hidden,
                       std::sqrt(static_cast<double>(c.hidden)) * 0.5, "token_embd.weight");
  const int64_t q_rows = int64_t{c.heads} * c.head_dim, kv_rows = int64_t{c.kv_heads} * c.head_dim;
  for (int i = 0; i < c.num_layers; ++i) {
    LayerTensors layer;
    layer.attn_norm = vector(c.hidden, 1, 0.2);
    layer.q = matrix(c.q, q_rows, c.hidden, 1, "q");
    layer.k = matrix(c.q, kv_rows, c.hidden, 1, "k");
    layer.v = matrix(c.v, kv_rows, c.hidden, 1, "v");
    if (c.has_bias) {
      layer.q_bias = vector(q_rows, 0, 0.5);
      layer.k_bias = vector(kv_rows, 0, 2);
      layer.v_bias = vector(kv_rows, 0, 0.5);
    }
    if (c.has_head_norm) {
      layer.q_norm = vector(c.head_dim, 1, 0.2);
      layer.k_norm = vector(c.head_dim, 1, 0.2);
    }
    layer.o = matrix(c.o, c.hidden, q_rows, 1, "o");
    if (c.has_o_bias) layer.o_bias = vector(c.hidden, 0, 0.1);
    layer.ffn_norm = vector(c.hidden, 1, 0.2);
    layer.gate = matrix(c.gate, c.inner, c.hidden, 1, "gate");
    layer.up = matrix(c.gate, c.inner, c.hidden, 1, "up");
    layer.down = matrix(c.down, c.hidden, c.inner, 1, "down");
    t.layers.push_back(layer);
  }
  t.output_norm = vector(c.hidden, 1, 0.2);
  t.head = c.is_tied ? t.embedding : matrix(c.head, c.vocab, c.hidden, 2, "output.weight");
  return model;
}

TestEngine::TestEngine(cuda::CudaBackend *device, const HostModel &host, int block_size,
                       int num_blocks, int max_seqs, uint64_t seed)
    : backend(device), model(&host), pool([&] {
        KvLayout layout;
        layout.num_layers = host.dims.num_layers;
        layout.num_kv_heads = host.dims.num_kv_heads;
        layout.head_dim = host.dims.head_dim;
        layout.block_size = block_size;
        return layout.block_bytes() * static_cast<uint64_t>(num_blocks);
      }()) {
  kv.layout.num_layers = host.dims.num_layers;
  kv.layout.num_kv_heads = host.dims.num_kv_heads;
  kv.layout.head_dim = host.dims.head_dim;
  kv.layout.block_size = block_size;
  kv.base = pool.data();
  kv.num_blocks = num_blocks;
  weights = backend->load_weights(host.dims, host.tensors, WeightForm::kRaw, {});
  workspace = backend->make_workspace(*weights, max_seqs);
  free_blocks.resize(static_cast<size_t>(num_blocks));
  std::iota(free_blocks.begin(), free_blocks.end(), 0);
  Random random(seed);
  for (size_t i = free_blocks.size(); i > 1; --i)
    std::swap(free_blocks[i - 1],
              free_blocks[static_cast<size_t>(random.below(static_cast<int>(i)))]);
}

ForwardBatch TestEngine::batch(const std::vector<TestSequence *> &sequences,
                               const std::vector<int> &counts) {
  ForwardBatch b;
  const int block_size = kv.layout.block_size;
  b.query_start.push_back(0);
  for (size_t s = 0; s < sequences.size(); ++s) {
    TestSequence &seq = *sequences[s];
    const int end = seq.num_computed + counts[s];
    while (static_cast<int>(seq.blocks.size()) * block_size < end) {
      seq.blocks.push_back(free_blocks.back());
      free_blocks.pop_back();
    }
    for (int p = seq.num_computed; p < end; ++p) {
      b.token_ids.push_back(seq.tokens[static_cast<size_t>(p)]);
      b.positions.push_back(p);
      b.seq_index.push_back(static_cast<int32_t>(s));
      b.kv_indices.push_back(int64_t{seq.blocks[static_cast<size_t>(p / block_size)]} * block_size +
                             p % block_size);
      b.paths.push_back(TokenPath::kInteger);
    }
    b.query_start.push_back(b.num_tokens());
    b.context_len.push_back(end);
    b.sampler_row.push_back(static_cast<int32_t>(s));
    b.max_blocks = std::max(b.max_blocks, static_cast<int>(seq.blocks.size()));
    b.logit_rows.push_back(b.num_tokens() - 1);
  }
  b.block_tables.assign(sequences.size() * static_cast<size_t>(b.max_blocks), -1);
  for (size_t s = 0; s < sequences.size(); ++s) {
    std::copy(sequences[s]->blocks.begin(), sequences[s]->blocks.end(),
              b.block_tables.begin() + static_cast<long>(s) * b.max_blocks);
  }
  check_batch(b, model->dims, kv);
  return b;
}

void TestEngine::forward(const ForwardBatch &b) {
  backend->run_step(*workspace, b, [&] {
    backend->embed(*workspace, *weights, b);
    for (int layer = 0; layer < model->dims.num_layers; ++layer) {
      backend->qkv(*workspace, *weights, layer, kv, b);
      backend->attention(*workspace, *weights, layer, kv, b);
      backend->o_proj(*workspace, *weights, layer, b);
      backend->ffn(*workspace, *weights, layer, b);
    }
    backend->head(*workspace, *weights, b);
  });
}

std::vector<float> TestEngine::step(const std::vector<TestSequence *> &sequences,
                                    const std::vector<int> &counts) {
  const ForwardBatch b = batch(sequences, counts);
  forward(b);
  const float *logits = backend->host_logits(*workspace);
  for (size_t s = 0; s < sequences.size(); ++s) sequences[s]->num_computed += counts[s];
  return std::vector<float>(
      logits, logits + sequences.size() * static_cast<size_t>(model->dims.vocab_size));
}

void TestEngine::release(TestSequence *sequence) {
  for (const int32_t block : sequence->blocks) free_blocks.insert(free_blocks.begin(), block);
  sequence->blocks.clear();
  sequence->num_computed = 0;
}

}  // namespace xllm::check
