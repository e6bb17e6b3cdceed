// Attention of the rows of prompts in tiles (prompt_wide.cuh, prompt_attention.cuh).
#pragma once

#include "backend/cuda/attention_args.cuh"
#include "backend/cuda/launch.h"

namespace xllm::cuda {

// Opts the kernels in to the shared memory they use; once per device.
void prepare_prompt_attention(const Device &device);

// False: every row takes the kernel of attention.cuh. The cache is one that it takes; bits: of a
// value there.
bool has_prompt_attention(const Device &device, int head_dim, int group_size, int bits);

// Rows of `num_tiles` tiles from args.first_tile on, num_rows in all, whose contexts have at most
// num_splits splits. args.max_splits: at least as many.
void prompt_attention(const Launch &launch, AttentionArgs args, int num_splits, int num_tiles,
                      int num_rows);

// Of prompt_wide.cuh, which takes what it can of these: the same by itself.
void prepare_wide_attention(const Device &device);
bool has_wide_attention(const Device &device, int head_dim, int group_size, int bits);
void wide_attention(const Launch &launch, AttentionArgs args, int num_splits, int num_tiles,
                    int num_rows);

}  // namespace xllm::cuda
