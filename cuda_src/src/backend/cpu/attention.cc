// act = Q(softmax(q k^T * scale) v) over each row's cached keys: online softmax (arXiv:1805.02867)
// over tiles of kKeyTile keys whose boundaries are absolute positions, so a row's additions depend
// on its position alone. A tile is read from the cache once for all rows and heads of a piece of
// work; no scratch grows with the context.
#include <algorithm>
#include <cmath>

#include "backend/cpu/attention_plan.h"
#include "backend/cpu/cpu_backend.h"

namespace xllm::cpu {
namespace {

// One piece of work: rows [first_row, first_row + num_rows) of one sequence by heads [first_head,
// first_head + num_heads), which share a KV head.
struct Piece {
  int seq;
  int first_row, num_rows;
  int first_head, num_heads;
};

struct Inputs {
  const Kernels *kernels;
  const ModelDims *dims;
  const KvView *kv;
  const ForwardBatch *batch;
  int layer;
};

// Keys [lo, hi) of the tile at `start` as f32 rows of k and v, through the block table.
void load_tile(const Inputs &in, const Piece &piece, int start, int lo, int hi, float *k,
               float *v) {
  const KvView &kv = *in.kv;
  const int block_size = kv.layout.block_size, head_dim = kv.layout.head_dim;
  const int kv_head = piece.first_head / (in.dims->num_heads / in.dims->num_kv_heads);
  const int32_t *table = in.batch->block_tables.data() +
                         static_cast<size_t>(piece.seq) * static_cast<size_t>(in.batch->max_blocks);
  for (int j = lo; j < hi; ++j) {
    const int block = table[(start + j) / block_size], offset = (start + j) % block_size;
    in.kernels->load_kv(kv.layout, kv.k_page(in.layer, block, kv_head), offset,
                        k + int64_t{j} * head_dim);
    in.kernels->load_kv(kv.layout, kv.v_page(in.layer, block, kv_head), offset,
                        v + int64_t{j} * head_dim);
  }
}

// First key that a row at `position` attends to.
int first_key(const ModelDims &dims, int position) {
  return dims.sliding_window > 0 ? std::max(0, position - dims.sliding_window + 1) : 0;
}

void attend_piece(const Inputs &in, const Piece &piece, CpuWorkspace &ws, float *scratch) {
  const ModelDims &dims = *in.dims;
  const int head_dim = dims.head_dim;
  float *k = scratch, *v = k + int64_t{kKeyTile} * head_dim;
  float *max = v + int64_t{kKeyTile} * head_dim,
        *denominator = max + piece.num_rows * piece.num_heads;
  const auto out_row = [&](int r) {
    return ws.attn_act().f(piece.first_row + r) + int64_t{piece.first_head} * head_dim;
  };

  for (int r = 0; r < piece.num_rows; ++r) {
    std::fill_n(out_row(r), piece.num_heads * head_dim, 0.0f);
  }
  std::fill_n(max, piece.num_rows * piece.num_heads, -HUGE_VALF);
  std::fill_n(denominator, piece.num_rows * piece.num_heads, 0.0f);

  const int32_t *positions = in.batch->positions.data() + piece.first_row;
  const int last = positions[piece.num_rows - 1];
  const int first = first_key(dims, positions[0]);
  for (int start = first / kKeyTile * kKeyTile; start <= last; start += kKeyTile) {
    load_tile(in, piece, start, std::max(0, first - start), std::min(kKeyTile, last + 1 - start), k,
              v);
    for (int r = 0; r < piece.num_rows; ++r) {
      const int lo = std::max(0, first_key(dims, positions[r]) - start);
      const int hi = std::min(kKeyTile, positions[r] + 1 - start);
      if (lo >= hi) continue;
      for (int h = 0; h < piece.num_heads; ++h) {
        const int i = r * piece.num_heads + h;
        AttentionState state = {max[i], denominator[i], out_row(r) + int64_t{h} * head_dim};
        in.kernels->attend_tile(
            ws.q(piece.first_row + r) + int64_t{piece.first_head + h} * head_dim, k, v, head_dim,
            lo, hi, dims.attention_scale, &state);
        max[i] = state.max;
        denominator[i] = state.denominator;
      }
    }
  }
  for (int r = 0; r < piece.num_rows; ++r) {
    for (int h = 0; h < piece.num_heads; ++h) {
      float *out = out_row(r) + int64_t{h} * head_dim;
      const float inverse = 1.0f / denominator[r * piece.num_heads + h];
      for (int c = 0; c < head_dim; ++c) out[c] *= inverse;
    }
  }
}

}  // namespace

void CpuBackend::attention(Workspace &ws_base, const WeightSet &weights_base, int layer,
                           const KvView &kv, const ForwardBatch &batch) {
  CpuWorkspace &ws = as_cpu(ws_base);
  const CpuWeights &weights = as_cpu(weights_base);
  const ModelDims &dims = weights.dims();
  const Inputs in = {kernels_, &dims, &kv, &batch, layer};
  const int group = dims.num_heads / dims.num_kv_heads;

  int64_t num_blocks = 0;  // of up to kQueryRows rows
  for (int s = 0; s < batch.num_seqs(); ++s) {
    const auto i = static_cast<size_t>(s);
    num_blocks += (batch.query_start[i + 1] - batch.query_start[i] + kQueryRows - 1) / kQueryRows;
  }
  // Heads of a group share tiles, unless there are too few pieces to go round.
  const int heads = num_blocks * dims.num_kv_heads < int64_t{4} * pool_.num_threads() ? 1 : group;
  const int64_t pieces_per_block = dims.num_heads / heads;
  const bool is_raw = weights.form() == WeightForm::kRaw;
  const bool can_quantize_heads = dims.head_dim % 32 == 0;
  pool_.parallel_for(num_blocks * pieces_per_block, [&](int64_t chunk, int thread) {
    // The longest rows of a prompt come last; begin with them, so that the threads end together.
    int64_t block = num_blocks - 1 - chunk / pieces_per_block;
    Piece piece = {0, 0, 0, static_cast<int>(chunk % pieces_per_block) * heads, heads};
    for (;; ++piece.seq) {
      const auto i = static_cast<size_t>(piece.seq);
      const int rows = batch.query_start[i + 1] - batch.query_start[i];
      const int64_t blocks = (rows + kQueryRows - 1) / kQueryRows;
      if (block < blocks) {
        piece.first_row = batch.query_start[i] + static_cast<int>(block) * kQueryRows;
        piece.num_rows = std::min(kQueryRows, batch.query_start[i + 1] - piece.first_row);
        break;
      }
      block -= blocks;
    }
    attend_piece(in, piece, ws, ws.thread_scratch(thread));
    if (!is_raw || !can_quantize_heads) return;
    for (int r = 0; r < piece.num_rows; ++r) {
      ws.attn_act().quantize(*kernels_, piece.first_row + r, piece.first_head * dims.head_dim,
                             heads * dims.head_dim);
    }
  });
  if (is_raw && !can_quantize_heads) {
    pool_.parallel_for(batch.num_tokens(), [&](int64_t t, int) {
      ws.attn_act().quantize(*kernels_, static_cast<int>(t));
    });
  }
  ws.last_act = &ws.attn_act();
}

}  // namespace xllm::cpu
