// The part of a table of kernels that is written once, over the lanes L of an instruction set:
// float products, the arithmetic of rows, the cache's rows and attention.
//
// Internal linkage: see lanes_scalar.h.
#pragma once

#include "backend/cpu/attention_tile.h"
#include "backend/cpu/float_dot.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/kv_rows.h"
#include "backend/cpu/row_math.h"

namespace xllm::cpu {
namespace {

// Everything but the name, `quantize` and the products with quantised weights.
template <typename L>
void set_lane_kernels(Kernels *k) {
  k->dots[static_cast<int>(DType::kF32)] = float_dot<L, F32Weights<L>>;
  k->dots[static_cast<int>(DType::kF16)] = float_dot<L, F16Weights<L>>;
  k->dots[static_cast<int>(DType::kBF16)] = float_dot<L, BF16Weights<L>>;
  k->remainder = remainder_row<L>;
  k->rms_norm = rms_norm_row<L>;
  k->silu_mul = silu_mul_row<L>;
  k->add = add_row<L>;
  k->rope = rope_row<L>;
  k->store_kv = store_kv_row<L>;
  k->load_kv = load_kv_rows<L>;
  k->attend_tile = attend_tile_lanes<L>;
  k->merge_attention = merge_attention_lanes<L>;
}

}  // namespace
}  // namespace xllm::cpu
