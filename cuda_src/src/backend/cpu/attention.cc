// act = Q(softmax(q k^T * scale) v) over each row's cached keys: online softmax (arXiv:1805.02867)
// over tiles of kKeyTile keys, begun anew every kKeySplit keys and merged in ascending order
// (arXiv:2311.01282). All boundaries are absolute positions, so a row's additions depend on its
// position alone. A tile is read from
// the cache once for all rows and heads of a piece of work.
#include <algorithm>
#include <cmath>

#include "backend/cpu/attention_plan.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/hadamard.h"

namespace xllm::cpu {
namespace {

struct Inputs {
  const Kernels *kernels;
  const ModelDims *dims;
  const KvView *kv;
  const ForwardBatch *batch;
  CpuWorkspace *ws;
  int layer;

  int group() const { return dims->num_heads / dims->num_kv_heads; }
  int position(int row) const { return batch->positions[static_cast<size_t>(row)]; }
  // First key that a row attends to.
  int first_key(int row) const {
    return dims->sliding_window > 0 ? std::max(0, position(row) - dims->sliding_window + 1) : 0;
  }
  int first_split(int row) const { return first_key(row) / kKeySplit; }
  int end_split(int row) const { return position(row) / kKeySplit + 1; }
  AttentionState part(float *floats) const {
    return {floats[dims->head_dim], floats[dims->head_dim + 1], floats};
  }
  void keep(const AttentionState &state) const {
    state.out[dims->head_dim] = state.max;
    state.out[dims->head_dim + 1] = state.denominator;
  }
};

// Consecutive rows of one sequence by the heads of one KV head.
struct Piece {
  int seq;
  int first_row, num_rows;
  int kv_head;
};

// The block ids of a piece's sequence.
const int32_t *table_of(const Inputs &in, const Piece &piece) {
  return in.batch->block_tables.data() +
         static_cast<size_t>(piece.seq) * static_cast<size_t>(in.batch->max_blocks);
}

// Keys [lo, hi) of the tile at `start` as f32 rows of k and v, through the block table.
void load_tile(const Inputs &in, const Piece &piece, int start, int lo, int hi, float *k,
               float *v) {
  const KvView &kv = *in.kv;
  const int block_size = kv.layout.block_size, head_dim = kv.layout.head_dim;
  const int32_t *table = table_of(in, piece);
  for (int j = lo; j < hi;) {
    const int block = table[(start + j) / block_size], offset = (start + j) % block_size;
    const int count = std::min(hi - j, block_size - offset);
    const int64_t at = int64_t{j} * head_dim;
    in.kernels->load_kv(kv.layout, kv.k_page(in.layer, block, piece.kv_head), offset, count,
                        k + at);
    in.kernels->load_kv(kv.layout, kv.v_page(in.layer, block, piece.kv_head), offset, count,
                        v + at);
    j += count;
  }
}

// The tile at `start` where it lies, as far as keys [first, end) reach into it.
HalfTile find_tile(const Inputs &in, const Piece &piece, int start, int first, int end) {
  const KvView &kv = *in.kv;
  const int block_size = kv.layout.block_size;
  HalfTile tile;
  for (int i = 0; i < kKeyTile / kTilePiece; ++i) {
    const int position = start + i * kTilePiece;
    if (position >= end || position + kTilePiece <= first) continue;
    const int block = table_of(in, piece)[position / block_size];
    const int64_t at = int64_t{position % block_size} * kv.layout.head_dim;
    const auto rows = [&](const uint8_t *page) {
      return reinterpret_cast<const uint16_t *>(page) + at;
    };
    tile.k[i] = rows(kv.k_page(in.layer, block, piece.kv_head));
    tile.v[i] = rows(kv.v_page(in.layer, block, piece.kv_head));
  }
  return tile;
}

// The parts of one split: parts[r] holds those of the group's heads for row r, where the row
// reaches into the split. `tiles` is 2 * kKeyTile * head_dim floats of scratch.
void attend_split(const Inputs &in, const Piece &piece, int split, float *const *parts,
                  float *tiles) {
  const int head_dim = in.dims->head_dim, group = in.group();
  const int64_t stride = part_floats(*in.dims);
  for (int r = 0; r < piece.num_rows; ++r) {
    for (int h = 0; h < group; ++h) {
      float *part = parts[r] + h * stride;
      std::fill_n(part, head_dim, 0.0f);
      in.keep({-HUGE_VALF, 0, part});
    }
  }
  float *k = tiles, *v = k + int64_t{kKeyTile} * head_dim;
  const int last_row = piece.first_row + piece.num_rows - 1;
  const int first = std::max(split * kKeySplit, in.first_key(piece.first_row));
  const int end = std::min((split + 1) * kKeySplit, in.position(last_row) + 1);
  const KvLayout &layout = in.kv->layout;
  const bool is_direct = in.kernels->attend_halves != nullptr && layout.type == KvType::kF16 &&
                         head_dim % 16 == 0 && layout.block_size % kTilePiece == 0;
  HalfTile tile, next;
  for (int start = first / kKeyTile * kKeyTile; start < end; start += kKeyTile) {
    if (is_direct) {
      tile = find_tile(in, piece, start, first, end);
      // Beyond the split as well: most often the next one is this thread's, too.
      next = find_tile(in, piece, start + kKeyTile, first, in.position(last_row) + 1);
    } else {
      load_tile(in, piece, start, std::max(0, first - start), std::min(kKeyTile, end - start), k,
                v);
    }
    for (int r = 0; r < piece.num_rows; ++r) {
      const int row = piece.first_row + r;
      const int lo = std::max(0, in.first_key(row) - start);
      const int hi = std::min(kKeyTile, in.position(row) + 1 - start);
      if (lo >= hi) continue;
      for (int h = 0; h < group; h += kQueryGroup) {
        const int count = std::min(kQueryGroup, group - h);
        const float *q = in.ws->q(row) + int64_t{piece.kv_head * group + h} * head_dim;
        AttentionState states[kQueryGroup];
        for (int i = 0; i < count; ++i) states[i] = in.part(parts[r] + (h + i) * stride);
        const float scale = in.dims->attention_scale;
        if (is_direct) {
          in.kernels->attend_halves(q, count, tile, next, head_dim, lo, hi, scale, states);
          next = {};  // asked for already
        } else {
          in.kernels->attend_tile(q, count, k, v, head_dim, lo, hi, scale, states);
        }
        for (int i = 0; i < count; ++i) in.keep(states[i]);
      }
    }
  }
}

// Adds the part of a later split to what came before, or begins with it.
void fold_part(const Inputs &in, bool is_first, float *sum, float *part) {
  if (is_first) {
    std::copy_n(part, part_floats(*in.dims), sum);
    return;
  }
  AttentionState into = in.part(sum);
  in.kernels->merge_attention(&into, in.part(part), in.dims->head_dim);
  in.keep(into);
}

// Divides by the denominator; the result is the head's piece of the activations.
void finish_head(const Inputs &in, int row, int head, const float *sum) {
  const int head_dim = in.dims->head_dim;
  float *out = in.ws->attn_act().f(row) + int64_t{head} * head_dim;
  const float inverse = 1.0f / sum[head_dim + 1];
  for (int c = 0; c < head_dim; ++c) out[c] = sum[c] * inverse;
  if (in.kv->layout.has_scales()) hadamard(out, head_dim);  // its own inverse: undoes v's
}

// All splits of a piece, one after the other.
void attend_piece(const Inputs &in, const Piece &piece, float *scratch) {
  const int group = in.group();
  const int64_t stride = part_floats(*in.dims);
  float *parts_memory = scratch + int64_t{2} * kKeyTile * in.dims->head_dim;
  float *sums = parts_memory + kQueryRows * group * stride;
  float *parts[kQueryRows];
  for (int r = 0; r < kQueryRows; ++r) parts[r] = parts_memory + r * group * stride;

  const int last_row = piece.first_row + piece.num_rows - 1;
  for (int split = in.first_split(piece.first_row); split < in.end_split(last_row); ++split) {
    attend_split(in, piece, split, parts, scratch);
    for (int r = 0; r < piece.num_rows; ++r) {
      const int row = piece.first_row + r;
      if (split < in.first_split(row) || split >= in.end_split(row)) continue;
      for (int h = 0; h < group; ++h) {
        fold_part(in, split == in.first_split(row), sums + (r * group + h) * stride,
                  parts[r] + h * stride);
      }
    }
  }
  for (int r = 0; r < piece.num_rows; ++r) {
    for (int h = 0; h < group; ++h) {
      finish_head(in, piece.first_row + r, piece.kv_head * group + h,
                  sums + (r * group + h) * stride);
    }
  }
}

// The rows of block `index`, counted over all sequences.
Piece find_rows(const ForwardBatch &batch, int64_t index) {
  Piece piece = {0, 0, 0, 0};
  for (;; ++piece.seq) {
    const auto s = static_cast<size_t>(piece.seq);
    const int first = batch.query_start[s], end = batch.query_start[s + 1];
    const int64_t blocks = (end - first + kQueryRows - 1) / kQueryRows;
    if (index < blocks) {
      piece.first_row = first + static_cast<int>(index) * kQueryRows;
      piece.num_rows = std::min(kQueryRows, end - piece.first_row);
      return piece;
    }
    index -= blocks;
  }
}

int64_t count_row_blocks(const ForwardBatch &batch) {
  int64_t blocks = 0;
  for (size_t s = 0; s + 1 < batch.query_start.size(); ++s) {
    blocks += (batch.query_start[s + 1] - batch.query_start[s] + kQueryRows - 1) / kQueryRows;
  }
  return blocks;
}

}  // namespace

void CpuBackend::attention(Workspace &ws_base, const WeightSet &weights_base, int layer,
                           const KvView &kv, const ForwardBatch &batch) {
  CpuWorkspace &ws = as_cpu(ws_base);
  const CpuWeights &weights = as_cpu(weights_base);
  const ModelDims &dims = weights.dims();
  const Inputs in = {kernels_, &dims, &kv, &batch, &ws, layer};
  const int group = in.group();
  const int64_t num_blocks = count_row_blocks(batch), num_pieces = num_blocks * dims.num_kv_heads;

  // Where there are too few pieces to go round, their splits are pieces of their own.
  int64_t max_splits = 0, total_splits = 0;
  for (int row = 0; row < batch.num_tokens(); ++row) {
    const int64_t splits = in.end_split(row) - in.first_split(row);
    max_splits = std::max(max_splits, splits);
    total_splits += splits;
  }
  const int64_t row_floats = dims.num_heads * part_floats(dims);
  const bool spreads = pool_.num_threads() > 1 && num_pieces < int64_t{4} * pool_.num_threads() &&
                       max_splits > 1 && total_splits * row_floats <= kMaxPartFloats;
  if (spreads) {
    spread_attention(ws, dims, layer, kv, batch, total_splits * row_floats);
  } else {
    pool_.parallel_for(num_pieces, [&](int64_t chunk, int thread) {
      // The longest rows of a prompt come last; begin with them, so that the threads end together.
      Piece piece = find_rows(batch, num_blocks - 1 - chunk / dims.num_kv_heads);
      piece.kv_head = static_cast<int>(chunk % dims.num_kv_heads);
      attend_piece(in, piece, ws.thread_scratch(thread));
      if (weights.form() != WeightForm::kRaw || dims.head_dim % 32 != 0) return;
      for (int row = piece.first_row; row < piece.first_row + piece.num_rows; ++row) {
        ws.attn_act().quantize(*kernels_, Precision::kFine, row,
                               piece.kv_head * group * dims.head_dim, group * dims.head_dim);
      }
    });
  }
  if (weights.form() == WeightForm::kRaw && (spreads || dims.head_dim % 32 != 0)) {
    pool_.parallel_for(batch.num_tokens(), [&](int64_t row, int) {
      ws.attn_act().quantize(*kernels_, Precision::kFine, static_cast<int>(row));
    });
  }
  ws.last_act = &ws.attn_act();
}

void CpuBackend::spread_attention(CpuWorkspace &ws, const ModelDims &dims, int layer,
                                  const KvView &kv, const ForwardBatch &batch, int64_t num_floats) {
  const Inputs in = {kernels_, &dims, &kv, &batch, &ws, layer};
  const int group = in.group();
  const int64_t stride = part_floats(dims), row_floats = dims.num_heads * stride;
  float *memory = ws.attention_parts(num_floats);
  // The parts of a row, [splits, num_heads]; few rows, so that summing anew costs nothing.
  const auto parts_of = [&](int row) {
    float *parts = memory;
    for (int r = 0; r < row; ++r) parts += (in.end_split(r) - in.first_split(r)) * row_floats;
    return parts;
  };
  const auto splits_of = [&](const Piece &piece, int *first) {
    *first = in.first_split(piece.first_row);
    return in.end_split(piece.first_row + piece.num_rows - 1) - *first;
  };

  const int64_t num_blocks = count_row_blocks(batch);
  int64_t num_chunks = 0;
  for (int64_t b = 0; b < num_blocks; ++b) {
    int first;
    num_chunks += int64_t{splits_of(find_rows(batch, b), &first)} * dims.num_kv_heads;
  }
  pool_.parallel_for(num_chunks, [&](int64_t chunk, int thread) {
    Piece piece = {};
    int first = 0;
    for (int64_t b = 0;; ++b) {
      piece = find_rows(batch, b);
      const int64_t chunks = int64_t{splits_of(piece, &first)} * dims.num_kv_heads;
      if (chunk < chunks) break;
      chunk -= chunks;
    }
    piece.kv_head = static_cast<int>(chunk % dims.num_kv_heads);
    const int split = first + static_cast<int>(chunk / dims.num_kv_heads);
    // Rows that do not reach into this split have no place for it: their parts go to the scratch.
    float *spare = ws.thread_scratch(thread) + int64_t{2} * kKeyTile * dims.head_dim;
    float *parts[kQueryRows];
    for (int r = 0; r < piece.num_rows; ++r) {
      const int row = piece.first_row + r;
      const bool reaches = split >= in.first_split(row) && split < in.end_split(row);
      parts[r] = reaches ? parts_of(row) + (split - in.first_split(row)) * row_floats +
                               piece.kv_head * group * stride
                         : spare;
    }
    attend_split(in, piece, split, parts, ws.thread_scratch(thread));
  });
  pool_.parallel_for(batch.num_tokens(), [&](int64_t chunk, int) {
    const int row = static_cast<int>(chunk);
    float *parts = parts_of(row);
    const int splits = in.end_split(row) - in.first_split(row);
    for (int head = 0; head < dims.num_heads; ++head) {
      float *sum = parts + head * stride;  // the first split's own place
      for (int split = 1; split < splits; ++split) {
        fold_part(in, false, sum, parts + split * row_floats + head * stride);
      }
      finish_head(in, row, head, sum);
    }
  });
}

}  // namespace xllm::cpu
