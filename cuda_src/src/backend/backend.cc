#include "backend/backend.h"

#include <string>

#include "base/error.h"

namespace xllm {
namespace {

std::string shape_text(int64_t rows, int64_t cols) {
  return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

enum class Need { kRequired, kOptional };

// `rows` x `cols` exactly; min_rows where at least that many rows will do.
void check_shape(const MatrixView &tensor, const std::string &name, int64_t rows, int64_t cols,
                 bool is_min_rows) {
  if (!tensor) {
    throw Error(Status::kModelMalformed,
                name + ": missing, expected " + shape_text(rows, cols) +
                    "; the file is incomplete, convert or download it again",
                {{"tensor", name}});
  }
  const DTypeInfo *info = find_dtype_info(static_cast<uint32_t>(tensor.dtype));
  if (info == nullptr) {
    throw Error(Status::kModelUnsupported,
                name + ": tensor type " + std::to_string(static_cast<uint32_t>(tensor.dtype)) +
                    " is not known to this build; use a file of a supported type",
                {{"tensor", name}});
  }
  const bool has_rows = is_min_rows ? tensor.rows >= rows : tensor.rows == rows;
  if (!has_rows || tensor.cols != cols) {
    throw Error(Status::kModelMalformed,
                name + ": expected " + (is_min_rows ? "at least " : "") + shape_text(rows, cols) +
                    ", found " + info->name + " " + shape_text(tensor.rows, tensor.cols),
                {{"tensor", name}});
  }
  if (cols % info->block_elems != 0) {
    throw Error(Status::kModelMalformed,
                name + ": " + info->name + " rows are whole blocks of " +
                    std::to_string(info->block_elems) + ", found " + std::to_string(cols) +
                    " columns",
                {{"tensor", name}});
  }
}

void check_matrix(const MatrixView &tensor, const std::string &name, int64_t rows, int64_t cols) {
  check_shape(tensor, name, rows, cols, false);
}

// Norm weights and biases: one row of plain floats.
void check_vector(const MatrixView &tensor, const std::string &name, int64_t size,
                  Need need = Need::kRequired) {
  if (need == Need::kOptional && !tensor) return;
  check_shape(tensor, name, 1, size, false);
  if (!is_float(tensor.dtype)) {
    throw Error(Status::kModelUnsupported,
                name + ": expected f32, f16 or bf16, found " + dtype_info(tensor.dtype).name +
                    "; norms and biases are not computed from quantised blocks",
                {{"tensor", name}});
  }
}

void check_dims(const ModelDims &dims) {
  const auto require = [](bool holds, const std::string &what) {
    if (!holds) throw Error(Status::kModelMalformed, what);
  };
  const auto positive = [&](int value, const char *name) {
    require(value > 0,
            std::string(name) + ": expected a positive number, found " + std::to_string(value));
  };
  positive(dims.num_layers, "num_layers");
  positive(dims.hidden_size, "hidden_size");
  positive(dims.intermediate_size, "intermediate_size");
  positive(dims.num_heads, "num_heads");
  positive(dims.num_kv_heads, "num_kv_heads");
  positive(dims.head_dim, "head_dim");
  positive(dims.vocab_size, "vocab_size");
  require(dims.num_heads % dims.num_kv_heads == 0,
          "num_heads: expected a multiple of num_kv_heads, found " +
              std::to_string(dims.num_heads) + " and " + std::to_string(dims.num_kv_heads));
  require(dims.sliding_window >= 0,
          "sliding_window: expected 0 or more, found " + std::to_string(dims.sliding_window));
  const RopeTables &rope = dims.rope;
  require(rope.rotary_dim >= 0 && rope.rotary_dim % 2 == 0 && rope.rotary_dim <= dims.head_dim,
          "rope.rotary_dim: expected an even number up to head_dim " +
              std::to_string(dims.head_dim) + ", found " + std::to_string(rope.rotary_dim));
  const auto width = static_cast<size_t>(rope.rotary_dim);
  require(rope.fine.size() == width * RopeTables::kFine && rope.coarse.size() >= width &&
              (width == 0 || rope.coarse.size() % width == 0),
          "rope tables: expected " + std::to_string(RopeTables::kFine) +
              " fine rows and at least one coarse row of " + std::to_string(width) +
              " values, found " + std::to_string(rope.fine.size()) + " and " +
              std::to_string(rope.coarse.size()) + " values");
}

[[noreturn]] void bad_batch(const std::string &what) {
  throw Error(Status::kInternal, "batch: " + what);
}

void require(bool holds, const char *what) {
  if (!holds) bad_batch(what);
}

}  // namespace

void check_tensors(const ModelDims &dims, const ModelTensors &tensors) {
  check_dims(dims);
  const int64_t hidden = dims.hidden_size;
  const int64_t q_rows = int64_t{dims.num_heads} * dims.head_dim;
  const int64_t kv_rows = int64_t{dims.num_kv_heads} * dims.head_dim;
  if (static_cast<int64_t>(tensors.layers.size()) != dims.num_layers) {
    throw Error(Status::kModelMalformed, "expected " + std::to_string(dims.num_layers) +
                                             " layers of tensors, found " +
                                             std::to_string(tensors.layers.size()));
  }
  check_shape(tensors.embedding, "token_embd.weight", dims.vocab_size, hidden, true);
  for (int i = 0; i < dims.num_layers; ++i) {
    const LayerTensors &layer = tensors.layers[static_cast<size_t>(i)];
    const std::string prefix = "blk." + std::to_string(i) + ".";
    check_vector(layer.attn_norm, prefix + "attn_norm.weight", hidden);
    check_matrix(layer.q, prefix + "attn_q.weight", q_rows, hidden);
    check_matrix(layer.k, prefix + "attn_k.weight", kv_rows, hidden);
    check_matrix(layer.v, prefix + "attn_v.weight", kv_rows, hidden);
    check_vector(layer.q_bias, prefix + "attn_q.bias", q_rows, Need::kOptional);
    check_vector(layer.k_bias, prefix + "attn_k.bias", kv_rows, Need::kOptional);
    check_vector(layer.v_bias, prefix + "attn_v.bias", kv_rows, Need::kOptional);
    check_vector(layer.q_norm, prefix + "attn_q_norm.weight", dims.head_dim, Need::kOptional);
    check_vector(layer.k_norm, prefix + "attn_k_norm.weight", dims.head_dim, Need::kOptional);
    check_matrix(layer.o, prefix + "attn_output.weight", hidden, q_rows);
    check_vector(layer.o_bias, prefix + "attn_output.bias", hidden, Need::kOptional);
    check_vector(layer.ffn_norm, prefix + "ffn_norm.weight", hidden);
    check_matrix(layer.gate, prefix + "ffn_gate.weight", dims.intermediate_size, hidden);
    check_matrix(layer.up, prefix + "ffn_up.weight", dims.intermediate_size, hidden);
    check_matrix(layer.down, prefix + "ffn_down.weight", hidden, dims.intermediate_size);
  }
  check_vector(tensors.output_norm, "output_norm.weight", hidden);
  check_matrix(tensors.head,
               tensors.head.data == tensors.embedding.data ? "token_embd.weight" : "output.weight",
               dims.vocab_size, hidden);
}

void check_batch(const ForwardBatch &batch, const ModelDims &dims, const KvView &kv) {
  const auto num_tokens = static_cast<size_t>(batch.num_tokens());
  const auto num_seqs = static_cast<size_t>(batch.num_seqs());
  require(num_tokens > 0 && num_seqs > 0, "no tokens or no sequences");
  require(batch.positions.size() == num_tokens && batch.seq_index.size() == num_tokens &&
              batch.kv_indices.size() == num_tokens && batch.paths.size() == num_tokens,
          "per-token fields differ in length");
  require(batch.query_start.size() == num_seqs + 1 && batch.sampler_row.size() == num_seqs,
          "per-sequence fields differ in length");
  require(batch.max_blocks > 0 &&
              batch.block_tables.size() == num_seqs * static_cast<size_t>(batch.max_blocks),
          "block tables are not [num_seqs, max_blocks]");
  require(batch.query_start.front() == 0 && batch.query_start.back() == batch.num_tokens(),
          "query_start does not run from 0 to num_tokens");
  const KvLayout &layout = kv.layout;
  require(kv.base != nullptr && layout.num_layers == dims.num_layers &&
              layout.num_kv_heads == dims.num_kv_heads && layout.head_dim == dims.head_dim &&
              layout.block_size > 0,
          "the KV cache was laid out for another model");
  require(!layout.has_scales() || layout.head_dim % kKvGroup == 0,
          "head_dim is not a multiple of 32 for this KV type");

  const int64_t block_size = layout.block_size;
  const auto width = static_cast<size_t>(dims.rope.rotary_dim);
  const int64_t max_position =
      width == 0 ? INT32_MAX
                 : static_cast<int64_t>(dims.rope.coarse.size() / width) * RopeTables::kFine;
  for (size_t s = 0; s < num_seqs; ++s) {
    const int first = batch.query_start[s], end = batch.query_start[s + 1];
    require(first < end && end <= batch.num_tokens(), "a sequence without rows");
    require(batch.context_len[s] > 0, "context_len below 1");
    const int64_t num_blocks = (batch.context_len[s] + block_size - 1) / block_size;
    require(num_blocks <= batch.max_blocks, "context_len beyond the block table");
    const int32_t *table = batch.block_tables.data() + s * static_cast<size_t>(batch.max_blocks);
    for (int64_t b = 0; b < num_blocks; ++b) {
      require(table[b] >= 0 && table[b] < kv.num_blocks, "a block id outside the pool");
    }
    for (int row = first; row < end; ++row) {
      const auto i = static_cast<size_t>(row);
      const int64_t position = batch.positions[i];
      require(batch.seq_index[i] == static_cast<int32_t>(s),
              "seq_index does not follow query_start");
      require(position == batch.context_len[s] - (end - row),
              "positions do not end at context_len");
      require(position >= 0 && position < max_position, "a position outside the RoPE tables");
      require(
          batch.kv_indices[i] == table[position / block_size] * block_size + position % block_size,
          "kv_indices differs from the block table");
      require(batch.token_ids[i] >= ForwardBatch::kSampledOnDevice &&
                  batch.token_ids[i] < dims.vocab_size,
              "a token id outside the vocabulary");
    }
  }
  int32_t previous = -1;
  for (const int32_t row : batch.logit_rows) {
    require(row > previous && row < batch.num_tokens(),
            "logit_rows are not ascending rows of the batch");
    previous = row;
  }
}

void Backend::check_kv(const KvView & /*kv*/) const {}

void Backend::reserve(Workspace & /*ws*/, int /*max_step_tokens*/) {}

void Backend::run_step(Workspace & /*ws*/, const ForwardBatch & /*batch*/,
                       const std::function<void()> &stages) {
  stages();
}

bool Backend::sample(Workspace & /*ws*/, const ForwardBatch & /*batch*/,
                     Span<const SampleRow> /*rows*/, Span<int32_t> /*token_ids*/) {
  return false;
}

bool Backend::is_computing() { return false; }

bool Backend::start_sample(Workspace & /*ws*/, const ForwardBatch & /*batch*/,
                           Span<const SampleRow> /*rows*/) {
  return false;
}

void Backend::finish_sample(Workspace & /*ws*/, Span<int32_t> /*token_ids*/) {
  throw Error(Status::kInternal, "no sampling was started");
}

}  // namespace xllm
