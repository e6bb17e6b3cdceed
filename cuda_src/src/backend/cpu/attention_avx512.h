// Kernels::attend_tile and attend_halves with AVX-512.
#pragma once

#include "backend/cpu/kernels.h"

namespace xllm::cpu {

void avx512_attend_tile(const float *q, int num_queries, const float *k, const float *v,
                        int head_dim, int lo, int hi, float scale, AttentionState *states);

void avx512_attend_halves(const float *q, int num_queries, const HalfTile &tile,
                          const HalfTile &next, int head_dim, int lo, int hi, float scale,
                          AttentionState *states);

}  // namespace xllm::cpu
