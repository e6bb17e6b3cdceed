// The end of a group of tiles: slices added up, then what the product's epilogue asks for, a warp
// per token.
#pragma once

#include "backend/cuda/matmul_args.cuh"
#include "backend/cuda/row_norm.cuh"

namespace xllm {
namespace cuda {

// What stands in memory that an output is added to, asked for before the product so that it is
// there after it: for row `lane` of the group.
struct GroupOutputs {
  int column;  // of the output; < 0: there is no such row
  float residual, bias, norm_weight;
};

// What no kernel writes; may be called before the previous kernel is done.
__device__ __forceinline__ GroupOutputs output_place(const MatmulArgs &args, int group) {
  GroupOutputs before = {-1, 0.0f, 0.0f, 0.0f};
  if (args.epilogue == kSwiGlu) return before;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int s, tile;
  if (lane / kTileRows >= group_tiles(args) ||
      !find_tile(args, group, lane / kTileRows, &s, &tile)) {
    return before;
  }
  const int local = tile * kTileRows + lane % kTileRows;
  if (local >= args.segments[s].num_rows) return before;
  before.column = args.segments[s].out_row + local;
  if (args.bias != nullptr) before.bias = args.bias[before.column];
  if (args.epilogue == kAddNorm) before.norm_weight = args.norm_weight[before.column];
  return before;
}

__device__ __forceinline__ void load_residual(const MatmulArgs &args, int token,
                                              GroupOutputs *before) {
  if (before->column < 0 || args.epilogue == kStore) return;
  before->residual =
      args.out[static_cast<int64_t>(args.first_token + token) * args.out_stride + before->column];
}

// ((p0 + p1) + p2) + ... of the slices that there are.
__device__ __forceinline__ float sum_slices(const float (&p)[kMaxSlices], int num_slices) {
  float y = p[0];
#pragma unroll
  for (int i = 1; i < kMaxSlices; ++i) y = i < num_slices ? __fadd_rn(y, p[i]) : y;
  return y;
}

// By one warp. output(tile of the group, row of the tile): the sum of an output's slices.
template <typename Output>
__device__ __forceinline__ void finish_token(const MatmulArgs &args, int group, int token,
                                             const GroupOutputs &before, const Output &output) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int row = args.first_token + token;
  if (args.epilogue == kSwiGlu) {
    const float gate = output(lane >> 4, lane & 15);
    const float up = output(2 + (lane >> 4), lane & 15);
    quantize_block(__fmul_rn(silu(gate), up), args.act_out, row, group);
    return;
  }
  if (args.epilogue == kAddNorm) {
    float y = output(lane >> 4, lane & 15);
    if (args.bias != nullptr) y = __fadd_rn(y, before.bias);
    const float x = __fadd_rn(before.residual, y);
    args.out[static_cast<int64_t>(row) * args.out_stride + group * kActBlock + lane] = x;
    const float squares = block_squares(x);
    const float2 raw = quantize_codes(__fmul_rn(x, before.norm_weight), args.act_out, row, group);
    if (lane == 0) {
      args.squares_out[row * args.num_groups + group] = squares;
      args.act_out.scales[args.act_out.entry(row, group)] = raw;
    }
    return;
  }
  if (before.column >= 0) {
    float y = output(lane / kTileRows, lane % kTileRows);
    if (args.bias != nullptr) y = __fadd_rn(y, before.bias);
    args.out[static_cast<int64_t>(row) * args.out_stride + before.column] =
        args.epilogue == kAddTo ? __fadd_rn(before.residual, y) : y;
  }
  for (int i = lane + kWarp; i < group_tiles(args) * kTileRows; i += kWarp) {
    int s, tile;
    if (!find_tile(args, group, i / kTileRows, &s, &tile)) return;
    finish_output(args, args.segments[s], tile, i % kTileRows, token,
                  output(i / kTileRows, i % kTileRows));
  }
}

}  // namespace cuda
}  // namespace xllm
