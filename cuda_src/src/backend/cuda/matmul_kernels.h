// The kernels behind matmul.h, one file of launchers each. All give the same bytes
// (matmul_args.cuh); which of them runs is matmul.cu's choice.
#pragma once

#include "backend/cuda/launch.h"
#include "backend/cuda/matmul_args.cuh"

namespace xllm {
namespace cuda {

constexpr int kMaxFewTokens = 4;
constexpr int kMaxTileTokens = 64;

// dp4a, every GPU, any number of tokens; wants args.act.
void launch_gemv(const Launch &launch, const MatmulArgs &args);

// Tensor cores (sm_80 and up), 1 to 4 tokens; args.rows or args.act. prepare once per device.
void prepare_few(Device *device);
void launch_mma_few(const Launch &launch, const MatmulArgs &args);

// Tensor cores, 5 tokens and more (fewer are taken, too); wants args.act.
void prepare_tile(Device *device);
void launch_mma_tile(const Launch &launch, const MatmulArgs &args);
// Whether the product is faster with its slices spread over CTAs: then kPartials is asked for in
// place of kStore or kAddTo, and the row kernel that follows adds them up.
bool tile_wants_partials(const Device &device, const MatmulArgs &args);
// How many of args.num_tokens a launch should take. may_cut: it may leave partials, for up to
// kMaxTileTokens tokens.
int tile_launch_tokens(const Device &device, const MatmulArgs &args, bool may_cut);

}  // namespace cuda
}  // namespace xllm
