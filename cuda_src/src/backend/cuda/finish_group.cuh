// The end of a group of tiles: slices added up, then what the product's epilogue asks for. Called
// by a whole CTA.
#pragma once

#include "backend/cuda/matmul_args.cuh"
#include "backend/cuda/row_norm.cuh"

namespace xllm {
namespace cuda {

// Tiles of a group: what a CTA finishes at once.
XLLM_HOST_DEVICE int group_tiles(int epilogue) {
  return epilogue == kSwiGlu ? 4 : epilogue == kAddNorm ? 2 : 1;
}

// What stands in memory that this thread's output is added to, asked for before the product so that
// it is there after it: the residual and the bias, of output (row, token) threadIdx.x; of kAddNorm
// row `lane` and token `warp`.
struct GroupOutputs {
  float residual, bias, norm_weight;
};

__device__ __forceinline__ GroupOutputs norm_group_before(const MatmulArgs &args, int token,
                                                          int group) {
  GroupOutputs before = {0.0f, 0.0f, 0.0f};
  if (token >= args.num_tokens) return before;
  const int column = group * kActBlock + (static_cast<int>(threadIdx.x) & 31);
  before.norm_weight = args.norm_weight[column];
  if (args.bias != nullptr) before.bias = args.bias[column];
  before.residual =
      args.out[static_cast<int64_t>(args.first_token + token) * args.out_stride + column];
  return before;
}

__device__ __forceinline__ GroupOutputs outputs_before(const MatmulArgs &args, int pad, int group) {
  GroupOutputs before = {0.0f, 0.0f, 0.0f};
  if (args.epilogue == kSwiGlu) return before;
  if (args.epilogue == kAddNorm)
    return norm_group_before(args, static_cast<int>(threadIdx.x) >> 5, group);
  const int row = static_cast<int>(threadIdx.x) % kTileRows;
  const int token = static_cast<int>(threadIdx.x) / kTileRows;
  if (token >= args.num_tokens || token >= pad) return before;
  int s, tile;
  find_tile(args, group, 0, &s, &tile);
  const MatmulSegment &segment = args.segments[s];
  const int local = tile * kTileRows + row;
  if (local >= segment.num_rows) return before;
  const int column = segment.out_row + local;
  if (args.bias != nullptr) before.bias = args.bias[column];
  if (args.epilogue == kAddTo) {
    before.residual =
        args.out[static_cast<int64_t>(args.first_token + token) * args.out_stride + column];
  }
  return before;
}

// ((p0 + p1) + p2) + ... of the slices that there are.
__device__ __forceinline__ float sum_slices(const float (&p)[kMaxSlices], int num_slices) {
  float y = p[0];
#pragma unroll
  for (int i = 1; i < kMaxSlices; ++i) y = i < num_slices ? __fadd_rn(y, p[i]) : y;
  return y;
}

// output(tile of the group, row, token): the sum of an output's slices.
template <typename Output>
__device__ __forceinline__ void finish_group(const MatmulArgs &args, int group,
                                             const GroupOutputs &before, const Output &output) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  if (args.epilogue == kSwiGlu) {
    for (int token = warp; token < args.num_tokens; token += static_cast<int>(blockDim.x) / kWarp) {
      const float gate = output(lane >> 4, lane & 15, token);
      const float up = output(2 + (lane >> 4), lane & 15, token);
      quantize_block(__fmul_rn(silu(gate), up), args.act_out, args.first_token + token, group);
    }
    return;
  }
  if (args.epilogue == kAddNorm) {
    for (int token = warp; token < args.num_tokens; token += static_cast<int>(blockDim.x) / kWarp) {
      const GroupOutputs now = token == warp ? before : norm_group_before(args, token, group);
      const int row = args.first_token + token;
      float y = output(lane >> 4, lane & 15, token);
      if (args.bias != nullptr) y = __fadd_rn(y, now.bias);
      const float x = __fadd_rn(now.residual, y);
      args.out[static_cast<int64_t>(row) * args.out_stride + group * kActBlock + lane] = x;
      const float squares = block_squares(x);
      const float2 raw = quantize_codes(__fmul_rn(x, now.norm_weight), args.act_out, row, group);
      if (lane == 0) {
        args.squares_out[row * args.num_groups + group] = squares;
        args.act_out.scales[args.act_out.entry(row, group)] = raw;
      }
    }
    return;
  }
  int s, tile;
  find_tile(args, group, 0, &s, &tile);
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * args.num_tokens;
       i += static_cast<int>(blockDim.x)) {
    const int row = i % kTileRows, token = i / kTileRows;
    const float y = output(0, row, token);
    if (i != static_cast<int>(threadIdx.x)) {
      finish_output(args, args.segments[s], tile, row, token, y);
      continue;
    }
    const MatmulSegment &segment = args.segments[s];
    const int local = tile * kTileRows + row;
    if (local >= segment.num_rows) continue;
    const float with_bias = args.bias != nullptr ? __fadd_rn(y, before.bias) : y;
    args.out[static_cast<int64_t>(args.first_token + token) * args.out_stride + segment.out_row +
             local] = args.epilogue == kAddTo ? __fadd_rn(before.residual, with_bias) : with_bias;
  }
}

// The same where `partials` [group tiles][slices][16 rows][pad tokens] hold whole slices.
__device__ __forceinline__ void finish_group(const MatmulArgs &args, const float *partials, int pad,
                                             int group, const GroupOutputs &before) {
  const int slice_stride = kTileRows * pad;
  finish_group(args, group, before, [&](int index, int row, int token) {
    const float *p = partials + index * args.num_slices * slice_stride + row * pad + token;
    float v[kMaxSlices];
#pragma unroll
    for (int i = 0; i < kMaxSlices; ++i) v[i] = i < args.num_slices ? p[i * slice_stride] : 0.0f;
    return sum_slices(v, args.num_slices);
  });
}

}  // namespace cuda
}  // namespace xllm
